"""The memory of a stage: by role and kind, on each device and on the host, in each phase.

`plan_stage` takes a configuration, the shapes of its models and the environment, and returns a `MemoryPlan`.
`ModelMemory` counts the memory of a model; this module adds the activations of passes through models, and finds out
what exists at the same time. The sizes of activations follow transformers' modules and PyTorch's derivatives: a norm
and a linear layer keep their inputs, attention its queries, keys, values and result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rlhf.config.rollout import PROBE_ROWS, PROBE_TOKENS
from rlhf.config.schema import Config, PPOConfig, Stage
from rlhf.memory.environment import Environment
from rlhf.memory.model_state import BLOCK, MemoryItem, ModelMemory, block_item, sum_bytes
from rlhf.models.shape import EMBEDDED, Shape, shape_from, shape_of
from rlhf.roles.base_sharing import predict_sharing
from rlhf.roles.lineage import resolve_base_model
from rlhf.roles.roles import RoleName, model_placements

Shapes = Mapping[str | None, Shape]
"""Shapes of models by the path that a stage loads them from; None is the embedded model."""

Models = Mapping[RoleName, ModelMemory]
Moments = list[tuple[str, list[MemoryItem]]]
"""(phase, items that exist at the same time)."""

GREEDY_SAMPLES = 3
"""The number of completions that a stage without rollouts shows (rlhf.trainers.greedy_samples)."""

_FIRST_PASSES = 50 * 2**20  # bytes that a process adds in its first passes: threads, kernels' memory, late imports
_WITH_ROLLOUTS: tuple[Stage, ...] = ("ppo", "distill")
_TRAINED: tuple[RoleName, ...] = ("actor", "critic")  # by PPO, in its order
_USABLE = 0.9  # part of a device's memory that a copy may fill, which only saves time
_WINDOW, _MOST_WINDOWS = 32, 4  # steps of a recording, and recordings of a rollout (rlhf.generation.decode_state)
_FEWEST = 256  # columns of logits in one chunk (rlhf.losses)
_LARGE = 64 << 20  # bytes of 16-bit logits above which they are never stored whole (rlhf.models.forward)


@dataclass(frozen=True)
class PhaseMemory:
    """The memory at the fullest moment of a phase."""

    name: str
    items: tuple[MemoryItem, ...]

    @property
    def device(self) -> int:
        """Bytes on each device."""
        return sum_bytes(self.items, host=False)

    @property
    def host(self) -> int:
        """Bytes on the host, for each rank."""
        return sum_bytes(self.items, host=True)


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one stage.

    Attributes:
        parameters: for each role, the numbers of all parameters and of those that are trained.
        at_rest: bytes on a device between passes: weights, masters and moments of all models, known exactly.
        copies_weights: rollouts convert the weights in a copy; if that does not fit, they convert them in place.
    """

    stage: Stage
    phases: tuple[PhaseMemory, ...]
    parameters: Mapping[RoleName, tuple[int, int]]
    at_rest: int = 0
    copies_weights: bool = False

    @property
    def fullest(self) -> PhaseMemory:
        """The phase that uses most memory on a device."""
        return max(self.phases, key=lambda phase: phase.device)

    @property
    def host(self) -> int:
        """The maximum number of bytes that a rank uses on the host."""
        return max(phase.host for phase in self.phases)

    def fits(self, environment: Environment) -> bool:
        """Return whether the stage fits."""
        host_limit = environment.host_limit
        return self.fullest.device <= environment.device_limit and (host_limit is None or self.host <= host_limit)


class Rows(NamedTuple):
    """`number` rows of `length` tokens in one pass."""

    number: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return self.number * self.length


