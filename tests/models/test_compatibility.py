"""A model that a stage would fail on is refused before the first stage, in one line that says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import ModelConfig
from rlhf.errors import ModelError
from rlhf.models.compatibility import check_positions, check_support, get_max_positions, load_generation_config

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def saved(folder: Path, name: str, **values: Any) -> str:
    """A folder with the configuration of an architecture, as far as the checks read it."""
    from transformers import CONFIG_MAPPING

    CONFIG_MAPPING[name](**values).save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return str(folder)


def refusal(path: str, **what: Any) -> str:
    with pytest.raises(ModelError) as caught:
        check_support(path, ModelConfig(), **{"attention": "eager", **what})
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and "http" not in message
    return message


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bloom", "of sdpa attention, BloomForCausalLM has none"),
        ("mamba", "it keeps a recurrent state and no keys and values"),
        ("mamba2", "it keeps a recurrent state and no keys and values"),
        ("rwkv", "it keeps a recurrent state"),
        ("xlstm", "it keeps a recurrent state"),
        ("recurrent_gemma", "it keeps a recurrent state in a separate cache"),
        ("openai-gpt", "cannot generate with a static cache"),
        ("bert", "no decoder-only language model"),
        ("bart", "no decoder-only language model"),
        ("t5", "no decoder-only language model"),
        ("vit", "no decoder-only language model"),
    ],
)
def test_what_cannot_be_trained_is_named_with_the_reason(tmp_path: Path, name: str, why: str) -> None:
    message = refusal(saved(tmp_path, name), attention="sdpa" if name == "bloom" else "eager")
    assert f"the architecture {name} is not supported yet: " in message and why in message


@pytest.mark.parametrize("name", ["granite", "cohere", "olmoe"])
def test_an_architecture_without_a_classifier_gets_a_scalar_head_all_the_same(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, name)
    check_support(path, ModelConfig(), attention="sdpa", scalar_head=True)


def test_an_architecture_whose_backbone_transformers_does_not_load_alone_gets_none(tmp_path: Path) -> None:
    path = saved(tmp_path, "mllama")
    check_support(path, ModelConfig(), attention="sdpa")
    assert "no class of the backbone alone that MllamaForCausalLM builds on" in refusal(path, scalar_head=True)


@pytest.mark.parametrize(
    ("name", "values", "positions"),
    [
        ("gpt2", {"n_positions": 40}, 40),
        ("opt", {"max_position_embeddings": 40}, 40),
        ("llama", {"max_position_embeddings": 40}, 40),
        ("gemma3", {"text_config": {"max_position_embeddings": 40}}, 40),
        ("bloom", {}, None),
    ],
)
def test_the_most_positions_of_a_model(name: str, values: dict[str, Any], positions: int | None) -> None:
    from transformers import CONFIG_MAPPING

    assert get_max_positions(CONFIG_MAPPING[name](**values)) == positions


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_rows_longer_than_the_models_positions_are_refused(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, name, max_position_embeddings=40)
    found = check_support(path, ModelConfig(), attention="sdpa")
    check_positions(path, found, 40)
    with pytest.raises(ModelError) as caught:
        check_positions(path, found, 41)
    assert str(caught.value).startswith(f"{path}: has 40 positions, fewer than data.max_prompt_length")
    assert "data.max_completion_length = 41" in str(caught.value)


def test_generation_settings_are_the_models_own_or_those_of_its_configuration(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    path = saved(tmp_path, "llama", eos_token_id=[3, 4])
    assert load_generation_config(path, ModelConfig()).eos_token_id == [3, 4]
    GenerationConfig(eos_token_id=[5, 6]).save_pretrained(tmp_path)
    assert load_generation_config(path, ModelConfig()).eos_token_id == [5, 6]
