"""What a stage says when memory runs out: where it was, who holds how much, and which settings would help here.

The models of a stage and the error flow in; out comes one line, an `OutOfMemory`. What to advise (`advice`) is decided
from settings alone, so that it can be read, and tested, as a table.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accelerators import find_out_of_memory
from rlhf.config.schema import Config, Stage
from rlhf.errors import ConfigError, OutOfMemory
from rlhf.roles import roles
from rlhf.roles.roles import model_placements
from rlhf.utils.units import format_bytes

if TYPE_CHECKING:
    from accelerators import Accelerator
    from rlhf.engine.engine import TrainingEngine
    from rlhf.trainers.context import StageContext

_WITH_ROWS = ("evaluation", "scoring", "training")  # phases that take as many rows at a time as a micro-batch has
_LORA_RANK = 8


@dataclass(frozen=True)
class Situation:
    """What the advice depends on.

    `precision` is what the run computes in, `best` what this device would take by itself. A stage that has `begun`, and
    a run that is `continued`, go on with the settings that they were begun with. `host`: there is a host with memory of
    its own, where what is offloaded would wait.
    """

    config: Config
    stage: Stage
    phase: str
    ranks: int
    precision: str = "fp32"
    best: str = "fp32"
    begun: bool = False
    continued: bool = False
    host: bool = False


def advice(situation: Situation) -> tuple[list[str], list[str]]:
    """Settings that would take less memory, the mildest first: (for this run, for a new one).

    Only those that would change something here: no smaller micro-batch than one row, no ZeRO on one rank.
    """
    config, phase, stage = situation.config, situation.phase, situation.stage
    free, of_the_stage, of_the_run = [], [], []
    if phase in _WITH_ROWS and (rows := _smaller(_micro_batch(situation))):
        free.append(f"{stage}.micro_batch_size={rows}")
    if phase == "training" and not config.model.gradient_checkpointing:
        free.append("model.gradient_checkpointing=true")
    if phase == "generation" and (rows := _fewer_at_a_time(situation)):
        free.append(f"ppo.generation_batch_size={rows}")
    if phase == "generation" and _gathers_more(situation):
        free.append("ppo.generation_weights=layerwise")
    if situation.host and stage == "ppo" and config.ppo.ema and not config.ppo.ema_on_host:
        free.append("ppo.ema_on_host=true")
    if situation.host and (wish := _more_offload(situation)):
        free.append(f"engine.offload={wish}")
    elif situation.host and phase != "loading" and config.engine.zero_stage == 0 and not config.lora.rank:
        of_the_stage.append("engine.zero_stage=1 --set engine.offload=optimizer")
    if stage == "dpo" and "reference" in model_placements(config, stage):
        of_the_stage.append("dpo.reference=precomputed")
    if phase == "generation" and (rows := _smaller_rollout(situation)):
        of_the_stage.append(f"ppo.batch_size={rows}")
    if situation.precision == "fp32" != situation.best:
        of_the_stage.append("precision=auto")
    # One of the two: ZeRO-3 holds no quantized weights.
    sharded, quantized = config.engine.zero_stage == 3, config.engine.frozen != "auto"
    if config.lora.rank and not sharded and not quantized:  # most of what is held is frozen
        of_the_stage.append("engine.frozen=int8")
    elif situation.ranks > 1 and not sharded and not quantized and phase != "loading":
        of_the_stage.append("engine.zero_stage=3")
    if not config.lora.rank:
        of_the_stage.append(f"lora.rank={_LORA_RANK}")
    lengths = {name: getattr(config.data, name) for name in ("max_prompt_length", "max_completion_length")}
    longest = max(lengths, key=lambda name: lengths[name])
    if phase in (*_WITH_ROWS, "generation") and lengths[longest] > 1:
        of_the_run.append(f"data.{longest}={lengths[longest] // 2}")
    now = [*free, *([] if situation.begun else of_the_stage), *([] if situation.continued else of_the_run)]
    anew = [*(of_the_stage if situation.begun else []), *(of_the_run if situation.continued else [])]
    return now, anew


def line(
    lack: BaseException,
    where: str,
    figures: str,
    held: Mapping[str, int],
    keys: tuple[list[str], list[str]],
    on_host: Mapping[str, int] | None = None,
) -> str:
    """One line: what happened, the peak, what each model holds, on the device and on the host, and what to do."""
    parts = [f"out of memory {where} ({_short(lack)})", figures]
    for what, counts in {"weights, gradients and optimizer": held, "and on the host": on_host}.items():
        if counts:
            parts.append(f"{what}: {', '.join(f'{role} {format_bytes(count)}' for role, count in counts.items())}")
    now, anew = keys
    if now:
        parts.append(f"try, with --set and in this order: {', '.join(now)}")
    if anew:
        parts.append(f"with another --output{', also' if now else ''}: {', '.join(anew)}")
    if not now and not anew:
        parts.append("no setting of this run would help: use a device with more memory")
    return "; ".join(filter(None, parts))


@contextlib.contextmanager
def explained(context: StageContext) -> Iterator[None]:
    """A lack of memory in this block, which runs a stage, becomes an `OutOfMemory` that says what would help."""
    try:
        yield
    except Exception as error:
        lack = find_out_of_memory(error)
        if lack is None:
            raise
        accelerator, world = context.accelerator, context.world
        apart = accelerator.host_device() != accelerator.device()
        situation = Situation(
            context.config,
            context.directory.name,
            context.phases.current,
            world.size,
            precision=context.precision.name,
            best=accelerator.precision().name,
            begun=context.directory.started,
            continued=any(stage.started for stage in context.run.stages),
            host=apart and not _is_the_hosts(lack),
        )
        where = f"on {'the host' if _is_the_hosts(lack) else accelerator.name} in {situation.stage}, {situation.phase}"
        rank = f"rank {world.rank}: " if world.size > 1 else ""
        held = held_by(context.models)
        on_host = held_by(context.models, accelerator.host_device()) if apart else {}
        held = {role: count - on_host.get(role, 0) for role, count in held.items()}
        on_host = {role: count for role, count in on_host.items() if count}
        figures = _figures(accelerator)
        context.phases.current = "preparation"
        raise OutOfMemory(rank + line(lack, where, figures, held, advice(situation), on_host)) from error


def held_by(models: Mapping[str, TrainingEngine | nn.Module], place: torch.device | None = None) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state that each of `models` holds on this rank by itself.

    And `shared`, what several do: the base under their adapters.

    Args:
        place: counts what is there alone, on the host for example.
    """
    found = {role: _storages(model, place) for role, model in models.items()}
    owners = Counter(key for storages in found.values() for key in storages)
    shared = {key: count for storages in found.values() for key, count in storages.items() if owners[key] > 1}
    own = {role: sum(count for key, count in each.items() if owners[key] == 1) for role, each in found.items()}
    return own | ({"shared": sum(shared.values())} if shared else {})


