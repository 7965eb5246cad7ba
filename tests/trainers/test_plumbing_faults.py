"""Planted faults of plumbing, each in a run of three steps: the rule that finds it, and by which step.

Runs without a fault break no rule. `BLIND` lists faults that no rule about plumbing sees.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlhf.data import batches
from rlhf.data.examples import Demonstration, Pair
from rlhf.data.stage_dataset import StageData
from rlhf.engine import distributed
from rlhf.engine.engine import TrainingEngine
from rlhf.generation.decoder import Decoder
from rlhf.reporting.recorder import Recorder
from rlhf.reporting.rules import RULES
from rlhf.runs.directory import RunDirectory
from rlhf.trainers import dpo, loop, supervised
from rlhf.trainers.ppo import policy_decoder
from rlhf.trainers.ppo import trainer as ppo
from tests.forks import Forks
from tests.helpers import llama
from tests.in_process import ROW, one_model, ppo_models, scalar_llama, stage_context
from tests.optimum import language

OPTIMIZER = {"learning_rate": 0.01, "schedule": "constant", "warmup": 0}
STEPS = 3
FINDERS = {rule.name for rule in RULES if rule.topic == "plumbing"}
LORA = {"lora": {"rank": 2}}
PPO = {
    # Two updates a rollout, so that scoring and training are separate passes.
    "batch_size": 4,
    "minibatch_size": 2,
    "steps": STEPS,
    "optimizer": OPTIMIZER,
    "critic_optimizer": OPTIMIZER,
}
SMALL_STEPS = {"ppo": {**PPO, "optimizer": {**OPTIMIZER, "learning_rate": 1e-4}}}

Plant = Callable[[pytest.MonkeyPatch], None]


def build_trainer(stage: str, context: Any) -> Any:
    """A trainer of a tiny model on a few rows of different lengths."""

    def model() -> Any:
        return llama(4, eos_token_id=3, num_hidden_layers=1)

    tokenizer = language.tokenizer()
    if stage == "ppo":
        critic = scalar_llama(4, eos_token_id=3, num_hidden_layers=1)
        models = ppo_models(model(), model(), critic, language.TableOfRewards(seed=0))
        prompts = [language.prompt(1), language.prompt(2, 3), language.prompt(3, 1, 2), language.prompt(1, 1)]
        return ppo.PPOTrainer(context, models, tokenizer, StageData(prompts, prompts, []))
    if stage == "sft":
        rows: list[Any] = [Demonstration([1], [2, 3, 0], ROW), Demonstration([2, 1, 1], [3, 0], ROW)]
        return supervised.SFTTrainer(context, one_model(model()), tokenizer, StageData([*rows, rows[0]], rows, []))
    pairs: list[Any] = [Pair([1], [2, 3, 0], [3, 0], ROW), Pair([2, 1, 1], [3, 0], [1, 0], ROW)]
    data = StageData([*pairs, pairs[0]], pairs, [])
    if stage == "dpo":
        return dpo.DPOTrainer(context, one_model(model()), tokenizer, data)
    scalar = scalar_llama(4, eos_token_id=3, num_hidden_layers=1)
    return supervised.RewardTrainer(context, one_model(scalar), tokenizer, data)


@pytest.fixture
def broken(accelerator: Any, tmp_path: Path) -> Callable[..., list[tuple[int, str]]]:
    """Train, and return the rules of plumbing that were broken, each with its step."""

    def run(stage: Any, settings: dict[str, Any]) -> list[tuple[int, str]]:
        return train(accelerator, tmp_path, stage, settings)

    return run


def train(accelerator: Any, folder: Path, stage: Any, settings: dict[str, Any]) -> list[tuple[int, str]]:
    """See `broken`."""
    directory = RunDirectory(folder).stage(stage)
    section: dict[str, Any] = {
        "batch_size": 2,
        "micro_batch_size": 1,
        "epochs": 2,
        "max_steps": STEPS,
        "optimizer": OPTIMIZER,
    }
    section = PPO if stage == "ppo" else section
    values = {"data": {"max_prompt_length": 3, "max_completion_length": 3}, stage: section, **settings}
    with Recorder(directory, enabled=distributed.world().is_main) as recorder:
        context = stage_context(accelerator, folder, stage, values, recorder=recorder)
        loop.fit(build_trainer(stage, context), context)
    if not distributed.world().is_main:
        return []
    return [(record["step"], record["rule"]) for record in read_records(folder, stage) if record.get("rule") in FINDERS]


def read_records(folder: Path, stage: Any) -> list[dict[str, Any]]:
    lines = RunDirectory(folder).stage(stage).metrics.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("settings", [{}, LORA, {"precision": "bf16"}], ids=["all weights", "LoRA", "bf16"])
@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "ppo"])
def test_correct_run_breaks_no_rule(broken: Any, stage: str, settings: dict[str, Any]) -> None:
    assert broken(stage, settings) == []


def test_small_steps_go_in_the_direction_of_the_advantages(broken: Any, tmp_path: Path) -> None:
    assert broken("ppo", SMALL_STEPS) == []
    (direction,) = (record["direction"] for record in read_records(tmp_path, "ppo") if "direction" in record)
    assert direction > 0.3, "the fault of the other sign would not be seen"


# --- faults


def change_batches(name: str, change: Callable[[Any], None]) -> Plant:
    """Change each batch that a collate function returns."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        real, module = getattr(batches, name), dpo if name == "collate_dpo" else supervised

        def collate(*arguments: Any, **options: Any) -> Any:
            change(batch := real(*arguments, **options))
            return batch

        monkeypatch.setattr(module, name, collate)

    return plant


