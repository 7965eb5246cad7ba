"""A plan as people and programs read it: numbers by phase, one verdict, and advice.

What `rlhf plan` prints, and the lines that a run says of its plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.config.schema import Config, Stage
from rlhf.generation import strategy
from rlhf.memory import duration
from rlhf.memory.advice import Change, Room, fewest_devices, largest_micro_batch, plan, remedy, settled
from rlhf.memory.model_state import Surroundings
from rlhf.memory.models import models_of
from rlhf.memory.stage import StagePlan
from rlhf.roles import roles
from rlhf.utils.units import format_bytes


def told(
    config: Config,
    stage: Stage,
    around: Surroundings,
    room: Room,
    *,
    measured: Path | None = None,
    tflops: float | None = None,
    price: float | None = None,
    rows: int | None = None,
) -> dict[str, Any]:
    """What `rlhf plan` says of a stage.

    Raises:
        ConfigError: as `fit.plan`; the run would be refused; `measured` holds no run.
    """
    resolved = settled(config, [stage], around, room=room)
    roles.check_placements(resolved, [stage])
    if stage == "ppo":
        strategy.check_generation(config, around.ranks)
    (found,) = plan(config, [stage], around, room=room)
    fits = room.holds(found)
    advice = _decided(config, resolved)
    if not fits:
        advice["cheapest change"] = said(remedy(config, [stage], around, room)) or "none that is known is enough"
    few = fewest_devices(config, [stage], around, room)
    advice["fewest devices"] = f"{few:,} of these" if few else "with these settings no number is enough"
    most = largest_micro_batch(resolved, stage, around, room)
    advice["largest micro-batch"] = f"{most} rows at a time" if most else "with these settings not even one row fits"
    took = _duration(resolved, stage, around, measured, tflops, rows)
    if took:
        money = f", {took.cost(price, around.ranks):,.2f} in money" if price is not None else ""
        advice["time"] = f"{took.hours:,.2f} hours ({took.steps:,} steps of {took.seconds_per_step:,.2f} s){money}"
    elif measured or tflops:
        advice["time"] = "not known: say with --rows how many rows there are, or measure this stage"
    return {
        "stage": stage,
        "fits": fits,
        "verdict": f"{'fits' if fits else 'does not fit'}: {peak(found, room)}",
        "devices": around.ranks,
        "memory": room.device,
        "precision": around.precision,
        "parameters": {name: {"all": both[0], "trained": both[1]} for name, both in found.parameters.items()},
        "phases": [{"phase": phase.name, "device": phase.device, "host": phase.host} for phase in found.phases],
        "fullest": found.fullest.name,
        "items": _items(found),
        "advice": advice,
        **({"hours": took.hours, "steps": took.steps} if took else {}),
        **({"cost": took.cost(price, around.ranks)} if took and price is not None else {}),
    }


def _items(found: StagePlan) -> list[dict[str, Any]]:
    """What is there in the fullest phase, the largest first: one entry for each kind that a role has in one place."""
    sizes: dict[tuple[str, str, bool], int] = {}
    for item in found.fullest.items:
        key = (item.role, item.kind, item.host)
        sizes[key] = sizes.get(key, 0) + item.size
    return [
        {"role": role, "kind": kind, "bytes": size, "host": host}
        for (role, kind, host), size in sorted(sizes.items(), key=lambda item: -item[1])
        if size
    ]


def peak(found: StagePlan, room: Room | None) -> str:
    """`peak about 5.1 GiB of 23.4 GiB on each device (update of the actor)`."""
    phase = found.fullest
    of = f" of {format_bytes(room.device)}" if room else ""
    return f"peak about {format_bytes(phase.device)}{of} on each device ({phase.name})"


def said(changes: Sequence[Change]) -> str:
    """Changes as options of one command, with what they cost."""
    together = Change({key: value for change in changes for key, value in change.settings.items()}, "")
    costs = "; ".join(change.cost for change in changes)
    return f"--set {' --set '.join(str(together).split(', '))} ({costs})" if changes else ""


def _decided(config: Config, resolved: Config) -> dict[str, str]:
    """What was left to the plan."""
    keys = ("zero_stage", "offload")
    pairs = [(key, getattr(config.engine, key), getattr(resolved.engine, key)) for key in keys]
    return {f"engine.{key}": f"{now} (auto)" for key, given, now in pairs if given == "auto"}


def _duration(
    config: Config, stage: Stage, around: Surroundings, measured: Path | None, tflops: float | None, rows: int | None
) -> duration.Duration | None:
    steps = duration.steps_of(config, stage, rows)
    if measured:
        return duration.from_run(measured, stage, steps)
    if tflops and steps:
        return duration.from_throughput(config, stage, models_of(config, stage), steps, tflops, around.ranks)
    return None
