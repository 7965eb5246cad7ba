"""Bytes that a run takes: by role and kind, on each device and on the host, at each phase of a stage.

A configuration, the shapes of its models and the surroundings flow in; a `StagePlan` for each stage flows out. The
sizes are what DeepSpeed 0.19.8 and the stages allocate; `rlhf.memory.model_state` counts what a model holds, this
module
what is there at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf.config.schema import Config, Stage
from rlhf.memory.activations import Rows, cache, kept, kept_by_checkpoints, logits, passing, sampling
from rlhf.memory.model_state import BLOCK, Item, Model, Surroundings, in_blocks, total
from rlhf.roles.roles import ModelPlacement, RoleName, model_placements

PASSES = 50 * 2**20
"""Bytes that a process gains with its first passes: threads, kernels' own memory, modules that are imported late."""


@dataclass(frozen=True)
class PhaseMemory:
    """Memory at the fullest moment of a phase."""

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
    phases: tuple[PhaseMemory, ...]
    parameters: Mapping[RoleName, tuple[int, int]]
    """Of each role: all numbers that it holds, and those that are trained."""

    @property
    def fullest(self) -> PhaseMemory:
        """The phase that takes most of a device."""
        return max(self.phases, key=lambda phase: phase.device)

    @property
    def host(self) -> int:
        """The most that a rank takes of the host."""
        return max(phase.host for phase in self.phases)


def plan_stage(config: Config, stage: Stage, models: Mapping[RoleName, Model], around: Surroundings) -> StagePlan:
    """What `stage` takes, whose roles are `models`; see `rlhf.memory.models.models_of`.

    Raises:
        ConfigError: its batches cannot be divided over the ranks.
    """
    held = model_placements(config, stage)
    parts = _micro_batches(config, stage, around.ranks) > 1
    models = {name: replace(model, parts=parts) for name, model in models.items()}
    resting = [item for name in held for item in models[name].resting(held[name], around)]
    if stage == "ppo" and config.ppo.ema:
        resting.append(models["actor"].average(held["actor"], around, on_host=config.ppo.ema_on_host))
    base = [Item("process", "libraries", around.base, host=not around.one_memory)]
    stages = {"sft": _supervised, "reward": _supervised, "dpo": _dpo, "ppo": _ppo}
    moments = [("loading", [*base, *items]) for items in _loading(models, held, around)]
    base.append(Item("process", "libraries", PASSES, host=not around.one_memory))
    moments += [(name, [*base, *resting, *items]) for name, items in stages[stage](config, stage, models, held, around)]
    moments.append(("saving", [*base, *resting, *models[next(iter(held))].saving(held[next(iter(held))], around)]))
    phases = [PhaseMemory(name, (*items, *lost)) for (name, items), lost in zip(moments, _lost(moments, around))]
    fullest = {
        name: max((p for p in phases if p.name == name), key=lambda p: (p.device, p.host)) for name in _names(phases)
    }
    return StagePlan(stage, tuple(fullest.values()), {name: models[name].counts(held[name]) for name in held})


_TRAINED: tuple[RoleName, ...] = ("actor", "critic")  # by PPO, in its order

Moments = list[tuple[str, list[Item]]]
Models = Mapping[RoleName, Model]
Held = Mapping[RoleName, ModelPlacement]


def _micro_batches(config: Config, stage: Stage, ranks: int) -> int:
    """How many a rank has in one step."""
    if stage == "ppo":
        minibatch, micro = config.ppo.minibatch(ranks)
        return minibatch // (micro * ranks) + config.ppo.pretraining(ranks)[0]
    section = config.supervised(stage)
    return section.batch_size // (section.micro_batch(ranks, section=stage) * ranks)


def _names(phases: Sequence[PhaseMemory]) -> list[str]:
    return list(dict.fromkeys(phase.name for phase in phases))


def _lost(moments: Moments, around: Surroundings) -> Iterator[list[Item]]:
    """What lies between blocks, at each moment.

    A device's allocator loses a part of what is there. The host's keeps small blocks that were freed: its heap is as
    large as at its fullest moment ever since.
    """
    heap = 0
    for _, items in moments:
        heap = max(heap, sum(item.small for item in items))
    for name, items in moments:
        present = total([item for item in items if item.kind != "libraries"], host=False)
        if not around.one_memory:
            lost = int(around.margin * present)
        else:
            lost = 0 if name == "loading" else heap - sum(item.small for item in items)
        yield [Item("process", "fragmentation", lost)] if lost else []


def _supervised(config: Config, stage: Stage, models: Models, held: Held, around: Surroundings) -> Moments:
    name: RoleName = "sft" if stage == "sft" else "reward"
    micro = config.supervised(stage).micro_batch(around.ranks, section=stage)
    batch = Rows(micro * (1 if stage == "sft" else 2), config.data.max_length, around.width, around.fused)
    columns = batch.length if stage == "sft" else 0
    return [("training", items) for items in _update(name, models, held, around, batch, columns)]