def learn_prompts(batch: Any) -> None:
    batch["loss_mask"] = batch["attention_mask"].bool()


def learn_all_positions(batch: Any) -> None:
    mask = batch["attention_mask"].clone()
    mask[:, 0] = 0  # nothing predicts the first token
    batch["targets"] = mask.flatten().nonzero().flatten()


def learn_padding(batch: Any) -> None:
    batch["loss_mask"][:, -1] = True


def forget_ends(batch: Any) -> None:
    batch["loss_mask"] &= batch["input_ids"] != language.END


def learn_fillers(batch: Any) -> None:
    fillers = ~batch["loss_mask"].any(1)
    batch["loss_mask"][fillers] = batch["attention_mask"][fillers].bool()


def read_padding(batch: Any) -> None:
    batch["attention_mask"][:] = 1


def forget_first_tokens(batch: Any) -> None:
    batch["completion_mask"][:, 0] = False


def after_each_update(change: Callable[[TrainingEngine], None], role: str) -> Plant:
    """Do something after each update of a role's engine."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        real = TrainingEngine.apply

        def apply(self: TrainingEngine) -> None:
            real(self)
            if role in (self.name, "any"):
                with torch.no_grad():
                    change(self)

        monkeypatch.setattr(TrainingEngine, "apply", apply)

    return plant


def draw_rows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two places of an epoch have the same row."""
    real = batches.Batches.numbers
    monkeypatch.setattr(batches.Batches, "numbers", lambda self, index: [n and n - 1 for n in real(self, index)])


def never_update(role: str) -> Plant:
    """Compute a role's gradients, and leave its weights as they are."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        real = TrainingEngine.apply

        def apply(self: TrainingEngine) -> None:
            kept = [weight.detach().clone() for weight in self.module.parameters()]
            real(self)
            if role in (self.name, "any"):
                with torch.no_grad():
                    for weight, old in zip(self.module.parameters(), kept):
                        weight.copy_(old)

        monkeypatch.setattr(TrainingEngine, "apply", apply)

    return plant


def shift_frozen_weights(engine: TrainingEngine) -> None:
    for weight in engine.module.parameters():
        if not weight.requires_grad:
            weight.mul_(1.001)


def after_building(change: Callable[[ppo.PPOTrainer], None]) -> Plant:
    """Change a PPO trainer before its first step."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        real = ppo.PPOTrainer.__init__

        def build(self: Any, *arguments: Any, **options: Any) -> None:
            real(self, *arguments, **options)
            with torch.no_grad():
                change(self)

        monkeypatch.setattr(ppo.PPOTrainer, "__init__", build)

    return plant


