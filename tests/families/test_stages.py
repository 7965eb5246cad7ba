"""Every family goes through the three stages: two steps each on a toy with random weights and a real tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from rlhf.config.schema import STAGES, build_config
from rlhf.models.forward import ScalarHead, completion_log_probs
from rlhf.reporting.rules import RULES
from rlhf.runs.directory import RunDirectory
from rlhf.trainers import pipeline, preflight, stage_models
from rlhf.trainers.ppo import trainer
from tests.families.table import EACH, Family
from tests.helpers import weights

LENGTHS = {"max_prompt_length": 16, "max_completion_length": 8}


def rows(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows of 12 tokens, the second with 5 of padding on the left."""
    ids = torch.randint(3, vocabulary, (2, 12), generator=torch.Generator().manual_seed(1))
    ids[1, :5] = 0
    return ids, (ids != 0).long()


def numbers(module: Any, vocabulary: int) -> torch.Tensor:
    """What a model makes of `rows`: log-probabilities of the last four tokens, or the score of the last one."""
    ids, mask = rows(vocabulary)
    was_training = module.training
    module.eval()
    with torch.no_grad():
        if isinstance(module, ScalarHead):
            actual = module(ids, mask)[:, -1:]
        else:
            actual = completion_log_probs(module, ids, mask, 4).log_probs
    module.train(was_training)
    return actual.float()


def lacks_class(folder: Path) -> bool:
    """Return what a model's README.md says about plain transformers."""
    card = folder / "README.md"
    return card.is_file() and "transformers has no sequence classifier of" in card.read_text(encoding="utf-8")


def of_plain_transformers(folder: Path, vocabulary: int) -> torch.Tensor:
    """The same of a saved model, each row alone."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    scalar = folder.parent.name == "reward" or folder.name == "critic"
    kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    if no_class := lacks_class(folder):  # its backbone and its head, as its README.md says
        kind = AutoModel
    loaded = kind.from_pretrained(folder).eval()
    actual = []
    with torch.no_grad():
        for ids, mask in zip(*rows(vocabulary)):
            alone = ids[mask.bool()][None]
            output = loaded(input_ids=alone, use_cache=False)
            if no_class:
                made = (output.last_hidden_state @ weights(folder)["score.weight"].T)[0, -1]
            elif scalar:
                made = output.logits
            else:
                made = output.logits[0, -5:-1].log_softmax(-1).gather(-1, alone[0, -4:, None])
            actual.append(made.flatten())
    return torch.stack(actual)


@pytest.fixture
def trained(
    accelerator: Any,
    tokenizer: Any,
    recipe: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """Run the stages over a family; gives the folder, each stage's numbers as it ended, and the ratios of PPO."""
    ends: dict[str, torch.Tensor] = {}
    ratios: list[torch.Tensor] = []
    save, loss = stage_models.save_model, trainer.policy_loss

    def saved(engine: Any, run_tokenizer: Any, path: Path) -> None:
        ends[f"{path.parent.name}/{path.name}"] = numbers(engine.module, len(tokenizer))
        save(engine, run_tokenizer, path)

    def watched(log_probs: Any, old: Any, advantages: Any, mask: Any, **options: Any) -> Any:
        ratios.append(((log_probs - old) * mask).exp().detach())
        return loss(log_probs, old, advantages, mask, **options)

    monkeypatch.setattr(stage_models, "save_model", saved)
    monkeypatch.setattr(trainer, "policy_loss", watched)

    def run(family: Family) -> tuple[Path, dict[str, torch.Tensor], list[torch.Tensor]]:
        special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
        config = family.configuration(vocab_size=len(tokenizer), **special)
        torch.manual_seed(0)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        short = {"batch_size": 4, "max_steps": 2, "eval_rows": 4, "optimizer": recipe["sft"]["optimizer"]}
        steps = {"batch_size": 4, "minibatch_size": 4, "ppo_epochs": 1, "steps": 2, "eval_rows": 4}
        values = recipe | {
            "output": str(tmp_path / "run"),
            "model": {"path": str(tmp_path / "model")},
            "data": recipe["data"] | LENGTHS,
            "sft": short,
            "reward": short,
            "ppo": recipe["ppo"] | steps,
        }
        settings = build_config(values)
        directory = RunDirectory(settings.output)
        findings = preflight.examine(settings, STAGES, directory, accelerator)
        with directory.open_for(settings, stages=STAGES, data=findings.data):
            pipeline.run(settings, accelerator, directory, STAGES)
        return directory.path, ends, ratios

    return run


@pytest.mark.parametrize("family", EACH)
def test_family_is_trained_and_read_by_plain_transformers(trained: Any, tokenizer: Any, family: Family) -> None:
    folder, ends, ratios = trained(family)
    assert set(ends) == {"sft/model", "reward/model", "ppo/model", "ppo/critic"}
    assert lacks_class(folder / "reward" / "model") == (not family.has_classifier)
    for place, expected in ends.items():
        summary = json.loads((folder / place).with_name("stage.json").read_text())
        assert summary["steps"] == 2
        actual = of_plain_transformers(folder / place, len(tokenizer))
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)
    assert len(ratios) == 2, "one update a rollout"
    plumbing = {rule.name for rule in RULES if rule.topic == "plumbing"}
    for stage in STAGES:
        records = map(json.loads, (folder / stage / "metrics.jsonl").read_text().splitlines())
        assert not [record["text"] for record in records if record.get("rule") in plumbing]
    if not family.draws:
        for ratio in ratios:
            assert torch.equal(ratio, torch.ones_like(ratio))