def build_models(
    config: Config, stage: Stage, environment: Environment, shapes: Shapes | None = None
) -> dict[RoleName, ModelMemory]:
    """Return the models of a stage, each with the shape of its base model.

    Args:
        shapes: the shapes that are already known.

    Raises:
        ConfigError: the shape of a model is not known, or a batch cannot be divided over the ranks.
    """
    models = {}
    placements = model_placements(config, stage)
    shared = predict_sharing(config, stage, placements).donors
    accumulates = _micro_batches(config, stage, environment.ranks) > 1
    for name, placement in placements.items():
        path = resolve_base_model(config, placement.role.base).path
        shape = (shapes or {}).get(path)
        if shape is None:
            shape = shape_of(path) if path else shape_from(EMBEDDED, "the embedded model")
        shape = shape.rounded(config.model.vocabulary_multiple)
        models[name] = ModelMemory(
            placement,
            shape,
            environment,
            shared=name in shared,
            initial_kept=stage in _WITH_ROLLOUTS and config.lora.share_base is not False and placement.zero_stage < 3,
            accumulates=accumulates,
        )
    return models


def plan_stage(config: Config, stage: Stage, environment: Environment, shapes: Shapes | None = None) -> MemoryPlan:
    """Return the memory that `stage` takes.

    Raises:
        ConfigError: as `build_models`.
    """
    models = build_models(config, stage, environment, shapes)
    resting = [item for model in models.values() for item in model.resting()]
    if stage == "ppo" and config.ppo.ema:
        resting.append(models["actor"].average(on_host=config.ppo.ema_on_host))
    process = [MemoryItem("process", "libraries", environment.process, host=not environment.unified_memory)]
    moments = [("loading", [*process, *items]) for items in _loading(models)]
    process.append(MemoryItem("process", "libraries", _FIRST_PASSES, host=not environment.unified_memory))
    moments_of = {"sft": _supervised, "reward": _supervised, "dpo": _dpo, "ppo": _ppo, "distill": _distill}[stage]
    moments += [(name, [*process, *resting, *items]) for name, items in moments_of(config, stage, environment, models)]
    copies_weights = False
    elsewhere = stage == "ppo" and bool(config.ppo.rollout.where)
    if stage in _WITH_ROLLOUTS and not elsewhere and environment.converts_weights:
        generation = next(items for name, items in moments if name == "generation")
        policy = next(iter(models.values()))
        copy = policy.converted(config, copied=True)
        copies_weights = sum_bytes([*generation, *copy], host=False) <= _USABLE * environment.device_limit
        generation += copy if copies_weights else policy.converted(config, copied=False)
    moments.append(("saving", [*process, *resting, *next(iter(models.values())).saving()]))
    fullest: dict[str, PhaseMemory] = {}
    for (name, items), fragments in zip(moments, _fragmentation(moments, environment)):
        phase = PhaseMemory(name, (*items, *fragments))
        if name not in fullest or (phase.device, phase.host) > (fullest[name].device, fullest[name].host):
            fullest[name] = phase
    parameters = {name: (model.parameters, model.trained) for name, model in models.items()}
    at_rest = sum_bytes([*process, *resting], host=False)
    return MemoryPlan(stage, tuple(fullest.values()), parameters, at_rest, copies_weights)


def find_reuse_obstacle(settings: PPOConfig, micro_batches: int, trained: Iterable[tuple[str, bool, int]]) -> str:
    """Return why the update's passes cannot also score policy and critic, apart from memory; empty if they can.

    Args:
        micro_batches: micro-batches of a rollout on one rank.
        trained: (role, whether its training passes draw at random, its ZeRO stage) of each model that is trained.
    """
    if not settings.reuse_forward:
        return "ppo.reuse_forward is false"
    if settings.updates > 1:
        return f"{settings.updates} updates follow a rollout (ppo.ppo_epochs, ppo.minibatch_size)"
    for role, is_stochastic, zero_stage in trained:
        if is_stochastic:
            return f"the {role} is trained with dropout or noise"
        if zero_stage == 3 and micro_batches > 1:
            return f"at ZeRO-3 DeepSpeed gathers the {role}'s weights in the order of one micro-batch after the other"
    return ""


def saved_activations(
    shape: Shape, rows: Rows, environment: Environment, *, dropout: bool = False, checkpointing: bool = False
) -> int:
    """Return the bytes that all layers keep for the backward pass.

    Args:
        checkpointing: each layer keeps only its input, and one layer at a time is recomputed.
    """
    layer = _layer_activations(shape, rows, environment, dropout)
    if checkpointing:
        return shape.layers * rows.tokens * shape.hidden * environment.width + layer
    return shape.layers * layer