def shift_reference(trainer: ppo.PPOTrainer) -> None:
    assert trainer.reference
    for weight in trainer.reference.parameters():
        weight.mul_(1.05)


def share_reference(trainer: ppo.PPOTrainer) -> None:
    trainer.reference = trainer.actor.module


def average_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference follows the policy, as a target network does."""
    real = ppo.PPOTrainer.step

    def step(self: Any, *arguments: Any) -> Any:
        numbers = real(self, *arguments)
        with torch.no_grad():
            for old, new in zip(self.reference.parameters(), self.actor.module.parameters()):
                old.lerp_(new, 0.1)
        return numbers

    monkeypatch.setattr(ppo.PPOTrainer, "step", step)


def draw_from_first_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    import copy

    real, first = policy_decoder.generation_mode, []

    @contextmanager
    def generation_mode(*arguments: Any, **options: Any) -> Any:
        with real(*arguments, **options) as model:
            first[:] = first or [copy.deepcopy(model)]
            yield first[0]

    monkeypatch.setattr(policy_decoder, "generation_mode", generation_mode)


def draw_at_another_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Decoder.generate

    def generate(self: Any, model: nn.Module, ids: Any, mask: Any, sampling: Any, copies: int) -> Any:
        return real(self, model, ids, mask, sampling.model_copy(update={"temperature": 0.7}), copies)

    monkeypatch.setattr(Decoder, "generate", generate)


def draw_without_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Decoder.generate

    def generate(self: Any, model: nn.Module, ids: Any, mask: Any, sampling: Any, copies: int) -> Any:
        return real(self, model, ids, torch.ones_like(mask), sampling, copies)

    monkeypatch.setattr(Decoder, "generate", generate)


def score(change: Callable[..., Any]) -> Plant:
    """Change what scoring returns."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        real = ppo.PPOTrainer.score
        monkeypatch.setattr(ppo.PPOTrainer, "score", lambda *arguments, **options: change(real(*arguments, **options)))

    return plant


def update(change: Callable[[Any], Any]) -> Plant:
    """Change the experience that the updates see."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        real = ppo.PPOTrainer.update
        monkeypatch.setattr(
            ppo.PPOTrainer, "update", lambda self, experience, *rest: real(self, change(experience), *rest)
        )

    return plant


def swap_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    real = supervised.pair_loss

    def pair_loss(model: Any, batch: Any, *arguments: Any) -> Any:
        swapped = {key: torch.cat(batch[key].chunk(2)[::-1]) for key in ("input_ids", "attention_mask")}
        return real(model, batch | swapped, *arguments)

    monkeypatch.setattr(supervised, "pair_loss", pair_loss)


def predict_the_token_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(model: nn.Module, batch: Any, *rest: Any) -> Any:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        log_probs = logits.log_softmax(-1).gather(-1, batch["input_ids"].unsqueeze(-1)).squeeze(-1)
        return -(log_probs * batch["loss_mask"]).sum()

    monkeypatch.setattr(supervised, "negative_log_likelihood", loss)


def forget_earlier_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is right; gradients of all micro-batches but the last are lost."""
    real = TrainingEngine.step

    def step(self: TrainingEngine, parts: Any, loss: Any, **options: Any) -> Any:
        def lossy(model: nn.Module, part: Any) -> Any:
            for weight in self.module.parameters():
                weight.grad = None
            return loss(model, part)

        return real(self, parts, lossy, **options)

    monkeypatch.setattr(TrainingEngine, "step", step)


