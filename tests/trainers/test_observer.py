"""Each stage reports its step to an observer, phase by phase, with the numbers that it records."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf.data.stage_dataset import load_stage
from rlhf.trainers.distill import DistillTrainer
from rlhf.trainers.dpo import DPOTrainer
from rlhf.trainers.loop import take_step
from rlhf.trainers.supervised import RewardTrainer, SFTTrainer
from tests.engine.test_observer import Seen
from tests.helpers import llama
from tests.in_process import GivenModels, build_ppo, one_model, ppo_models, scalar_llama, stage_context

PHASES = ["rows", "rollout", "scores", "advantages", "loss", "gradients", "update"]


def phases(seen: Seen) -> list[str]:
    """The phases in the order of their first tensors."""
    return list(dict.fromkeys(place.phase for place in seen.places))


@pytest.fixture
def ppo(accelerator: Any, recipe: dict[str, Any], tokenizer: Any, tmp_path: Any) -> Any:
    size = len(tokenizer)
    models = ppo_models(llama(size), llama(size, seed=5), scalar_llama(size), scalar_llama(size))
    return build_ppo(accelerator, tmp_path, recipe, tokenizer, models, engine={"zero_stage": 0}, ppo_epochs=1)


def test_ppo_reports_its_experience_and_each_update(ppo: Any) -> None:
    ppo.context.observation.observer = seen = Seen()
    take_step(ppo, ppo.context, 0)
    assert phases(seen) == PHASES
    experience = ppo.experience
    for phase, name, tensor in [
        ("rows", "prompt_ids", experience.input_ids[:, : -experience.completion_length]),
        ("rollout", "completion_ids", experience.input_ids[:, -experience.completion_length :]),
        ("scores", "reward", experience.reward),
        ("scores", "values", experience.values),
        ("scores", "log_probs", experience.log_probs),
        ("advantages", "advantages", experience.advantages),
        ("advantages", "returns", experience.returns),
    ]:
        assert torch.equal(seen.tensors[phase, name], tensor), name
    updates = [(place.role, place.update) for place in seen.places if place.phase == "update"]
    assert list(dict.fromkeys(updates)) == [("actor", 0), ("critic", 0), ("actor", 1), ("critic", 1)]
    roles = {place.role for place in seen.places if place.phase == "scores"}
    assert roles == {"actor", "critic", "reference", "reward"}


def test_distillation_reports_its_rollout_and_the_divergence_of_each_token(
    accelerator: Any, recipe: dict[str, Any], tokenizer: Any, tmp_path: Any
) -> None:
    settings = {**recipe, "distill": recipe["distill"] | {"teacher": "given", "micro_batch_size": 2}}
    context = stage_context(accelerator, tmp_path, "distill", settings)
    models = GivenModels({"student": llama(len(tokenizer)), "teacher": llama(len(tokenizer), seed=5)}.__getitem__)
    data = load_stage(context.config.data, "distill", tokenizer, seed=0)
    trainer = DistillTrainer(context, models, tokenizer, data)
    context.observation.observer = seen = Seen()
    metrics = take_step(trainer, context, 0)
    assert phases(seen) == [phase for phase in PHASES if phase != "advantages"]
    assert [place.micro_batch for place in seen.places if place.phase == "scores"] == [0, 1]
    assert {place.role for place in seen.places if place.phase != "rows"} == {"student"}
    losses = [place for place in seen.places if place.phase == "loss"]
    assert len(losses) == 2 and metrics["loss"] > 0


def test_checks_evaluations_and_a_step_without_an_observer_report_nothing(ppo: Any) -> None:
    take_step(ppo, ppo.context, 0)
    ppo.context.observation.observer = seen = Seen()
    ppo.evaluate("before")
    assert not seen.places


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo"])
def test_supervised_stages_report_rows_and_what_their_loss_is_of(
    accelerator: Any, recipe: dict[str, Any], tokenizer: Any, tmp_path: Any, stage: Any
) -> None:
    settings = {**recipe, stage: recipe[stage] | {"micro_batch_size": 2}}
    context = stage_context(accelerator, tmp_path, stage, settings)
    trainers: dict[str, Any] = {"sft": SFTTrainer, "reward": RewardTrainer, "dpo": DPOTrainer}
    model = (scalar_llama if stage == "reward" else llama)(len(tokenizer))
    data = load_stage(context.config.data, stage, tokenizer, seed=0)
    trainer = trainers[stage](context, one_model(model), tokenizer, data)
    context.observation.observer = seen = Seen()
    metrics = take_step(trainer, context, 0)
    assert phases(seen) == [phase for phase in PHASES if phase not in ("rollout", "advantages")]
    assert {place.micro_batch for place in seen.places if place.phase in ("rows", "scores", "loss")} == {0, 1}
    last = {name: tensor for (phase, name), tensor in seen.tensors.items() if phase in ("rows", "scores", "loss")}
    if stage == "sft":
        total = sum(int(batch["loss_mask"][:, 1:].sum()) for batch in trainer.batches.step(0))
        assert last["loss"].item() == pytest.approx(-last["log_probs"].sum().item() / total)
    elif stage == "dpo":
        assert torch.allclose(last["log_probs"], last["reference"], atol=1e-4)
    else:
        assert last["chosen_scores"].shape == last["rejected_scores"].shape == (2,)
    assert metrics["grad_norm"] == pytest.approx(
        torch.stack([gradient.norm() for gradient in seen.of("gradients").values()]).norm().item(), rel=1e-5
    )