def _dpo(config: Config, stage: Stage, models: Models, held: Held, around: Surroundings) -> Moments:
    rows = 2 * config.dpo.micro_batch(around.ranks, section=stage)
    batch = Rows(rows, config.data.max_length, around.width, around.fused)
    columns = config.data.max_completion_length
    moments = [("training", items) for items in _update("dpo", models, held, around, batch, columns)]
    if "reference" in held:  # before the policy's own passes
        reference = models["reference"]
        scoring = [
            in_blocks("reference", "activations", passing(reference.shape, batch)),
            in_blocks("reference", "logits", *logits(reference.shape, batch, columns, 1)),
        ]
        moments.append(("scoring", [*scoring, *reference.gathered(held["reference"], around)]))
    return moments


def _ppo(config: Config, stage: Stage, models: Models, held: Held, around: Surroundings) -> Moments:
    data, settings = config.data, config.ppo
    _, micro = settings.minibatch(around.ranks)
    share = settings.batch_size // around.ranks
    batch = Rows(micro, data.max_length, around.width, around.fused)
    answer = data.max_completion_length
    rollout = [in_blocks("rollout", "experience", share * data.max_length * 8 * 4)]
    generating = Rows(min(settings.generation_batch_size or share, share), data.max_length, around.width, around.fused)
    actor, shape = models["actor"], models["actor"].shape
    drawing = [
        Item("actor", "KV cache", cache(shape, generating)),
        in_blocks("actor", "logits", sampling(shape, generating)),
        in_blocks("actor", "activations", passing(shape, generating._replace(length=data.max_prompt_length))),
        *actor.for_rollouts(config, held["actor"], around),
    ]
    moments = [("generation", drawing)]
    for name in held:
        items = [*rollout, in_blocks(name, "activations", passing(models[name].shape, batch))]
        if not models[name].scalar_head:
            items.append(in_blocks(name, "logits", *logits(models[name].shape, batch, answer, 1)))
        moments.append(("scoring", [*items, *models[name].gathered(held[name], around)]))
    parts = share // micro if reuses(config, held, around.ranks) else 0
    critic: list[Item] = []  # what its passes keep that are reused, while the actor is updated
    if parts and "critic" in held:
        critic = _graphs("critic", models, held, batch, 0, parts) + models["critic"].gathered(held["critic"], around)
    for name in [name for name in _TRAINED if name in held]:
        columns, beside = (answer, critic) if name == "actor" else (0, [])
        between, *later = _update(name, models, held, around, batch, columns)
        others = _graphs(name, models, held, batch, columns, parts - 1)  # of its own, which go one by one
        moments += [(f"training of the {name}", [*rollout, *beside, *items]) for items in ([*between, *others], *later)]
    if settings.ptx_coef:
        length = settings.ptx_length or data.max_length
        texts = batch._replace(number=settings.pretraining(around.ranks)[1], length=length)
        updates = _update("actor", models, held, around, texts, length - 1)
        moments += [("training of the actor", [*rollout, *critic, *items]) for items in updates]
    return moments


def reuses(config: Config, held: Held, ranks: int) -> bool:
    """True if the settings let the update's passes score policy and critic (`rlhf.trainers.ppo.forward_reuse`)."""
    settings = config.ppo
    parts = settings.batch_size // (settings.minibatch(ranks)[1] * ranks)
    trained = [placement for name, placement in held.items() if placement.role.trained]
    one_pass = settings.reuse_forward and settings.updates == 1 and not any(placement.dropout for placement in trained)
    return one_pass and (parts == 1 or all(placement.zero_stage < 3 for placement in trained))


def _graphs(name: RoleName, models: Models, held: Held, batch: Rows, columns: int, number: int) -> list[Item]:
    """What the training passes of `number` micro-batches keep for backward: activations, and logits of `columns`."""
    if number < 1:
        return []
    shape, placement = models[name].shape, held[name]
    count = kept_by_checkpoints if placement.gradient_checkpointing else kept
    activations = count(shape, batch, dropout=placement.dropout != 0)
    activations += batch.tokens * shape.hidden * 3 * batch.width  # embeddings, and the last norm with its input
    widest = batch.tokens * max(shape.hidden, shape.intermediate) * batch.width
    items = [Item(name, "activations", number * activations, small=number * activations if widest < BLOCK else 0)]
    if columns:  # without the chunks that logits are worked on in, which wait for nothing
        items.append(in_blocks(name, "logits", *(number * logits(shape, batch, columns, 1)[:-3])))
    return items


def _update(
    name: RoleName, models: Models, held: Held, around: Surroundings, batch: Rows, columns: int
) -> list[list[Item]]:
    """One role's update: between its passes, when the backward pass ends, and at the optimizer's step.

    Args:
        columns: those that are projected to the vocabulary; 0: none.
    """
    model, placement = models[name], held[name]
    before, after = model.backward(placement, around)
    between = [before, *_graphs(name, models, held, batch, 0, 1), *model.gathered(placement, around)]
    if columns:
        between.append(in_blocks(name, "logits", *logits(model.shape, batch, columns, 2)))
    return [between, [*after, *model.gathered(placement, around)], *model.step(placement, around)]


def _loading(models: Models, held: Held, around: Surroundings) -> list[list[Item]]:
    """One role after the other: those before it rest, and it is made."""
    moments: list[list[Item]] = []
    before: list[Item] = []
    for name, placement in held.items():
        moments.append([*before, *models[name].making(placement, around)])
        before += models[name].resting(placement, around, fresh=True)
    return moments