def learn_from_the_last_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    real = TrainingEngine.step
    monkeypatch.setattr(
        TrainingEngine,
        "step",
        lambda self, parts, loss, **options: real(self, [parts[-1]] * len(parts), loss, **options),
    )


FAULTS: dict[str, tuple[str, dict[str, Any], Plant, tuple[int, str]]] = {
    "SFT learns prompts": ("sft", {}, change_batches("collate_sft", learn_prompts), (1, "targets")),
    "SFT learns padding": ("sft", {}, change_batches("collate_sft", learn_padding), (1, "targets")),
    "SFT learns no end tokens": ("sft", {}, change_batches("collate_sft", forget_ends), (1, "targets")),
    "SFT learns rows that fill up a batch": ("sft", {}, change_batches("collate_sft", learn_fillers), (2, "targets")),
    "DPO misses the first token": ("dpo", {}, change_batches("collate_dpo", forget_first_tokens), (1, "targets")),
    "SFT learns prompts in batches of dynamic shapes": (
        *("sft", {"engine": {"shapes": "dynamic"}}, change_batches("collate_sft", learn_all_positions)),
        (1, "targets"),
    ),
    "SFT reads a row twice in an epoch": ("sft", {}, draw_rows_again, (2, "repeated rows")),
    "DPO reads a row twice in an epoch": ("dpo", {}, draw_rows_again, (2, "repeated rows")),
    "the reward model reads padding": ("reward", {}, change_batches("collate_reward", read_padding), (1, "targets")),
    "SFT updates nothing": ("sft", {}, never_update("any"), (1, "trained weights")),
    "the reward model is never updated": ("reward", {}, never_update("any"), (1, "trained weights")),
    "DPO updates nothing": ("dpo", {}, never_update("any"), (1, "trained weights")),
    "the policy is never updated": ("ppo", {}, never_update("actor"), (1, "trained weights")),
    "the critic is never updated": ("ppo", {}, never_update("critic"), (1, "trained weights")),
    "LoRA changes the base": ("sft", LORA, after_each_update(shift_frozen_weights, "any"), (1, "frozen weights")),
    "PPO's LoRA changes the base": (
        *("ppo", LORA, after_each_update(shift_frozen_weights, "actor")),
        (1, "frozen weights"),
    ),
    "the reference is another model": ("ppo", {}, after_building(shift_reference), (1, "first KL")),
    "the reference follows the policy": ("ppo", {}, average_reference, (1, "frozen weights")),
    "the reference is the policy": ("ppo", {}, after_building(share_reference), (2, "reference")),
    "rollouts of the first weights": ("ppo", {}, draw_from_first_weights, (2, "drawing")),
    "rollouts of the first adapters": ("ppo", LORA, draw_from_first_weights, (2, "drawing")),
    "rollouts at another temperature": ("ppo", {}, draw_at_another_temperature, (1, "drawing")),
    "rollouts that see padding": ("ppo", {}, draw_without_mask, (1, "drawing")),
    "scores of other rows": (
        *("ppo", {}, score(lambda scores: replace(scores, log_probs=scores.log_probs.flip(0)))),
        (1, "drawing"),
    ),
    "scores of the token before": (
        *("ppo", {}, score(lambda scores: replace(scores, log_probs=scores.log_probs.roll(1, 1)))),
        (1, "drawing"),
    ),
    "chosen and rejected are swapped": ("reward", {}, swap_pairs, (1, "scoring")),
    "SFT predicts the token itself": ("sft", {}, predict_the_token_itself, (1, "scoring")),
    "SFT learns the last micro-batch alone": ("sft", {}, learn_from_the_last_micro_batch, (1, "scoring")),
    "DPO learns the last micro-batch alone": ("dpo", {}, learn_from_the_last_micro_batch, (1, "scoring")),
    "rewards of other rows": (
        *("ppo", {}, score(lambda scores: replace(scores, reward=scores.reward.flip(0)))),
        (1, "scoring"),
    ),
    "advantages of the other sign": (
        *("ppo", SMALL_STEPS, update(lambda seen: replace(seen, advantages=-seen.advantages))),
        (1, "direction"),
    ),
    "old probabilities of other rows": (
        *("ppo", {}, update(lambda seen: replace(seen, log_probs=seen.log_probs.flip(0)))),
        (1, "first update"),
    ),
    "updates that see padding": (
        *("ppo", {}, update(lambda seen: replace(seen, attention_mask=torch.ones_like(seen.attention_mask)))),
        (1, "first update"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_by_the_second_step(broken: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    stage, settings, plant, found = FAULTS[name]
    plant(monkeypatch)
    assert found in broken(stage, settings) and found[0] <= 2


def test_frozen_weights_are_compared_in_the_last_step_too(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def shift_late(engine: TrainingEngine) -> None:
        if engine.steps == STEPS:
            shift_frozen_weights(engine)

    after_each_update(shift_late, "any")(monkeypatch)
    assert broken("sft", LORA) == [(STEPS, "frozen weights")]


BLIND: dict[str, tuple[str, dict[str, Any], Plant]] = {
    "gradients of the last micro-batch alone": ("sft", {}, forget_earlier_gradients),
}


def test_page_states_how_many_faults_are_found() -> None:
    page = Path(__file__).parents[2].joinpath("docs/diagnosis.md").read_text(encoding="utf-8")
    found = len(FAULTS) + len(OF_ONE_RANK)
    assert f"find {found} of {found + len(BLIND)} faults by the second step" in page.replace("\n", " ")
    section = page.partition("They cannot see:")[2].partition("The same checks")[0]
    assert section.count("\n- ") == len(BLIND)


def read_rows_of_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    real = batches.Batches.__init__
    monkeypatch.setattr(
        batches.Batches, "__init__", lambda *arguments, **options: real(*arguments, **{**options, "rank": 0})
    )


OF_ONE_RANK: dict[str, tuple[Plant, str]] = {
    "its weights change after each step": (
        after_each_update(lambda engine: [weight.mul_(1.01) for weight in engine.module.parameters()], "any"),
        "ranks",
    ),
    "it reads the rows of another rank": (read_rows_of_the_first_rank, "repeated rows"),
}


def run_rank(folder: str) -> None:
    """Train on two ranks, the second of which has a fault."""
    import accelerators

    found = {}
    with distributed.start_process_group(accelerators.select("cpu", environ={})) as accelerator:
        for name, (plant, _) in OF_ONE_RANK.items():
            with pytest.MonkeyPatch.context() as monkeypatch:
                if distributed.world().rank:
                    plant(monkeypatch)
                found[name] = train(accelerator, Path(folder, name), "sft", {})
        if distributed.world().is_main:
            Path(folder, "found.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_faults_of_one_rank_are_found(forks: Forks, tmp_path: Path) -> None:
    forks.ranks(2, f"from tests.trainers import test_plumbing_faults; test_plumbing_faults.run_rank({str(tmp_path)!r})")
    found = json.loads((tmp_path / "found.json").read_text())
    for name, (_, rule) in OF_ONE_RANK.items():
        assert [1, rule] in found[name]


@pytest.mark.parametrize("name", BLIND)
def test_fault_that_no_rule_sees(accelerator: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    stage, settings, plant = BLIND[name]
    assert train(accelerator, tmp_path / "correct", stage, settings) == []
    plant(monkeypatch)
    assert train(accelerator, tmp_path / "faulty", stage, settings) == []
    norms = [
        [record["grad_norm"] for record in read_records(tmp_path / run, stage) if "grad_norm" in record]
        for run in ("correct", "faulty")
    ]
    assert norms[0] != norms[1], "the fault was not planted"
