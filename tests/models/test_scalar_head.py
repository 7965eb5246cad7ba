"""Families that transformers has no sequence classifier of get a scalar head, and plain transformers its numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf.config.schema import ModelConfig
from rlhf.errors import ModelError
from rlhf.models.forward import ScalarHead
from rlhf.models.loading import load_causal_lm, load_on_meta, load_scalar_head
from rlhf.models.scalar_head import BuiltScalarHead, build_scalar_head_class, describe_loading, write_readme
from tests.families import table
from tests.helpers import build_tokenizer, llama

SIZES = {name: value for name, value in table.SIZES.items() if name != "vocab_size"} | {"eos_token_id": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {"num_key_value_heads": 2},
    "cohere2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6},
    "ernie4_5": {"num_key_value_heads": 2, "head_dim": 8},
    "gemma4": {  # reads text with a separate part
        "text_config": {
            **SIZES,
            "vocab_size": 300,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": 300,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0,
        },
        "vision_config": None,
        "audio_config": None,
    },
    "granite": {"num_key_value_heads": 2},
    "lfm2": {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
    "llama4_text": {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
    "modernbert-decoder": {"global_attn_every_n_layers": 1},  # transformers' classifier of it scores whole sequences
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}


def language_model(folder: Path, name: str) -> Path:
    """A folder with a language model of random weights and its tokenizer."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    values = FAMILIES[name]
    config = CONFIG_MAPPING[name](**values if "text_config" in values else {"vocab_size": 300} | SIZES | values)
    MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> Any:
    return load_scalar_head(ModelConfig(), build_tokenizer(), attention="sdpa", path=str(folder), **options).eval()


def scores(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return ScalarHead(model)(ids, torch.ones_like(ids))


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_head_scores_as_in_plain_transformers(tmp_path: Path, name: str) -> None:
    from transformers import AutoModel

    model = load(language_model(tmp_path / "lm", name), seed=0)
    assert isinstance(model, BuiltScalarHead) and model.score.weight.abs().max() > 0
    with torch.no_grad():
        model.score.weight.normal_(0, 1)
    model.save_pretrained(tmp_path / "reward")
    if name == "granite":
        with pytest.raises(ModelError, match="is a reward model"):
            load_causal_lm(ModelConfig(path=str(tmp_path / "reward")), build_tokenizer(), attention="sdpa")
    ids = torch.randint(2, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    backbone, report = AutoModel.from_pretrained(tmp_path / "reward", dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and set(report["unexpected_keys"]) == {"score.weight"}
    weight = load_file(tmp_path / "reward" / "model.safetensors")["score.weight"]
    with torch.no_grad():
        expected = (backbone.eval()(input_ids=ids).last_hidden_state @ weight.T)[..., 0]
    assert expected.std() > 0.1
    for scored in (model, load(tmp_path / "reward")):
        torch.testing.assert_close(scores(scored, ids), expected, atol=2e-5, rtol=0)


def test_load_on_meta_is_the_model_without_weights(tmp_path: Path) -> None:
    folder = language_model(tmp_path, "cohere2")
    outline = load_on_meta(str(folder), ModelConfig(), attention="sdpa", scalar_head=True, trained=False)
    expected = {name: tensor.shape for name, tensor in load(folder, seed=0).state_dict().items()}
    assert {name: tensor.shape for name, tensor in outline.state_dict().items()} == expected
    assert {parameter.device.type for parameter in outline.parameters()} == {"meta"}
    with pytest.raises(ModelError, match=r"its weights lack score\.weight"):
        load_on_meta(str(folder), ModelConfig(), attention="sdpa", scalar_head=True)


def test_a_new_head_is_drawn_from_the_seed(tmp_path: Path) -> None:
    folder = language_model(tmp_path, "cohere2")
    first, same, other = (load(folder, seed=seed).score.weight for seed in (1, 1, 2))
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_readme_next_to_the_weights_computes_a_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(language_model(tmp_path / "lm", "granite"), seed=0)
    folder = tmp_path / "reward"
    model.save_pretrained(folder, max_shard_size="20KB")
    build_tokenizer().save_pretrained(folder)
    write_readme(model, folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    text = (folder / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "granite" in text
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(code.replace("a text", "red cow please"), names)
    ids = names["tokenizer"]("red cow please", return_tensors="pt")["input_ids"]
    torch.testing.assert_close(names["score"], scores(model, ids)[0, -1])
    line = describe_loading(model, folder)
    assert line is not None and line.startswith(f"{folder}: transformers has no class for granite with a scalar head")


def test_family_with_a_classifier_needs_no_readme(tmp_path: Path) -> None:
    from transformers import LlamaForSequenceClassification

    llama(len(build_tokenizer())).save_pretrained(tmp_path / "lm")
    model = load(tmp_path / "lm", seed=0)
    assert type(model) is LlamaForSequenceClassification and build_scalar_head_class(model.config) is None
    write_readme(model, tmp_path)
    assert describe_loading(model, tmp_path) is None and not (tmp_path / "README.md").exists()


def test_head_with_two_outputs_is_replaced_with_a_note(tmp_path: Path) -> None:
    from transformers import LlamaForSequenceClassification

    config = llama(len(build_tokenizer())).config
    config.num_labels = 2
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    lines: list[str] = []
    assert load(tmp_path, seed=0, say=lines.append).score.weight.shape == (1, 32)
    assert lines == [
        f"note: {tmp_path}: its head has 2 outputs, a reward model has one; a new head is drawn from the seed"
    ]