def _micro_batches(config: Config, stage: Stage, ranks: int) -> int:
    """Return the number of micro-batches of a rank in one step."""
    if stage == "ppo":
        minibatch, micro = config.ppo.minibatch(ranks)
        return minibatch // (micro * ranks) + config.ppo.pretraining(ranks)[0]
    section = config.supervised(stage)
    return section.batch_size // (section.micro_batch(ranks, section=stage) * ranks)


def _fragmentation(moments: Moments, environment: Environment) -> Iterator[list[MemoryItem]]:
    """Yield the fragmentation at each moment.

    A device's allocator loses a part of the memory in use. The host's allocator keeps small blocks that were freed: its
    heap stays as large as at its fullest moment.
    """
    heap = 0
    for _, items in moments:
        heap = max(heap, sum(item.small for item in items))
    for name, items in moments:
        if environment.unified_memory:
            lost = 0 if name == "loading" else heap - sum(item.small for item in items)
        else:
            used = sum_bytes([item for item in items if item.kind != "libraries"], host=False)
            lost = int(environment.fragmentation * used)
        yield [MemoryItem("process", "fragmentation", lost)] if lost else []


def _loading(models: Models) -> list[list[MemoryItem]]:
    """Return the moments at which each model is loaded, after those before it."""
    moments: list[list[MemoryItem]] = []
    loaded: list[MemoryItem] = []
    for model in models.values():
        moments.append([*loaded, *model.loading()])
        loaded += model.resting(fresh=True)
    return moments


def _supervised(config: Config, stage: Stage, environment: Environment, models: Models) -> Moments:
    (model,) = models.values()
    micro = config.supervised(stage).micro_batch(environment.ranks, section=stage)
    batch = Rows(micro * (1 if stage == "sft" else 2), config.data.max_length)
    moments = [("training", items) for items in _update(model, batch, batch.length if stage == "sft" else 0)]
    return [*moments, ("evaluation", _generation(config, model, GREEDY_SAMPLES))] if stage == "sft" else moments


def _dpo(config: Config, stage: Stage, environment: Environment, models: Models) -> Moments:
    batch = Rows(2 * config.dpo.micro_batch(environment.ranks, section=stage), config.data.max_length)
    columns = config.data.max_completion_length
    moments = [("training", items) for items in _update(models["dpo"], batch, columns)]
    if reference := models.get("reference"):  # before the policy's passes
        moments.append(("scoring", [*reference.copied(), *_scoring(reference, batch, columns)]))
    return [*moments, ("evaluation", _generation(config, models["dpo"], GREEDY_SAMPLES))]


