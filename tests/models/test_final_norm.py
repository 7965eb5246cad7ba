"""Find the norm before a scalar head in every family, and reset it under a new head if its gains are unequal."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.config.schema import LoraConfig, ModelConfig
from rlhf.errors import ConfigError
from rlhf.models.forward import ScalarHead
from rlhf.models.loading import load_scalar_head
from rlhf.models.lora import add_adapters
from rlhf.models.scalar_head import build_scalar_head_class, find_final_norm, reset_final_norm, was_reset
from tests.families.table import BY_NAME
from tests.families.test_alike import gemma3 as composite
from tests.helpers import build_tokenizer, llama, weights

NAMES = {
    "composite": "language_model.norm",
    "BLOOM": "ln_f",
    "GPT-2": "ln_f",
    "GPT-NeoX, Pythia": "final_layer_norm",
    "Llama, Llama 2": "norm",
    "OPT": "decoder.final_layer_norm",
}
BF16 = 2.0**-9
"""The largest relative error of rounding to bf16."""


def scalar(config: Any) -> Any:
    """A model with a new scalar head and random weights."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    torch.manual_seed(0)
    config.num_labels = 1
    return (build_scalar_head_class(config) or MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)])(config).eval()


def family(name: str, **values: Any) -> Any:
    return scalar(BY_NAME[name].configuration(**values))


def spread(model: Any, gain: float) -> Any:
    """Every sixteenth dimension of the final norm gets this gain."""
    with torch.no_grad():
        norm = find_final_norm(model)[1]  # type: ignore[index]
        norm.weight[::16] += gain - 1
    return model


@pytest.mark.parametrize("name", [*BY_NAME, "composite"])
def test_final_norm_is_the_one_whose_output_the_head_reads(name: str) -> None:
    model = scalar(composite()) if name == "composite" else family(name)
    path, norm = find_final_norm(model)  # type: ignore[misc]
    assert norm is model.base_model.get_submodule(path) and path == NAMES.get(name, path)
    written: list[torch.Tensor] = []
    norm.register_forward_hook(lambda module, inputs, output: written.append(output))
    read: list[torch.Tensor] = []
    model.score.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    ids = torch.randint(3, 60, (2, 8))
    with torch.no_grad():
        ScalarHead(model)(ids, torch.ones_like(ids))
    torch.testing.assert_close(written[-1], read[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (None, {}),
        ("OPT", {"do_layer_norm_before": False}),  # norms are inside its layers
        ("OPT", {"word_embed_proj_dim": 16}),  # a projection is between norm and head
    ],
)
def test_reset_without_a_norm_is_refused(name: str | None, values: dict[str, Any]) -> None:
    from transformers import OlmoConfig, OlmoForSequenceClassification

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = family(name, **values) if name else OlmoForSequenceClassification(OlmoConfig(**sizes))
    assert find_final_norm(model) is None and reset_final_norm(model, "auto") is None
    with pytest.raises(ConfigError, match=r"reward\.reset_final_norm: true, but .* has no norm") as caught:
        reset_final_norm(model, True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["BLOOM", "Llama, Llama 2", "Gemma"])  # Gemma's gain is 1 + weight
