"""Reports of a plan for people and programs: the output of `rlhf plan`, and the lines that a run prints.

They include duration and price (`rlhf.memory.duration`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.config.schema import Config, Stage
from rlhf.errors import ConfigError
from rlhf.generation.hybrid_engine import check_generation
from rlhf.memory.advice import (
    Change,
    apply_settings,
    find_changes,
    find_fewest_devices,
    find_largest_micro_batch,
    plan_stages,
    resolve_auto,
)
from rlhf.memory.duration import estimate_duration, find_speed, measure_duration
from rlhf.memory.environment import Environment, detect_environment
from rlhf.memory.stage import MemoryPlan, Shapes, plan_stage
from rlhf.models.shape import shape_of
from rlhf.roles.lineage import ResolvedBaseModel, resolve_base_model
from rlhf.roles.roles import check_placements
from rlhf.utils.units import format_bytes, format_count

if TYPE_CHECKING:
    from accelerators import Accelerator, KnownDevice

RESOLVED_KEYS = ("zero_stage", "offload")
"""Keys of `engine` for which the plan resolves `auto`."""


def resolve_engine(
    config: Config,
    stages: Sequence[Stage],
    accelerator: Accelerator,
    ranks: int,
    recorded: Mapping[str, Any],
) -> tuple[Config, str | None]:
    """Return the configuration with a value for each `auto` of `engine`, and a line that says so; None if none is.

    Args:
        recorded: the recorded `engine` of a run that is resumed; it keeps the values that it was started with.

    Raises:
        ConfigError: the shape of a model is not known, so that nothing can be resolved.
    """
    keys = [key for key in RESOLVED_KEYS if getattr(config.engine, key) == "auto"]
    if not keys:
        return config, None
    if all(recorded.get(key, "auto") != "auto" for key in keys):
        values, reason = {key: recorded[key] for key in keys}, "as the run was started"
    else:
        environment = detect_environment(accelerator, config, ranks)
        resolved = resolve_auto(config, stages, environment)
        plans = [plan_stage(resolved, stage, environment) for stage in stages]
        fullest = max(plans, key=lambda plan: plan.fullest.device)
        values = {key: getattr(resolved.engine, key) for key in keys}
        reason = f"{fullest.stage}: {format_peak(fullest, environment)}"
    settings = {f"engine.{key}": value for key, value in values.items()}
    listed = ", ".join(f"{key}={value}" for key, value in settings.items())
    return apply_settings(config, settings), f"auto: {listed} ({reason})"


class StartPlan(NamedTuple):
    """The plan of a stage that is about to start.

    Attributes:
        plan: None if a model's shape is not known.
        lines: lines about it.
        refusal: the reason why the stage cannot run here now; "" if it may.
        reserved: bytes that the device's runtime takes beside the plan.
    """

    plan: MemoryPlan | None = None
    lines: Sequence[str] = ()
    refusal: str = ""
    reserved: int = 0


def plan_next_stage(
    config: Config,
    stage: Stage,
    accelerator: Accelerator,
    bases: Sequence[ResolvedBaseModel],
    *,
    ranks: int,
    fused_attention: bool = True,
) -> StartPlan:
    """Return the plan of a stage that is about to start, compared with the memory that is free now.

    The stage is refused only if what it keeps all the time does not fit, which the plan knows exactly.

    Args:
        bases: the models that the stage starts from, with the paths that they will be loaded from.
    """
    environment = replace(detect_environment(accelerator, config, ranks), fused_attention=fused_attention)
    try:
        shapes: Shapes = {resolve_base_model(config, base.ref).path: shape_of(base.path) for base in bases if base.path}
        (plan,) = plan_stages(config, [stage], environment, shapes)
    except ConfigError:  # a missing plan must not stop a run
        return StartPlan()
    free = environment.device_limit if environment.available is None else environment.available
    in_use = plan.fullest.device <= environment.device_limit and plan.fullest.device > free
    if in_use:
        environment = replace(environment, device_limit=free)
    peak = format_peak(plan, environment) + (", the rest is in use by other programs" if in_use else "")
    if plan.fits(environment):
        return StartPlan(plan, [f"{stage}: plan: {peak}"], reserved=environment.reserved)
    changes = find_changes(config, [stage], environment, shapes)
    if plan.fullest.device <= environment.device_limit:
        host_limit = format_bytes(environment.host_limit or 0)
        peak = f"peak about {format_bytes(plan.host)} of {host_limit} on the host for each rank"
    remedy = f"try {format_changes(changes)}" if changes else "use larger devices or a smaller model"
    refusal = ""
    if environment.available is not None and plan.at_rest > environment.available:
        kept, left = format_bytes(plan.at_rest), format_bytes(environment.available)
        refusal = (
            f"{stage}: the system would end this run: weights and optimizer states alone take {kept} on each rank, and "
            f"{left} are free; {remedy}"
        )
    return StartPlan(plan, [f"{stage}: plan: will hardly fit: {peak}; {remedy}"], refusal, environment.reserved)


def report_stage(
    config: Config,
    stage: Stage,
    environment: Environment,
    *,
    device: KnownDevice | None = None,
    measured: Path | None = None,
    tflops: float | None = None,
    price: float | None = None,
    rows: int | None = None,
) -> dict[str, Any]:
    """Return what `rlhf plan` prints about a stage.

    Args:
        device: the device that the environment was described from; its speed and price are used if no others are given.
        measured: the folder of a run, or the output of `rlhf profile --json`, for its speed.
        tflops: TFLOP/s of a device.
        price: price of a device for an hour.
        rows: rows of the stage in one epoch.

    Raises:
        ConfigError: as `plan_stages`; or the run would be refused; or `measured` is neither, or of other devices.
    """
    resolved = resolve_auto(config, [stage], environment)
    check_placements(resolved, [stage])
    if stage == "ppo":
        check_generation(config, environment.ranks)
    plan = plan_stage(resolved, stage, environment)
    fits = plan.fits(environment)
    advice = {
        f"engine.{key}": f"{getattr(resolved.engine, key)} (auto)"
        for key in RESOLVED_KEYS
        if getattr(config.engine, key) == "auto"
    }
    if not fits:
        changes = find_changes(config, [stage], environment)
        advice["cheapest change"] = format_changes(changes) or "none that is known is enough"
    devices = find_fewest_devices(config, [stage], environment)
    advice["fewest devices"] = f"{devices:,} of these" if devices else "with these settings no number is enough"
    most = find_largest_micro_batch(resolved, stage, environment)
    unit = "pair" if stage in ("reward", "dpo") else "row"
    advice["largest micro-batch"] = (
        f"{format_count(most, unit + 's')} at a time" if most else f"with these settings not even one {unit} fits"
    )
    times, texts = _estimate_times(resolved, stage, environment, device, measured, tflops, price, rows)
    return {
        "stage": stage,
        "fits": fits,
        "verdict": f"{'fits' if fits else 'does not fit'}: {format_peak(plan, environment)}",
        "devices": environment.ranks,
        "memory": max(environment.device_limit, 0),
        "precision": environment.precision,
        "parameters": {name: {"all": both[0], "trained": both[1]} for name, both in plan.parameters.items()},
        "phases": [{"phase": phase.name, "device": phase.device, "host": phase.host} for phase in plan.phases],
        "fullest": plan.fullest.name,
        "items": _list_items(plan),
        "advice": advice | texts,
        **times,
    }


def format_peak(plan: MemoryPlan, environment: Environment) -> str:
    """Return `peak about 5.1 GiB of 23.4 GiB on each device (training of the actor)`, and what the runtime takes."""
    phase, reserved = plan.fullest, environment.reserved
    used, total = format_bytes(phase.device), format_bytes(environment.device_limit + reserved)
    runtime = f", plus {format_bytes(reserved)} for the device's runtime," if reserved else ""
    return f"peak about {used}{runtime} of {total} on each device ({phase.name})"


def format_changes(changes: Sequence[Change]) -> str:
    """Return changes as options of one command, with their costs; empty if there are none."""
    settings = {key: value for change in changes for key, value in change.settings.items()}
    costs = "; ".join(change.cost for change in changes)
    return f"--set {Change(settings, costs)} ({costs})" if changes else ""


def format_hours(hours: float) -> str:
    """Return `1.50 hours`, or minutes if it is less than one."""
    return f"{hours:,.2f} hours" if hours >= 1 else f"{60 * hours:,.1f} minutes"


def _estimate_times(
    config: Config,
    stage: Stage,
    environment: Environment,
    device: KnownDevice | None,
    measured: Path | None,
    tflops: float | None,
    price: float | None,
    rows: int | None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a stage's hours, steps and cost, and lines about them; the arguments are those of `report_stage`."""
    duration, source = None, ""
    if measured and measured.is_file() and environment.ranks > 1:
        raise ConfigError(
            f"--measured {measured}: was measured in one process, and the plan has {environment.ranks} devices; give "
            "the folder of a run on as many"
        )
    if measured:
        duration = measure_duration(config, stage, measured, rows, environment.ranks)
        source = f"the speed of {measured}"
    elif speed := find_speed(environment, device, tflops):
        duration, source = estimate_duration(config, stage, environment, speed, rows), speed.source
    elif device:
        return {}, {"time": f"not known: no speed in {environment.precision} is known; give --tflops, or --measured"}
    if not (measured or tflops or device):
        return {}, {}
    if duration is None:
        return {}, {"time": "not known: give the number of rows with --rows, or measure this stage"}
    hours = duration.hours
    times: dict[str, Any] = {"hours": hours, "steps": duration.steps, "start_hours": duration.start / 3600}
    details = f"{format_count(duration.steps, 'steps')} of {duration.seconds:,.2f} s"
    details += f", and {duration.outside:,.0f} s outside them" if duration.outside else ""
    if device and duration.generation:
        times["generation_share"] = duration.generation
        details += f", {100 * duration.generation:.0f} % of it generation"
    text = f"{format_hours(hours)} ({details})"
    listed = device.price if device and price is None else None
    price = listed.dollars if listed else price
    if price is not None:
        times["cost"] = cost = hours * price * environment.ranks
        text += f", cost {cost:,.2f}"
    if not device:
        return times, {"time": text}
    if listed:
        source += f"; {listed.dollars:.2f} dollars per device-hour ({listed.source}, {listed.date})"
    elif price is None:
        source += "; no price is known, give --price"
    return times, {"time": f"about {text}", "estimated from": source}


def _list_items(plan: MemoryPlan) -> list[dict[str, Any]]:
    """Return the items of the fullest phase, the largest first: one for each role, kind and place."""
    sizes: dict[tuple[str, str, bool], int] = {}
    for item in plan.fullest.items:
        key = (item.role, item.kind, item.host)
        sizes[key] = sizes.get(key, 0) + item.size
    return [
        {"role": role, "kind": kind, "bytes": size, "host": host}
        for (role, kind, host), size in sorted(sizes.items(), key=lambda item: -item[1])
        if size
    ]