def _ppo(config: Config, stage: Stage, environment: Environment, models: Models) -> Moments:
    data, settings, ranks = config.data, config.ppo, environment.ranks
    micro = settings.minibatch(ranks)[1]
    share = settings.batch_size // ranks
    batch, completion = Rows(micro, data.max_length), data.max_completion_length
    rollout = [block_item("rollout", "experience", share * data.max_length * 8 * 4)]
    actor = models["actor"]
    if settings.rollout.where:  # weights are written for the servers, and a probe is scored
        probe = Rows(PROBE_ROWS, PROBE_TOKENS)
        generation = [*_scoring(actor, probe, probe.length - 1), *actor.saving()]
    else:
        generation = [*_generation(config, actor, settings.generation_rows(ranks)), *actor.merged(config)]
    moments = [("generation", generation)]
    # Frozen models of a step that wait on the host are copied to the device together.
    together = [item for model in models.values() if model.placement.role.in_steps for item in model.copied()]
    for model in models.values():
        role, passes = model.placement.role, _scoring(model, batch, 0 if model.scalar_head else completion)
        copies = [] if role.trained else together if role.in_steps else model.copied()
        moments.append(("scoring", [*rollout, *copies, *passes]))
    trained = [models[name] for name in _TRAINED if name in models]
    placements = [(model.role, bool(model.placement.dropout), model.placement.zero_stage) for model in trained]
    reused = 0 if find_reuse_obstacle(settings, share // micro, placements) else share // micro
    critic: list[MemoryItem] = []  # its reused passes exist while the actor is trained
    if reused and "critic" in models:
        critic = _graphs(models["critic"], batch, 0, reused) + models["critic"].gathered()
    for model in trained:
        columns, other = (completion, critic) if model.role == "actor" else (0, [])
        between, *later = _update(model, batch, columns)
        between += _graphs(model, batch, columns, reused - 1)  # the model's other passes, freed one by one
        moments += [(f"training of the {model.role}", [*rollout, *other, *items]) for items in (between, *later)]
    if settings.ptx_coef:
        texts = Rows(settings.pretraining(ranks)[1], settings.ptx_length or data.max_length)
        updates = _update(models["actor"], texts, texts.length - 1)
        moments += [("training of the actor", [*rollout, *critic, *items]) for items in updates]
    return moments


def _distill(config: Config, stage: Stage, environment: Environment, models: Models) -> Moments:
    data, settings, ranks = config.data, config.distill, environment.ranks
    share, completion = settings.batch_size // ranks, data.max_completion_length
    batch = Rows(settings.micro_batch(ranks, section=stage), data.max_length)
    student = models["student"]
    generation = [*_generation(config, student, settings.generation_rows(ranks)), *student.merged(config)]
    moments = [("generation", generation)]
    for model in (model for model in models.values() if not model.placement.role.trained):
        moments.append(("scoring", [*model.copied(), *_scoring(model, batch, 0)]))
    kept = _read_by_teacher(models["teacher"], share * completion, batch, completion) if "teacher" in models else []
    return [*moments, *(("training", [*kept, *items]) for items in _update(student, batch, completion))]


def _read_by_teacher(teacher: ModelMemory, tokens: int, batch: Rows, completion: int) -> list[MemoryItem]:
    """Return the memory of a teacher's distributions of `tokens` tokens until the update, and in it.

    A token has the teacher's hidden state, or its logits if they are more than a product.
    """
    shape, environment = teacher.shape, teacher.environment
    width = shape.hidden if shape.plain_logits else shape.vocabulary
    items = [block_item("teacher", "activations", tokens * width * environment.width)]
    if teacher.placement.zero_stage == 3 or teacher.placement.offloads_parameters:  # with its output layer
        items.append(block_item("teacher", "weights", shape.tokens * environment.width))
    return [*items, block_item("teacher", "logits", *_logits(shape, batch, environment, completion, 0))]


def _generation(config: Config, model: ModelMemory, number: int) -> list[MemoryItem]:
    """Return the memory of generating `number` rows: the cache, the activations of one layer, and sampling."""
    shape, width = model.shape, model.environment.width
    rows, prompts = Rows(number, config.data.max_length), Rows(number, config.data.max_prompt_length)
    # Logits, their float32 copy, probabilities, and their sorted order.
    logits = number * shape.vocabulary * (width + 16)
    step = logits + _passing_activations(shape, Rows(number, 1), model.environment)
    recordings = count_recordings(config, model)
    return [
        MemoryItem(model.role, "KV cache", rows.tokens * shape.cached * width),
        block_item(model.role, "logits", logits),
        *([MemoryItem(model.role, "recordings", recordings * step)] if recordings else []),
        block_item(model.role, "activations", _passing_activations(shape, prompts, model.environment)),
        *model.gathered_for_generation(config),
    ]


def count_recordings(config: Config, model: ModelMemory) -> int:
    """Return the number of recorded steps that keep memory, one for each width of the cache."""
    environment, weights = model.environment, config.ppo.generation_weights
    gathers = model.placement.zero_stage == 3 and environment.ranks > 1 and weights in ("layerwise", "tensor_parallel")
    if gathers or not environment.keeps_recordings:  # steps with collectives are not recorded
        return 0
    steps = max(config.data.max_completion_length - 1, 1)
    return min(-(-steps // _WINDOW), _MOST_WINDOWS)


def _scoring(model: ModelMemory, batch: Rows, columns: int) -> list[MemoryItem]:
    """Return the memory of a pass without gradients, with logits of `columns`."""
    name, environment = model.role, model.environment
    items = [block_item(name, "activations", _passing_activations(model.shape, batch, environment))]
    if columns:
        items.append(block_item(name, "logits", *_logits(model.shape, batch, environment, columns, 1)))
    return [*items, *model.gathered()]


def _update(model: ModelMemory, batch: Rows, columns: int) -> list[list[MemoryItem]]:
    """Return the moments of an update: between its passes, at the end of backward, and at the optimizer's step.

    Args:
        columns: the columns that are projected to the vocabulary; 0 if none.
    """
    before, after = model.backward()
    between = [before, *_graphs(model, batch, 0, 1), *model.gathered()]
    if columns:
        between.append(block_item(model.role, "logits", *_logits(model.shape, batch, model.environment, columns, 2)))
    return [between, [*after, *model.gathered()], *model.step()]


def _graphs(model: ModelMemory, batch: Rows, columns: int, number: int) -> list[MemoryItem]:
    """Return the memory that `number` micro-batches keep for backward: activations, and logits of `columns`."""
    if number < 1:
        return []
    shape, environment, placement = model.shape, model.environment, model.placement
    activations = saved_activations(
        shape, batch, environment, dropout=placement.dropout != 0, checkpointing=placement.gradient_checkpointing
    )
    activations += batch.tokens * shape.hidden * 3 * environment.width  # embeddings, and the final norm with its input
    widest = batch.tokens * max(shape.hidden, shape.intermediate) * environment.width
    small = number * activations if widest < BLOCK else 0
    items = [MemoryItem(model.role, "activations", number * activations, small=small)]
    if columns:  # without the chunks in which logits are processed, which are temporary
        logits = _logits(shape, batch, environment, columns, 1)[:-3]
        items.append(block_item(model.role, "logits", *(number * logits)))
    return items


def _layer_activations(shape: Shape, rows: Rows, environment: Environment, dropout: bool) -> int:
    """Return the bytes that one layer keeps for the backward pass."""
    width, hidden = environment.width, shape.hidden
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Each of the two parts of a layer keeps its norm's input and result; RMS norms also compute in float32.
    norms = 2 * 2 * hidden * width + (2 * 4 * hidden if shape.rms else 0)
    attention = (2 * queries + 2 * keys) * width + 4 * shape.heads
    feed_forward = shape.saved_ffn * shape.intermediate * width
    dropped = 2 * hidden * width if dropout and not shape.rms else 0
    return rows.tokens * (norms + attention + feed_forward + dropped) + _attention_weights(shape, rows, environment)


def _passing_activations(shape: Shape, rows: Rows, environment: Environment) -> int:
    """Return the bytes of one layer in a pass without gradients: at its widest moment, with the residual."""
    attention = shape.heads * shape.head_dim + 2 * shape.kv_heads * shape.head_dim + 2 * shape.hidden
    feed_forward = (3 if shape.gated else 2) * shape.intermediate + 2 * shape.hidden
    widest = rows.tokens * environment.width * max(attention, feed_forward)
    return widest + _attention_weights(shape, rows, environment)


def _attention_weights(shape: Shape, rows: Rows, environment: Environment) -> int:
    """Return the bytes of unfused attention: the softmax in float32, and its result in the compute precision."""
    if environment.fused_attention:
        return 0
    return rows.tokens * shape.heads * rows.length * (4 + (environment.width if environment.width < 4 else 0))


def _logits(shape: Shape, rows: Rows, environment: Environment, columns: int, copies: int) -> list[int]:
    """Return the bytes of `copies` of the logits of `columns`, and of the chunks in which they are processed.

    If logits are computed and used chunk by chunk (rlhf.models.forward), only the chunks exist.
    """
    width, positions = environment.width, rows.number * columns
    numbers = positions * shape.vocabulary
    in_parts = shape.plain_logits and (width == 4 or numbers * width > _LARGE)
    chunks = 3 * [4 * min(numbers, max(environment.chunk_elements, _FEWEST * positions))]
    return chunks if in_parts else copies * [numbers * width] + chunks
