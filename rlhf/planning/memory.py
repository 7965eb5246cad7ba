"""Bytes that a run takes: by role and kind, on each device and on the host, at each phase of a stage.

A configuration, the shapes of its models and the surroundings flow in; a `StagePlan` for each stage flows out. The
sizes are what DeepSpeed 0.19.8 and the stages allocate; `rlhf.planning.held` counts what a model holds, this module
what is there at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf.config import Config, Stage
from rlhf.planning.activations import Rows, cache, kept, kept_by_checkpoints, logits, passing, sampling
from rlhf.planning.held import Item, Model, Surroundings, fragments
from rlhf.planning.held import total as total
from rlhf.roles import Holding, Name, holdings

PHASES = {
    "loading": "loading",
    "generation": "generation",
    "scoring": "scoring",
    "actor": "update of the actor",
    "critic": "update of the critic",
    "update": "update",
    "saving": "saving",
}


@dataclass(frozen=True)
class Phase:
    """What is there at one moment of a stage: the fullest of this kind."""

    name: str
    items: tuple[Item, ...]

    @property
    def device(self) -> int:
        """Bytes on each device."""
        return total(self.items, host=False)

    @property
    def host(self) -> int:
        """Bytes on the host, of each rank."""
        return total(self.items, host=True)


@dataclass(frozen=True)
class StagePlan:
    """What one stage takes."""

    stage: Stage
    phases: tuple[Phase, ...]
    parameters: Mapping[Name, tuple[int, int]]
    """Of each role: all numbers that it holds, and those that are trained."""

    @property
    def fullest(self) -> Phase:
        """The phase that takes most of a device."""
        return max(self.phases, key=lambda phase: phase.device)

    @property
    def host(self) -> int:
        """The most that a rank takes of the host."""
        return max(phase.host for phase in self.phases)


def plan_stage(config: Config, stage: Stage, models: Mapping[Name, Model], around: Surroundings) -> StagePlan:
    """What `stage` takes, whose roles are `models`; see `rlhf.planning.models.models_of`.

    Raises:
        ConfigError: its batches cannot be divided over the ranks.
    """
    held = holdings(config, stage)
    resting = [item for name in held for item in models[name].resting(held[name], around)]
    base = [Item("process", "libraries", around.base, host=not around.one_memory)]
    made = {
        "sft": _supervised,
        "reward": _supervised,
        "ppo": _ppo,
    }[stage](config, stage, models, held, around)
    phases = []
    for name, items in (
        {"loading": _loading(models, held, around)} | made | {"saving": _saving(models, held, around)}
    ).items():
        present = [*base, *resting, *items] if name != "loading" else [*base, *items]
        phases.append(Phase(PHASES[name], (*present, *fragments(present, around))))
    return StagePlan(stage, tuple(phases), {name: models[name].counts(held[name]) for name in held})


Moments = dict[str, list[Item]]
Models = Mapping[Name, Model]
Held = Mapping[Name, Holding]


def _supervised(config: Config, stage: Stage, models: Models, held: Held, around: Surroundings) -> Moments:
    name: Name = "sft" if stage == "sft" else "reward"
    section = config.sft if stage == "sft" else config.reward
    rows = section.micro_batch(around.ranks, section=stage) * (1 if stage == "sft" else 2)
    batch = Rows(rows, config.data.max_length, around.width, around.fused)
    columns = batch.length if stage == "sft" else 0
    accumulation = section.batch_size // (section.micro_batch(around.ranks, section=stage) * around.ranks)
    return {"update": _update(name, models, held, around, batch, columns, accumulation)}


def _ppo(config: Config, stage: Stage, models: Models, held: Held, around: Surroundings) -> Moments:
    data, settings = config.data, config.ppo
    minibatch, micro = settings.minibatch(around.ranks)
    share = settings.batch_size // around.ranks
    batch = Rows(micro, data.max_length, around.width, around.fused)
    answer = data.max_completion_length
    accumulation = minibatch // (micro * around.ranks)
    kept_rollout = [Item("rollout", "experience", share * data.max_length * 8 * 4)]
    generating = Rows(min(settings.generation_batch_size or share, share), data.max_length, around.width, around.fused)
    prompts = generating._replace(length=data.max_prompt_length)
    actor, shape = models["actor"], models["actor"].shape
    rollout = [
        Item("actor", "KV cache", cache(shape, generating)),
        Item("actor", "logits", sampling(shape, generating)),
        Item("actor", "activations", passing(shape, prompts)),
        *actor.for_rollouts(config, held["actor"], around),
    ]
    widest = max(models.values(), key=lambda model: passing(model.shape, batch))
    scoring = [
        *kept_rollout,
        Item("actor", "logits", logits(shape, batch, answer, 1)),
        Item("all", "activations", passing(widest.shape, batch)),
        *max((models[name].gathered(held[name], around) for name in held), key=lambda found: total(found, host=False)),
    ]
    return {
        "generation": rollout,
        "scoring": scoring,
        "actor": kept_rollout + _update("actor", models, held, around, batch, answer, accumulation),
        "critic": kept_rollout + _update("critic", models, held, around, batch, 0, accumulation),
    }


def _update(
    name: Name, models: Models, held: Held, around: Surroundings, batch: Rows, columns: int, accumulation: int
) -> list[Item]:
    """One role's update: the fuller of the moment between its passes, and of the end of the backward pass or the step.

    Args:
        columns: those that are projected to the vocabulary; 0: none.
    """
    model, holding = models[name], held[name]
    dropout = holding.dropout != 0
    count = kept_by_checkpoints if holding.gradient_checkpointing else kept
    before = Item(name, "gradients", model.accumulated(holding, around, accumulation))
    between = [
        before,
        Item(name, "activations", count(model.shape, batch, dropout=dropout) + _outside(model, batch)),
        *model.gathered(holding, around),
    ]
    if columns:
        between.append(Item(name, "logits", logits(model.shape, batch, columns, 2)))
    after = model.step(holding, around, accumulation)
    return max((between, after), key=lambda items: total(items, host=False) + total(items, host=True))


def _outside(model: Model, batch: Rows) -> int:
    """Embeddings, and the last norm with its input: kept besides the layers."""
    return batch.tokens * model.shape.hidden * (3 * batch.width)


def _loading(models: Models, held: Held, around: Surroundings) -> list[Item]:
    """One role after the other: those before it rest, and it is made."""
    moments = []
    before: list[Item] = []
    for name, holding in held.items():
        moments.append([*before, *models[name].making(holding, around)])
        before += models[name].resting(holding, around, fresh=True)
    return max(moments, key=lambda items: total(items, host=False))


def _saving(models: Models, held: Held, around: Surroundings) -> list[Item]:
    name = next(iter(held))
    return models[name].saving(held[name], around)
