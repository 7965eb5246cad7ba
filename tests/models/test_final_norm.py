"""The norm before a scalar head is found in every family, and reset under a new head where its gains are unequal."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.config.schema import LoraConfig, ModelConfig, build_config
from rlhf.errors import ConfigError
from rlhf.models.forward import ScalarHead
from rlhf.models.loading import load_scalar_head
from rlhf.models.lora import add_adapters
from rlhf.models.scalar_head import build_scalar_head_class, find_final_norm, reset_final_norm, was_reset
from tests.families.table import BY_NAME
from tests.families.test_alike import gemma3 as composite
from tests.helpers import build_tokenizer, llama, weights

NAMES = {
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


@pytest.mark.parametrize("name", BY_NAME)
def test_the_norm_before_the_head_is_the_one_whose_output_it_reads(name: str) -> None:
    model = family(name)
    found = find_final_norm(model)
    assert found is not None and found[1] is model.base_model.get_submodule(found[0])
    assert found[0] == NAMES.get(name, found[0])
    written: list[torch.Tensor] = []
    found[1].register_forward_hook(lambda module, inputs, output: written.append(output))
    read: list[torch.Tensor] = []
    model.score.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    ids = torch.randint(3, 60, (2, 8))
    with torch.no_grad():
        ScalarHead(model)(ids, torch.ones_like(ids))
    torch.testing.assert_close(written[-1], read[0], rtol=0, atol=0)


def test_of_a_composite_model_it_is_the_text_parts() -> None:
    found = find_final_norm(scalar(composite()))
    assert found is not None and found[0] == "language_model.norm"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (None, {}),
        ("OPT", {"do_layer_norm_before": False}),  # its layers end in norms of their own
        ("OPT", {"word_embed_proj_dim": 16}),  # between norm and head stands a projection
    ],
)
def test_true_is_refused_where_no_norm_with_weights_is_before_the_head(
    name: str | None, values: dict[str, Any]
) -> None:
    from transformers import OlmoConfig, OlmoForSequenceClassification

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = family(name, **values) if name else OlmoForSequenceClassification(OlmoConfig(**sizes))
    assert find_final_norm(model) is None and reset_final_norm(model, "auto") is None
    with pytest.raises(ConfigError, match=r"reward\.reset_final_norm: true, but .* has no norm") as caught:
        reset_final_norm(model, True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["BLOOM", "Llama, Llama 2", "Gemma"])  # Gemma's gain is 1 + weight
def test_auto_resets_very_unequal_gains_alone(name: str) -> None:
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
    line = reset_final_norm(model, "auto")
    assert line is not None and "\n" not in line
    # sqrt((2 * 50^2 + 30) / 32) = 12.54
    assert "its gains have a median of 1 and reach 50, their root mean square is 12.5 times the median" in line
    assert line.endswith("; above 2 a new head loses accuracy in bf16; reward.reset_final_norm=false keeps it")
    assert {key: tensor.tolist() for key, tensor in find_final_norm(model)[1].state_dict().items()} == {  # type: ignore[index]
        key: tensor.tolist() for key, tensor in untrained.items()
    }


def test_true_resets_equal_gains_too() -> None:
    model = spread(family("GPT-2"), 3)
    with torch.no_grad():
        model.transformer.ln_f.bias.fill_(2)
    line = reset_final_norm(model, True)
    assert line is not None and line.endswith("; reward.reset_final_norm=true asks for it")
    assert model.transformer.ln_f.weight.tolist() == [1.0] * 32 and model.transformer.ln_f.bias.tolist() == [0.0] * 32


def test_in_bf16_scores_come_nearer_to_those_in_float64() -> None:
    """Some dimensions say the same of every text, with a gain of 300: their rounding drowns what the others say."""
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


def test_only_under_a_new_head_and_said_in_one_line(tmp_path: Path) -> None:
    said: list[str] = []
    new = load(folder_of(tmp_path / "lm", 50), seed=0, reset_norm="auto", say=said.append)
    assert new.model.norm.weight.tolist() == [1.0] * 32
    (line,) = said
    assert line.startswith(f"note: {tmp_path / 'lm'}: the final norm norm is reset under the new head")
    kept = load(tmp_path / "lm", seed=0, reset_norm=False, say=said.append)
    assert kept.model.norm.weight.max() == 50
    kept.save_pretrained(tmp_path / "reward")
    for wanted in ("auto", True):
        trained = load(tmp_path / "reward", seed=0, reset_norm=wanted, say=said.append)
        assert trained.model.norm.weight.max() == 50 and said == [line], "its head knows the norm"


def test_under_lora_the_reset_norm_is_trained_as_the_head_is(tmp_path: Path) -> None:
    def trained(gain: float) -> set[str]:
        model = load(folder_of(tmp_path / str(gain), gain), seed=0, reset_norm="auto")
        add_adapters(model, LoraConfig(rank=2), seed=0)
        return {name for name, parameter in model.named_parameters() if parameter.requires_grad and "lora_" not in name}

    assert trained(50) == {"score.weight", "model.norm.weight"} and trained(1) == {"score.weight"}


def test_the_setting_is_auto_true_or_false() -> None:
    for value in ("auto", True, False):
        assert build_config({"reward": {"reset_final_norm": value}}).reward.reset_final_norm is value
    with pytest.raises(ConfigError, match=r"reward\.reset_final_norm: expected 'auto', true or false, got 'never'"):
        build_config({"reward": {"reset_final_norm": "never"}})


@pytest.mark.parametrize("keys", [[], ["engine.zero_stage=3", "lora.rank=2"]])
def test_the_reward_stage_resets_and_ppo_takes_the_norm_as_it_is(
    rlhf: Any, finished_run: Path, tmp_path: Path, keys: list[str]
) -> None:
    folder = folder_of(tmp_path / "lm", 50)
    build_tokenizer().save_pretrained(folder)
    named = [f"reward.model={folder}", *keys]
    found = rlhf("reward", "--output", tmp_path / "run", *(part for key in named for part in ("--set", key)))
    (_,) = (line for line in found.stdout.splitlines() if "is reset under the new head" in line)
    norm = weights(tmp_path / "run" / "reward" / "model")["model.norm.weight"]
    assert not torch.equal(norm, torch.ones(32)) and (norm - 1).abs().max() < 0.02, "trained from 1 for three steps"
    named = [f"ppo.actor={finished_run / 'sft' / 'model'}", f"ppo.reward_model={tmp_path / 'run' / 'reward' / 'model'}"]
    found = rlhf("ppo", "--output", tmp_path / "ppo", *(part for key in named for part in ("--set", key)))
    assert "is reset" not in found.stdout