def test_auto_resets_only_very_unequal_gains(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    gains = {
        "alike": torch.full((32,), 7.0),
        "of a trained model": 2 + 0.5 * torch.randn(32, generator=generator),
        "normal around 0": torch.randn(32, generator=generator),
        "one in sixteen is 5": torch.where(torch.arange(32) % 16 == 0, 5.0, 1.0),
    }
    for what, values in gains.items():
        model = family(name)
        norm = find_final_norm(model)[1]  # type: ignore[index]
        with torch.no_grad():
            norm.weight += values - 1
        assert reset_final_norm(model, "auto") is None and not was_reset(norm), what
    model = spread(family(name), 50)
    untrained = copy.deepcopy(find_final_norm(family(name))[1].state_dict())  # type: ignore[index]
    assert reset_final_norm(model, False) is None
    for setting, spread_model, remedy in (
        ("auto", model, "reward.reset_final_norm=false keeps it"),
        (True, spread(family(name), 3), "reward.reset_final_norm=true asks for it"),
    ):
        line = reset_final_norm(spread_model, setting)  # type: ignore[arg-type]
        assert line is not None and "\n" not in line and line.endswith(remedy)
        # sqrt((2 * 50^2 + 30) / 32) = 12.54
        assert setting is True or "have a median of 1 and reach 50, their root mean square is 12.5 times" in line
        state = find_final_norm(spread_model)[1].state_dict()  # type: ignore[index]
        assert all(torch.equal(tensor, untrained[key]) for key, tensor in state.items())


def test_reset_brings_bf16_scores_nearer_to_float64() -> None:
    """Some dimensions are the same for every text, with a gain of 300: their rounding hides the others."""
    model = family("BLOOM", num_hidden_layers=1)
    with torch.no_grad():
        for parameter in model.transformer.h.parameters():
            parameter *= 0.1
        model.transformer.word_embeddings.weight.normal_(0, 1)
        model.transformer.word_embeddings.weight[:, ::16] = 1.5
        model.score.weight.normal_(0, 1)
    ids = torch.randint(3, 60, (64, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)

    def error(model: Any) -> float:
        """Root mean square of what bf16 adds to the scores, as a part of their deviation over texts."""
        with torch.no_grad():
            exact = ScalarHead(copy.deepcopy(model).double())(ids, mask)[:, -1]
            rounded = ScalarHead(copy.deepcopy(model).bfloat16())(ids, mask)[:, -1].double()
        return float((rounded - exact).square().mean().sqrt() / exact.std())

    unequal = error(spread(model, 300))
    assert reset_final_norm(model, "auto")
    assert error(model) < 16 * BF16 and unequal > 2 * error(model)


def folder_of(path: Path, gain: float) -> Path:
    model = llama(len(build_tokenizer()))
    with torch.no_grad():
        model.model.norm.weight[::16] = gain
    model.save_pretrained(path)
    return path


def load(path: Path, **options: Any) -> Any:
    return load_scalar_head(ModelConfig(), build_tokenizer(), attention="sdpa", path=str(path), **options)


def test_norm_is_reset_only_under_a_new_head(tmp_path: Path) -> None:
    lines: list[str] = []
    reset = load(folder_of(tmp_path / "lm", 50), seed=0, reset_norm="auto", say=lines.append)
    assert reset.model.norm.weight.tolist() == [1.0] * 32
    assert lines[0].startswith(f"note: {tmp_path / 'lm'}: the final norm norm is reset under the new head")
    unchanged = load(tmp_path / "lm", seed=0, reset_norm=False, say=lines.append)
    unchanged.save_pretrained(tmp_path / "reward")
    for setting in ("auto", True):  # a trained head knows the norm
        trained = load(tmp_path / "reward", seed=0, reset_norm=setting, say=lines.append)
        assert trained.model.norm.weight.max() == unchanged.model.norm.weight.max() == 50 and len(lines) == 1


def test_reset_norm_is_trained_with_lora(tmp_path: Path) -> None:
    def trained(gain: float) -> set[str]:
        model = load(folder_of(tmp_path / str(gain), gain), seed=0, reset_norm="auto")
        add_adapters(model, LoraConfig(rank=2), seed=0)
        return {name for name, parameter in model.named_parameters() if parameter.requires_grad and "lora_" not in name}

    assert trained(50) == {"score.weight", "model.norm.weight"} and trained(1) == {"score.weight"}


@pytest.mark.parametrize(
    "keys", [[], pytest.param(["engine.zero_stage=3", "lora.rank=2"], marks=pytest.mark.slow)], ids=str
)
def test_reward_stage_resets_the_norm_and_ppo_keeps_it(
    rlhf: Any, finished_run: Path, tmp_path: Path, keys: list[str]
) -> None:
    folder = folder_of(tmp_path / "lm", 50)
    build_tokenizer().save_pretrained(folder)
    settings = [f"reward.model={folder}", *keys]
    run = rlhf("reward", "--output", tmp_path / "run", *(part for key in settings for part in ("--set", key)))
    (_,) = (line for line in run.stdout.splitlines() if "is reset under the new head" in line)
    norm = weights(tmp_path / "run" / "reward" / "model")["model.norm.weight"]
    assert not torch.equal(norm, torch.ones(32)) and (norm - 1).abs().max() < 0.02, "trained from 1 for three steps"
    if keys:
        return
    reward = tmp_path / "run" / "reward" / "model"
    settings = [f"ppo.actor={finished_run / 'sft' / 'model'}", f"ppo.reward_model={reward}"]
    run = rlhf("ppo", "--output", tmp_path / "ppo", *(part for key in settings for part in ("--set", key)))
    assert "is reset" not in run.stdout