def _storages(model: TrainingEngine | nn.Module, place: torch.device | None) -> dict[int, int]:
    """The bytes of each of its storages."""
    module = model if isinstance(model, nn.Module) else model.module
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    tensors += [
        part for tensor in tensors for part in (tensor.grad, getattr(tensor, "ds_tensor", None)) if part is not None
    ]
    if not isinstance(model, nn.Module):
        optimizer = model.engine.optimizer
        base = getattr(optimizer, "optimizer", optimizer)
        tensors += _tensors([vars(optimizer), base.param_groups, dict(base.state)])
        tensors += model.ema.tensors if model.ema else []
    # DeepSpeed puts tensors without memory in the place of gradients that are on the host.
    there = [tensor for tensor in tensors if not tensor.is_meta and place in (None, tensor.device)]
    strided = [tensor for tensor in there if tensor.layout == torch.strided]
    opaque = {id(tensor): tensor.nbytes for tensor in there if tensor.layout != torch.strided}  # a device's own form
    return opaque | {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in strided)}


def _tensors(value: Any) -> list[Tensor]:
    """Every tensor in nested containers, with its gradient."""
    if isinstance(value, Tensor):
        return [value] if value.grad is None else [value, value.grad]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _figures(accelerator: Accelerator) -> str:
    try:
        memory = accelerator.memory()
    except Exception:  # a device may answer no more; what else is known is worth saying
        return ""
    return f"peak {format_bytes(memory.peak)} of {format_bytes(memory.total)}"


def _is_the_hosts(lack: BaseException) -> bool:
    return isinstance(lack, (MemoryError, OSError)) or "CPUAllocator" in str(lack)


def _more_offload(situation: Situation) -> str:
    """The most that `engine.offload` may say in this stage; empty where that would change nothing."""
    config, stage = situation.config, situation.stage
    for wish in ("all", "optimizer", "parameters"):
        changed = config.model_copy(update={"engine": config.engine.model_copy(update={"offload": wish})})
        with contextlib.suppress(ConfigError):
            roles.check_placements(changed, [stage])
            return wish if _offloaded(changed, stage) != _offloaded(config, stage) else ""
    return ""


def _offloaded(config: Config, stage: Stage) -> list[tuple[bool, bool]]:
    return [
        (placement.offloads_optimizer, placement.offloads_parameters)
        for placement in roles.model_placements(config, stage).values()
    ]


def _micro_batch(situation: Situation) -> int:
    config, ranks = situation.config, situation.ranks
    if situation.stage == "ppo":
        return config.ppo.minibatch(ranks)[1]
    return config.supervised(situation.stage).micro_batch(ranks, section=situation.stage)


def _smaller(rows: int) -> int:
    """The largest part into which `rows` divide; 0 for one row."""
    return next((part for part in range(rows // 2, 0, -1) if rows % part == 0), 0)


def _fewer_at_a_time(situation: Situation) -> int:
    """Half the rows that a rank generates at a time; 0 for one row."""
    ppo = situation.config.ppo
    share = ppo.batch_size // situation.ranks
    return min(ppo.generation_batch_size or share, share) // 2


def _gathers_more(situation: Situation) -> bool:
    """Whether a rollout may take more of the sharded weights onto a device than one layer at a time."""
    sharded = model_placements(situation.config, "ppo")["actor"].zero_stage == 3 and situation.ranks > 1
    return sharded and situation.config.ppo.generation_weights != "layerwise"


def _smaller_rollout(situation: Situation) -> int:
    """The largest rollout of at most half the rows that divides as this one does; 0 where there is none."""
    ppo = situation.config.ppo
    for rows in range(ppo.batch_size // 2, 0, -1):
        with contextlib.suppress(ConfigError):
            ppo.model_copy(update={"batch_size": rows}).minibatch(situation.ranks)
            return rows
    return 0


def _short(lack: BaseException) -> str:
    return textwrap.shorten(f"{type(lack).__name__}: {lack}".removesuffix(": "), 120, placeholder=" ...")
