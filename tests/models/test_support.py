"""A model that a stage would fail on is refused before the first stage, in one line that says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf.config import Config, ModelConfig
from rlhf.errors import ModelError
from rlhf.models.loading import check_models
from rlhf.models.support import check_support, generation_settings, max_positions
from rlhf.run import RunDirectory

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def saved(folder: Path, name: str, **values: Any) -> str:
    """A folder with the configuration of an architecture, as far as the checks read it."""
    from transformers import CONFIG_MAPPING

    CONFIG_MAPPING[name](**values).save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return str(folder)


def refusal(path: str, **what: Any) -> str:
    with pytest.raises(ModelError) as caught:
        check_support(path, ModelConfig(), attention="sdpa", **what)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and "http" not in message
    return message


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bloom", "no sdpa attention"),
        ("gpt_neo", "no sdpa attention"),
        ("gemma2", "no sdpa attention"),
        ("falcon_h1", "cannot generate with a static cache"),
        ("bart", "no decoder-only language model"),
        ("t5", "no decoder-only language model"),
        ("vit", "no decoder-only language model"),
    ],
)
def test_what_cannot_be_trained_is_named_with_the_reason(tmp_path: Path, name: str, why: str) -> None:
    message = refusal(saved(tmp_path, name))
    assert f"the architecture {name} is not supported yet: " in message and why in message


@pytest.mark.parametrize("name", ["granite", "cohere", "olmoe"])
def test_an_architecture_without_a_classifier_serves_sft_alone(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, name)
    check_support(path, ModelConfig(), attention="sdpa")
    assert f"architecture {name} is not supported yet: transformers has no sequence classifier" in refusal(
        path, scalar_head=True
    )


def test_a_head_over_whole_sequences_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, "modernbert-decoder", **SIZES, global_attn_every_n_layers=1)
    check_support(path, ModelConfig(), attention="sdpa")
    assert "scores whole sequences, not tokens" in refusal(path, scalar_head=True)


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

    assert max_positions(CONFIG_MAPPING[name](**values)) == positions


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_rows_longer_than_the_models_positions_are_refused(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, name, max_position_embeddings=40)
    check_support(path, ModelConfig(), attention="sdpa", max_length=40)
    message = refusal(path, max_length=41)
    assert "has 40 positions" in message and "data.max_prompt_length + data.max_completion_length = 41" in message


def run(folder: Path, **sections: Any) -> tuple[Config, RunDirectory]:
    return Config.model_validate(sections | {"output": folder / "run"}), RunDirectory(folder / "run")


def test_a_model_is_checked_for_the_stages_that_will_start_from_it(tmp_path: Path) -> None:
    path = saved(tmp_path / "model", "granite", **SIZES, max_position_embeddings=512)
    config, directory = run(tmp_path, model={"path": path})
    check_models(config, ["sft"], directory, attention="sdpa")
    with pytest.raises(ModelError, match="no sequence classifier"):
        check_models(config, ["sft", "reward"], directory, attention="sdpa")
    other = saved(tmp_path / "other", "llama", **SIZES, max_position_embeddings=511)
    config, directory = run(tmp_path, model={"path": path}, reward={"model": other})
    with pytest.raises(ModelError, match="other: has 511 positions"):
        check_models(config, ["sft", "reward"], directory, attention="sdpa")


@pytest.mark.parametrize("key", ["actor", "reward_model"])
def test_the_models_that_ppo_names_are_checked(tmp_path: Path, key: str) -> None:
    config, directory = run(tmp_path, ppo={key: saved(tmp_path / "model", "gpt2", n_positions=64)})
    with pytest.raises(ModelError, match="model: has 64 positions"):
        check_models(config, ["sft", "reward", "ppo"], directory, attention="sdpa")


def test_the_models_of_finished_stages_are_checked(tmp_path: Path) -> None:
    config, directory = run(tmp_path)
    saved(directory.stage("sft").model, "llama", max_position_embeddings=64)
    directory.stage("sft").finish({})
    with pytest.raises(ModelError, match="sft/model: has 64 positions"):
        check_models(config, ["reward"], directory, attention="sdpa")


def test_generation_settings_are_the_models_own_or_those_of_its_configuration(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    path = saved(tmp_path, "llama", eos_token_id=[3, 4])
    assert generation_settings(path, ModelConfig()).eos_token_id == [3, 4]
    GenerationConfig(eos_token_id=[5, 6]).save_pretrained(tmp_path)
    assert generation_settings(path, ModelConfig()).eos_token_id == [5, 6]
