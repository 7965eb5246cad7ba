"""Shapes count every number of transformers' own models, by name and by config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.loader import parse_yaml
from rlhf.errors import ConfigError
from rlhf.models.shape import Shape, shape_from, shape_of
from tests.families.table import BY_NAME, FAMILIES, Family
from tests.helpers import mark_slow

KNOWN: dict[str, dict[str, Any]] = parse_yaml(
    (Path(__file__).parents[2] / "rlhf" / "models" / "known.yaml").read_text()
)


UNEVEN = {
    *("falcon_h1", "gpt_oss", "jetmoe", "lfm2", "mixtral", "phimoe"),
    *("qwen3_5_text", "qwen3_moe", "qwen3_next", "zamba2"),
}
"""Architectures with experts, recurrent layers or layers that differ, of which no plan can be made."""


def counts(config: Any, rank: int = 0) -> tuple[int, int, int]:
    """Count the language model, the one with a scalar head, and adapters, on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlhf.config.schema import LoraConfig
    from rlhf.models.lora import add_adapters
    from rlhf.models.scalar_head import build_scalar_head_class

    config.num_labels = 1
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        whole = sum(parameter.numel() for parameter in model.parameters())
        scalar = build_scalar_head_class(config)
        if scalar is None:
            from transformers import AutoModelForSequenceClassification as scalar
        with_head = sum(parameter.numel() for parameter in scalar.from_config(config).parameters())
        if rank:
            add_adapters(model, LoraConfig(rank=rank), seed=0)
    return whole, with_head, sum(p.numel() for p in model.parameters() if p.requires_grad)


def assert_counted(shape: Shape, config: Any, rank: int = 0) -> None:
    whole, with_head, adapters = counts(config, rank)
    assert shape.parameters() == whole
    assert shape.parameters(scalar_head=True) == with_head
    assert not rank or shape.adapters(rank) == adapters


OFTEN = set({(values["model_type"], *values): name for name, values in KNOWN.items()}.values())
"""One name of each architecture and set of keys; the values of the others are counted if all tests run."""


@pytest.mark.parametrize("name", mark_slow({name: name for name in KNOWN}, except_for=OFTEN))
def test_shape_of_known_name_counts_the_models_numbers(name: str) -> None:
    from transformers import CONFIG_MAPPING

    values = dict(KNOWN[name])
    assert_counted(shape_of(name), CONFIG_MAPPING[values.pop("model_type")](**values))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda row: row.name)
def test_shape_of_folder_counts_the_models_numbers(family: Family, tmp_path: Path) -> None:
    config = family.configuration()
    config.save_pretrained(tmp_path)
    if family.architecture in UNEVEN:
        with pytest.raises(ConfigError, match=r"no plan can be made|describes no model"):
            shape_of(str(tmp_path))
    else:
        assert_counted(shape_of(str(tmp_path)), config, rank=4)


@pytest.mark.parametrize(
    ("name", "kv_heads", "saved_ffn", "gated", "rms"),
    [
        ("OPT", 4, 1, False, False),
        ("GPT-2", 4, 6, False, False),
        ("Falcon", 1, 2, False, False),
        ("Mistral", 2, 4, True, True),
        ("StableLM", 2, 4, True, False),
        ("Nemotron", 2, 2, False, True),
    ],
)
def test_shape_reads_what_a_layer_keeps(name: str, kv_heads: int, saved_ffn: int, gated: bool, rms: bool) -> None:
    shape = shape_from(BY_NAME[name].configuration().to_dict(), name)
    assert (shape.kv_heads, shape.saved_ffn, shape.gated, shape.rms) == (kv_heads, saved_ffn, gated, rms)


def test_shape_of_known_name_ignores_owner_and_ending() -> None:
    assert shape_of("meta-llama/Llama-2-7b-hf").parameters() == 6_738_415_616
    assert shape_of("facebook/opt-13b").parameters() == shape_of("opt-13b").parameters()


@pytest.mark.parametrize(
    ("name", "words"),
    [("opt-13", "did you mean opt-13b"), ("nobody/knows", "or one of opt-125m, .* bloom-7b1, ")],
)
def test_shape_of_unknown_name_suggests_known_ones(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        shape_of(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "t5"}, "transformers has no language model of type 't5'"),
        ({"model_type": "llama", "hidden_size": 8}, "describes no model .*; correct it"),
        (None, "its config.json cannot be read"),
    ],
)
def test_shape_of_unusable_config_is_refused(tmp_path: Path, values: Any, words: str) -> None:
    (tmp_path / "config.json").write_text("" if values is None else json.dumps(values))
    with pytest.raises(ConfigError, match=words):
        shape_of(str(tmp_path))


@pytest.mark.parametrize("name", ["opt-125m", "llama-3.2-1b", "tinyllama-1.1b", "phi-2"])
def test_rounded_shape_equals_that_of_a_larger_vocabulary(name: str) -> None:
    """Tied embeddings, separate ones, and an output layer with a bias."""
    key = "vocab_size"
    rows = -(-KNOWN[name][key] // 3000) * 3000
    assert shape_of(name).rounded(3000) == shape_from(KNOWN[name] | {key: rows}, name)
    assert shape_of(name).rounded(8) == shape_of(name) != shape_of(name).rounded(3000)
