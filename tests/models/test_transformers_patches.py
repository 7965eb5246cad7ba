"""Patches of transformers: transformers without each patch still has the fault.

A test named `test_upstream_...` fails once transformers has fixed the fault; then the patch goes.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, StaticCache
from transformers.masking_utils import create_causal_mask

from rlhf.errors import DependencyError
from rlhf.models import transformers_patches as patches
from rlhf.models.forward import model_inputs
from tests.helpers import llama


@pytest.mark.parametrize("version", ["4.57.1", "5.16.2", "6.0.0", "unknown"])
def test_check_version_rejects_untested_releases(version):
    with pytest.raises(DependencyError, match=rf"got {version}; install it with: pip install 'transformers>=5.17,<6'"):
        patches.check_version(version)


@pytest.mark.parametrize("version", ["5.17.0", "5.24.1", "5.25.0.dev0"])
def test_check_version_accepts_tested_releases(version):
    patches.check_version(version)


@pytest.fixture
def gpt_neo():
    torch.manual_seed(0)
    config = CONFIG_MAPPING["gpt_neo"](
        vocab_size=60,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        max_position_embeddings=32,
        window_size=3,
        attention_types=[[["global", "local"], 1]],
        attn_implementation="eager",
    )
    return AutoModelForCausalLM.from_config(config).eval()


def logits_over_cache(model, ids):
    cache = StaticCache(config=model.config, max_cache_len=16)
    mask = torch.ones(ids.shape[0], 16, dtype=torch.long)
    return model(**model_inputs(model, ids, mask, cache)).logits


@torch.no_grad()
def test_upstream_gpt_neo_hides_tokens_of_a_static_cache(gpt_neo):
    ids = torch.arange(8).view(1, 8)
    expected = gpt_neo(input_ids=ids).logits
    assert not torch.allclose(logits_over_cache(gpt_neo, ids), expected, atol=1e-4)
    local = patches.GPTNeoLocalAttention(gpt_neo, 16)
    local.set_prompt(8, 16)
    with local.replace_tables():
        torch.testing.assert_close(logits_over_cache(gpt_neo, ids), expected)


@pytest.mark.parametrize("kind", sorted(patches.STATIC_CACHE_WORKS))
def test_upstream_flags_working_static_cache_as_unsupported(kind):
    assert not MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]]._can_compile_fullgraph


def test_upstream_saves_under_the_names_of_a_key_mapping(tmp_path):
    llama(60).save_pretrained(tmp_path / "plain")
    names = load_file(tmp_path / "plain/model.safetensors")
    llama(60).save_pretrained(tmp_path / "renamed")
    save_file({f"old.{name}": tensor for name, tensor in names.items()}, tmp_path / "renamed/model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "renamed", key_mapping={"^old.": ""})

    model.save_pretrained(tmp_path / "again")
    assert set(load_file(tmp_path / "again/model.safetensors")) != set(names)
    patches.forget_key_mapping(model)
    model.save_pretrained(tmp_path / "patched")
    assert set(load_file(tmp_path / "patched/model.safetensors")) == set(names)


def test_upstream_reads_mask_values_on_the_host():
    config = llama(60).config
    config._attn_implementation = "sdpa"
    like, mask = torch.empty(2, 5, 0), torch.ones(2, 5, dtype=torch.long)
    assert create_causal_mask(config, like, mask, None) is None  # since all of it is 1
    built = patches.build_causal_mask(config, like, mask, None)
    assert built is not None and built.shape == (2, 1, 5, 5)
    # Tensors on the meta device have no values to read.
    patches.build_causal_mask(config, like.to("meta"), mask.to("meta"), None)
    with pytest.raises(Exception, match=r"meta|data-dependent"):
        create_causal_mask(config, like.to("meta"), mask.to("meta"), None)
