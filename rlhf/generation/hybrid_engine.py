"""Switch one model from training to generation and back: the same weights, no second model.

`choose_rank_group` chooses how rollouts read the weights of a policy that is sharded over ranks (ZeRO-3,
`ppo.generation_weights`), and `generation_mode` makes them readable in that way. `check_generation` needs no torch
and runs in the launcher too; `check_generation_model` also needs the model's outline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from rlhf.config.schema import Config, PPOConfig
from rlhf.errors import ConfigError
from rlhf.roles.roles import model_placements
from rlhf.utils.process_info import current_process
from rlhf.utils.units import format_bytes

if TYPE_CHECKING:
    from torch import nn

    from rlhf.engine.engine import TrainingEngine
    from rlhf.generation.rank_groups import SingleRank

WeightLayout = Literal["copied", "in place", "unchanged"]
"""How `generation_mode` gives weights the layout that the device reads fastest."""

_LARGE = 20  # memory for weights of more than 1/20 of the device's is returned to the system after a rollout
_USABLE = 0.9  # share of the device's memory; activations and fragmentation take the rest


class GenerationMemory(NamedTuple):
    """Bytes of the whole weights, of the cache and logits of the rows that a rank generates at a time, and in use.

    `total` is the rank's memory, `used` the part that is in use already. `unpacked` are the weights without
    quantization, as ranks split them.
    """

    weights: int
    unpacked: int
    cache: int
    logits: int
    used: int
    total: int

    def fits(self, ranks: int = 1) -> bool:
        """Return True if there is memory for them, split among `ranks` that generate for the rows of all."""
        weights = self.weights if ranks == 1 else self.unpacked // ranks
        needed = weights + self.cache + self.logits * ranks
        return self.used + needed <= _USABLE * self.total

    def __str__(self) -> str:
        values = (self.weights, self.cache, self.logits, self.used, self.total)
        weights, cache, logits, used, total = map(format_bytes, values)
        needs = f"whole weights of {weights}, a cache of {cache} and logits of {logits}"
        return f"{needs} do not fit into {_USABLE:.0%} of {total}, of which {used} is in use"


def check_generation(config: Config, ranks: int) -> None:
    """Check that the settings of PPO's rollouts fit together, for any model.

    Raises:
        ConfigError: they do not.
    """
    ppo, actor = config.ppo, model_placements(config, "ppo")["actor"]
    mode, size = ppo.generation_weights, ppo.tensor_parallel
    if ppo.rollout.where and ppo.rollout.weights == "adapter" and not actor.lora.rank:
        raise ConfigError("ppo.rollout.weights: adapter needs lora.rank above 0, got 0; set that, or files")
    if size and mode not in ("auto", "tensor_parallel"):
        raise ConfigError(
            f"ppo.tensor_parallel: {size} needs ppo.generation_weights=tensor_parallel, got {mode}; change one of them"
        )
    if ppo.generation_exact and (size or mode == "tensor_parallel"):
        raise ConfigError(
            "ppo.generation_exact: split layers are summed over ranks in another order than in training; set "
            "ppo.generation_weights=auto without ppo.tensor_parallel, or ppo.generation_exact=false"
        )
    if mode == "tensor_parallel" and ranks == 1:
        line = "ppo.generation_weights: tensor_parallel needs two ranks or more, got 1; add --ranks N, or set auto"
        raise ConfigError(line)
    if size and ranks == 1:
        raise ConfigError(f"ppo.tensor_parallel: {size} needs two ranks or more, got 1; add --ranks N, or remove it")
    # The plan resolves `auto` later, when the accelerator is known.
    is_auto = config.roles.actor.zero_stage is None and str(config.engine.zero_stage) == "auto"
    if actor.zero_stage < 3 and not is_auto and (size or mode in ("layerwise", "tensor_parallel")):
        key, value = ("ppo.tensor_parallel", size) if size else ("ppo.generation_weights", mode)
        raise ConfigError(
            f"{key}: {value} needs sharded weights, and at ZeRO {actor.zero_stage} the actor's are whole on every "
            "rank; remove it, or set roles.actor.zero_stage=3"
        )
    if size and ranks % size:
        divisors = [divisor for divisor in range(2, ranks + 1) if ranks % divisor == 0]
        nearest = min(divisors, key=lambda divisor: abs(divisor - size))
        raise ConfigError(f"ppo.tensor_parallel: {ranks} ranks cannot be split into groups of {size}; use {nearest}")


def check_generation_model(model: Any, ppo: PPOConfig, ranks: int) -> None:
    """Raise `ConfigError` if the settings require a split model and it cannot be split; no weights are read."""
    if ppo.generation_weights == "tensor_parallel" or ppo.tensor_parallel:
        _resolve_group_size(model, ppo, ranks)


def choose_rank_group(
    engine: TrainingEngine, config: Config, *, say: Callable[[str], None], rows: int | None = None
) -> SingleRank:
    """Return the ranks that generate together with this one; the same choice on all ranks.

    It logs a line if rollouts do not use whole weights. `rows` is the number of rows that a rank generates at a time;
    None: as in PPO.

    Raises:
        ConfigError: as `check_generation_model`.
    """
    from rlhf.engine import distributed
    from rlhf.generation.rank_groups import LockstepRanks, SingleRank, TensorParallelGroup

    mode, ranks = config.ppo.generation_weights, distributed.world().size
    if engine.zero_stage < 3 or mode == "whole":
        return SingleRank()
    # All ranks use the numbers of the rank with the least free memory, so that they make the same choice.
    rows = config.ppo.generation_rows(ranks) if rows is None else rows
    memories = distributed.all_gather_objects(_estimate_memory(engine, config, ranks, rows))
    memory = min(memories, key=lambda memory: memory.total - memory.used)
    if mode == "auto" and memory.fits():
        if config.ppo.tensor_parallel:
            reason = "whole weights fit; set ppo.generation_weights=tensor_parallel to split them"
            say(f"{engine.name}: ppo.tensor_parallel is not used in rollouts, because {reason}")
        return SingleRank()
    reason = f", because {memory}" if mode == "auto" else ""
    size = 0
    if mode != "layerwise" and not config.ppo.generation_exact:
        try:
            size = _resolve_group_size(engine.module, config.ppo, ranks)
        except ConfigError:
            if mode == "tensor_parallel" or config.ppo.tensor_parallel:
                raise
    if size and (mode == "tensor_parallel" or memory.fits(size)):
        say(f"{engine.name}: in rollouts each of {size} ranks keeps its part of every layer (tensor_parallel){reason}")
        return TensorParallelGroup.create(size)
    say(f"{engine.name}: in rollouts each layer is gathered for every token (layerwise), which is slow{reason}")
    return LockstepRanks()


def count_step_bytes(engine: TrainingEngine, rank_group: SingleRank) -> int:
    """Return the bytes of weights that this rank reads in a decoding step: each once, whatever the number of rows.

    Adapters are left out, and a token embedding that is not the output embedding too: a step reads a few of its rows.
    """
    from rlhf.generation.rank_groups import TensorParallelGroup
    from rlhf.models import quantized
    from rlhf.models.weight_loading import whole_bytes

    model, itemsize = cast(Any, engine.module), engine.precision.dtype.itemsize
    tokens, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    skipped = None if output is tokens else tokens
    weights = [weight for name, weight in model.named_parameters() if ".lora_" not in name and weight is not skipped]
    size: int = sum(map(whole_bytes, weights))
    if not isinstance(rank_group, TensorParallelGroup):
        return size + quantized.count_buffer_bytes(model)
    size -= sum(parameter.ds_numel for parameter in quantized.list_packed_parameters(model))
    return (size + quantized.count_quantized(model) * itemsize) // rank_group.size  # it splits unpacked weights


@contextmanager
def generation_mode(
    engine: TrainingEngine, rank_group: SingleRank | None = None, *, layout: WeightLayout = "copied"
) -> Iterator[nn.Module]:
    """Yield the engine's model as the rank group reads it, in evaluation mode and the engine's precision.

    A single rank has the weights whole, with LoRA adapters merged if there is memory for that. For lockstep ranks,
    ZeRO-3 gathers each layer when it is needed, with the adapters separate. A tensor-parallel group makes a second
    model, of which each rank holds a part. If the device has a faster layout for reading weights, they have this layout
    during the block: in a copy (`copied`), or layer by layer in place of the weights (`in place`). With `unchanged`,
    adapters stay separate and weights keep their layout, which takes no memory.
    """
    from rlhf.generation.rank_groups import LockstepRanks, TensorParallelGroup
    from rlhf.generation.tensor_parallel import split_model
    from rlhf.models.lora import adapters_for_rollout
    from rlhf.models.weight_loading import whole_bytes

    accelerator = engine.accelerator
    prepare = None if layout == "unchanged" else accelerator.kernels.get("inference_weights")
    with ExitStack() as stack:
        if prepare and sum(map(whole_bytes, engine.module.parameters())) > accelerator.memory().total / _LARGE:
            stack.callback(accelerator.empty_cache)  # training would not fit into the gaps that the copies leave
        if isinstance(rank_group, TensorParallelGroup):
            module = split_model(engine.module, rank_group)
        elif isinstance(rank_group, LockstepRanks):
            module = engine.module
        else:
            module = stack.enter_context(engine.whole_weights())
            if layout != "unchanged":
                stack.enter_context(adapters_for_rollout(module, engine.placement.lora, accelerator.memory().total))
        if prepare:
            stack.callback(prepare(module, keep=layout == "copied"))
        stack.enter_context(engine.precision.autocast())
        stack.callback(module.train, module.training)
        yield module.eval()


def _resolve_group_size(model: Any, ppo: PPOConfig, ranks: int) -> int:
    """Return the number of ranks that share a model: the configured one, or the largest possible on a machine."""
    from rlhf.generation.tensor_parallel import find_split_obstacle

    local_ranks = current_process().count_local_ranks(ranks)
    sizes = [size for size in range(min(local_ranks, ranks), 1, -1) if ranks % size == local_ranks % size == 0]
    candidates = [ppo.tensor_parallel] if ppo.tensor_parallel else sizes
    obstacles = {size: find_split_obstacle(model, size) for size in candidates}
    if possible := [size for size, obstacle in obstacles.items() if not obstacle]:
        return possible[0]
    obstacle = next(iter(obstacles.values()), "a machine with one rank cannot split a model")
    if ppo.tensor_parallel and (possible := [size for size in sizes if not find_split_obstacle(model, size)]):
        raise ConfigError(f"ppo.tensor_parallel: {obstacle}; use {possible[0]}")
    if ppo.tensor_parallel:
        raise ConfigError(f"ppo.tensor_parallel: {obstacle}; remove it, and set ppo.generation_weights=layerwise")
    raise ConfigError(f"ppo.generation_weights: {obstacle}; use layerwise, or whole if a device has memory for it")


def _estimate_memory(engine: TrainingEngine, config: Config, ranks: int, rows: int) -> GenerationMemory:
    from rlhf.models import quantized
    from rlhf.models.lora import should_merge
    from rlhf.models.weight_loading import whole_bytes

    data, model = config.data, cast(Any, engine.module).config.get_text_config(decoder=True)
    accelerator = engine.accelerator
    memory = accelerator.memory()
    is_shared = accelerator.device() == accelerator.host_device()  # by the ranks of a machine
    merges, _ = should_merge(engine.module, engine.placement.lora, memory.total)
    weights = 0
    for name, weight in engine.module.named_parameters():
        copies = 2 if merges and name.endswith("base_layer.weight") else 1  # merging keeps the original weight
        weights += copies * whole_bytes(weight)
    heads = model.num_attention_heads
    width = getattr(model, "head_dim", None) or model.hidden_size // heads
    width *= getattr(model, "num_key_value_heads", None) or heads
    tokens = rows * (data.max_prompt_length + data.max_completion_length)
    packed = sum(parameter.ds_numel for parameter in quantized.list_packed_parameters(engine.module))
    return GenerationMemory(
        weights=weights,
        unpacked=weights - packed + quantized.count_quantized(engine.module) * engine.precision.dtype.itemsize,
        cache=2 * tokens * width * model.num_hidden_layers * engine.precision.dtype.itemsize,
        logits=3 * rows * model.vocab_size * 4,
        used=memory.allocated,
        total=memory.total // current_process().count_local_ranks(ranks) if is_shared else memory.total,
    )
