"""How a rollout gets at the weights of a policy that is sharded over ranks (ZeRO-3): `ppo.generation_weights`.

The settings flow in, and the policy's engine or its outline; out comes the team that generates, or a line that says why
what was asked for cannot be had. `check` needs no torch, and runs in the launcher too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from rlhf.config.schema import Config, PPOConfig
from rlhf.errors import ConfigError
from rlhf.roles.roles import model_placements
from rlhf.utils.process_info import current_process
from rlhf.utils.units import format_bytes

if TYPE_CHECKING:
    from rlhf.engine.engine import TrainingEngine
    from rlhf.generation.rank_groups import SingleRank

_ROOM = 0.9  # of the device's memory; activations and what lies between tensors take the rest


class MemoryNeed(NamedTuple):
    """Bytes of the whole weights, of the cache and the logits of the rows that a rank generates at a time; and those
    that are used of all that a rank has."""

    weights: int
    cache: int
    logits: int
    used: int
    total: int

    def fits(self, ranks: int = 1) -> bool:
        """Whether there is room for them, split among `ranks` that generate for the rows of all."""
        needed = self.weights // ranks + self.cache + self.logits * ranks
        return self.used + needed <= _ROOM * self.total

    def __str__(self) -> str:
        weights, cache, used, total = map(format_bytes, (self.weights, self.cache, self.used, self.total))
        return f"whole weights of {weights} and a cache of {cache} do not fit next to {used} of {total} in use"


def check_generation(config: Config, ranks: int) -> None:
    """Find out whether the settings of PPO's rollouts fit together, whatever the model.

    Raises:
        ConfigError: they do not.
    """
    ppo, actor = config.ppo, model_placements(config, "ppo")["actor"]
    mode, among = ppo.generation_weights, ppo.tensor_parallel
    if among and mode not in ("auto", "tensor_parallel"):
        raise ConfigError(
            f"ppo.tensor_parallel: {among} is for ppo.generation_weights=tensor_parallel, which is {mode}; "
            "change one of them"
        )
    if mode == "tensor_parallel" and ranks == 1:
        raise ConfigError(
            "ppo.generation_weights: tensor_parallel needs two ranks or more, and there is one; leave it at auto"
        )
    # `auto` is for the plan to decide, which looks at the accelerator first.
    undecided = config.roles.actor.zero_stage is None and str(config.engine.zero_stage) == "auto"
    if actor.zero_stage < 3 and not undecided and (among or mode in ("layerwise", "tensor_parallel")):
        key, value = ("ppo.tensor_parallel", among) if among else ("ppo.generation_weights", mode)
        sharded = "" if actor.quantization else ", or set roles.actor.zero_stage=3"  # which cannot be quantized
        raise ConfigError(
            f"{key}: {value} is for weights that are sharded, and the actor's are whole on every rank at ZeRO "
            f"{actor.zero_stage}; leave it out{sharded}"
        )
    if among and ranks % among:
        raise ConfigError(
            f"ppo.tensor_parallel: {ranks} ranks cannot be cut into teams of {among}; use {_nearest(ranks, among)}"
        )


def check_generation_model(model: Any, ppo: PPOConfig, ranks: int) -> None:
    """Raise `ConfigError` where the settings demand that a model be split, and it cannot be. Reads no weights."""
    if ppo.generation_weights == "tensor_parallel" or ppo.tensor_parallel:
        _team_size(model, ppo, ranks)


def choose(engine: TrainingEngine, config: Config, *, say: Callable[[str], None]) -> SingleRank:
    """The ranks that generate together with this one, which is how they get at the weights; the same on all ranks.

    Args:
        say: is given a line where rollouts do not have the weights whole.

    Raises:
        ConfigError: as `check_model`.
    """
    from rlhf.engine import distributed
    from rlhf.generation.rank_groups import LockstepRanks, SingleRank, TensorParallelGroup

    mode, ranks = config.ppo.generation_weights, distributed.world().size
    if engine.zero_stage < 3 or mode == "whole":
        return SingleRank()
    # Ranks decide alike: by the one that has the least room.
    need = min(distributed.all_gather_objects(_need(engine, config, ranks)), key=lambda need: need.total - need.used)
    if mode == "auto" and need.fits():
        return SingleRank()
    because = f", as {need}" if mode == "auto" else ""
    size = 0
    if mode != "layerwise":
        try:
            size = _team_size(engine.module, config.ppo, ranks)
        except ConfigError:
            if mode == "tensor_parallel" or config.ppo.tensor_parallel:
                raise
    if size and (mode == "tensor_parallel" or need.fits(size)):
        say(f"{engine.name}: in rollouts each of {size} ranks keeps its part of every layer (tensor_parallel){because}")
        return TensorParallelGroup.of(size)
    say(f"{engine.name}: in rollouts each layer is gathered for every token (layerwise), which is slow{because}")
    return LockstepRanks()


def _team_size(model: Any, ppo: PPOConfig, ranks: int) -> int:
    """Among how many ranks a model is split: as many as is said, or as many of a machine as can share it."""
    from rlhf.generation.tensor_parallel import find_split_obstacle

    machine = current_process().count_local_ranks(ranks)
    sizes = [size for size in range(min(machine, ranks), 1, -1) if ranks % size == machine % size == 0]
    wanted = [ppo.tensor_parallel] if ppo.tensor_parallel else sizes
    reasons = {size: find_split_obstacle(model, size) for size in wanted}
    if able := [size for size, why in reasons.items() if not why]:
        return able[0]
    why = next(iter(reasons.values()), "one rank of a machine has nobody to share with")
    if ppo.tensor_parallel and (able := [size for size in sizes if not find_split_obstacle(model, size)]):
        raise ConfigError(f"ppo.tensor_parallel: {why}; use {able[0]}")
    raise ConfigError(f"ppo.generation_weights: {why}; use layerwise, or whole where a device holds the model")


def _need(engine: TrainingEngine, config: Config, ranks: int) -> MemoryNeed:
    from rlhf.models.lora import should_merge

    ppo, data, model = config.ppo, config.data, cast(Any, engine.module).config.get_text_config(decoder=True)
    accelerator = engine.accelerator
    memory = accelerator.memory()
    shared = accelerator.device() == accelerator.host_device()  # by the ranks of a machine
    merged, _ = should_merge(engine.module, engine.placement.lora, memory.total)
    weights = 0
    for name, weight in engine.module.named_parameters():
        copies = 2 if merged and name.endswith("base_layer.weight") else 1  # what adapters are merged into is kept
        weights += copies * getattr(weight, "ds_numel", weight.numel()) * weight.element_size()
    share = ppo.batch_size // ranks
    rows = min(ppo.generation_batch_size or share, share)
    heads = model.num_attention_heads
    width = getattr(model, "head_dim", None) or model.hidden_size // heads
    width *= getattr(model, "num_key_value_heads", None) or heads
    tokens = rows * (data.max_prompt_length + data.max_completion_length)
    return MemoryNeed(
        weights=weights,
        cache=2 * tokens * width * model.num_hidden_layers * engine.precision.dtype.itemsize,
        logits=3 * rows * model.vocab_size * 4,
        used=memory.allocated,
        total=memory.total // current_process().count_local_ranks(ranks) if shared else memory.total,
    )


def _nearest(ranks: int, among: int) -> int:
    """The size of a team into which `ranks` can be cut that is nearest to the one asked for."""
    return min((size for size in range(2, ranks + 1) if ranks % size == 0), key=lambda size: abs(size - among))
