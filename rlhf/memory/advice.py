"""Changes of settings that save memory: one table, used before a run starts and after it ran out of memory.

Functions take a configuration, its stages and the environment, and return plans, or `Change`s that make them fit.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf.config.schema import Config, Stage
from rlhf.errors import ConfigError
from rlhf.memory.environment import Environment
from rlhf.memory.stage import MemoryPlan, Shapes, plan_stage
from rlhf.reporting.timers import Phase
from rlhf.roles.roles import check_placements, model_placements
from rlhf.runs.resume import CHANGEABLE_ON_RESUME, SHARED_SECTIONS

_MAX_DEVICES = 1024
_LORA_RANK = 8
_WITH_ROWS: tuple[Phase, ...] = ("evaluation", "scoring", "training")
"""Phases whose forward passes have the rows of a micro-batch."""


@dataclass(frozen=True)
class Change:
    """Settings that take less memory, and their cost in words."""

    settings: dict[str, Any]
    cost: str

    def __str__(self) -> str:
        """Return the settings in the form of `--set`."""
        values = {key: str(value).lower() if isinstance(value, bool) else value for key, value in self.settings.items()}
        return " --set ".join(f"{key}={value}" for key, value in values.items())


def plan_stages(
    config: Config, stages: Sequence[Stage], environment: Environment, shapes: Shapes | None = None
) -> list[MemoryPlan]:
    """Return the plan of each stage, with each `auto` resolved as `resolve_auto` does.

    Raises:
        ConfigError: the shape of a model is not known, or a batch cannot be divided over the ranks.
    """
    config = resolve_auto(config, stages, environment, shapes)
    return [plan_stage(config, stage, environment, shapes) for stage in stages]


def resolve_auto(
    config: Config, stages: Sequence[Stage], environment: Environment, shapes: Shapes | None = None
) -> Config:
    """Return the configuration with a value for each `auto` that the plan resolves.

    The first combination that fits is chosen, or the last if none fits. The order prefers less offload, then less ZeRO
    sharding, then rollouts at ZeRO-3 with `whole` before `tensor_parallel` before `layerwise` weights, then reuse of
    PPO's forward passes.
    """
    multiple, can_offload = environment.ranks > 1, not environment.unified_memory
    alternatives: dict[str, Sequence[Any]] = {}
    if config.engine.offload == "auto":
        alternatives["engine.offload"] = ("none", "optimizer", "all") if can_offload else ("none",)
    if config.engine.zero_stage == "auto":  # on one rank, only offloading needs ZeRO
        shards = multiple or (can_offload and config.engine.offload != "none")
        alternatives["engine.zero_stage"] = environment.zero_stages if shards else (0,)
    if config.ppo.generation_weights == "auto":
        alternatives["ppo.generation_weights"] = ("whole", "tensor_parallel", "layerwise") if multiple else ("whole",)
    if config.ppo.reuse_forward and config.ppo.updates == 1:
        alternatives["ppo.reuse_forward"] = (True, False)
    combinations = itertools.product(*alternatives.values())
    candidates = [apply_settings(config, dict(zip(alternatives, values, strict=True))) for values in combinations]
    choices = [choice for choice in candidates if _is_possible(choice, stages, environment.ranks)] or candidates[:1]
    for choice in choices:
        if all(plan_stage(choice, stage, environment, shapes).fits(environment) for stage in stages):
            return choice
    return choices[-1]


def stages_fit(config: Config, stages: Sequence[Stage], environment: Environment, shapes: Shapes | None = None) -> bool:
    """Return whether all stages fit."""
    plans = plan_stages(config, stages, environment, shapes)
    return all(plan.fits(environment) for plan in plans)


def find_changes(
    config: Config, stages: Sequence[Stage], environment: Environment, shapes: Shapes | None = None
) -> list[Change]:
    """Return the cheapest changes that make the stages fit; an empty list if no changes do, or if none are needed.

    A single change is preferred: the first of `list_changes` that suffices. If none suffices alone, changes are
    combined in that order, and those that turn out to be unnecessary are dropped again.
    """

    def fit(changes: Sequence[Change]) -> bool:
        settings = {key: value for change in changes for key, value in change.settings.items()}
        return stages_fit(apply_settings(config, settings), stages, environment, shapes)

    if fit([]):
        return []
    possible = [
        change
        for change in list_changes(config, stages, environment)
        if _is_possible(apply_settings(config, change.settings), stages, environment.ranks)
    ]
    for change in possible:
        if fit([change]):
            return [change]
    taken: list[Change] = []
    for change in possible:
        taken.append(change)
        if fit(taken):
            break
    else:
        return []
    for change in reversed(taken[:-1]):  # the most expensive first
        fewer = [other for other in taken if other is not change]
        if fit(fewer):
            taken = fewer
    return taken


def advise(
    config: Config,
    stage: Stage,
    phase: Phase,
    environment: Environment,
    best_precision: str,
    *,
    started: bool = False,
    continued: bool = False,
) -> tuple[list[str], list[str]]:
    """Return changes of settings for a stage that ran out of memory, the mildest first.

    Args:
        config: settings of the run.
        stage: the stage that ran out of memory.
        phase: its phase.
        environment: its `unified_memory` is also True if there is no host memory to offload to.
        best_precision: the precision that the device would take by default.
        started: the stage has a checkpoint, so it resumes with the settings that it was started with.
        continued: a stage of the run has results, a checkpoint or records.

    Returns:
        (settings for this run, settings for a new one).
    """
    by_scope: dict[str, list[str]] = {"any time": [], "stage": [], "run": []}
    for change in list_changes(config, [stage], environment, failed_in=phase, best_precision=best_precision):
        if _is_possible(apply_settings(config, change.settings), [stage], environment.ranks):
            by_scope[_scope(change)].append(str(change))
    now, later = by_scope["any time"], list[str]()
    (later if started else now).extend(by_scope["stage"])
    (later if continued else now).extend(by_scope["run"])
    return now, later


def list_changes(
    config: Config,
    stages: Sequence[Stage],
    environment: Environment,
    *,
    failed_in: Phase | None = None,
    best_precision: str = "",
) -> Iterator[Change]:
    """Yield changes that save memory, the cheapest first, if they differ from the settings.

    Before a run, each value of a setting is a change, so that the mildest that suffices can be chosen. After an error,
    it is not known how much memory is lacking: one value of each setting is yielded, only settings that help in that
    phase, and also some that change the experiment, which a plan does not propose.

    Args:
        failed_in: the phase that ran out of memory; None before a run.
        best_precision: the precision that the device would take by default.
    """
    ppo, ranks, stage = config.ppo, environment.ranks, config.engine.zero_stage
    trained_adapters, in_ppo = config.lora.rank > 0, "ppo" in stages
    can_offload = not environment.unified_memory

    def helps(*phases: Phase) -> bool:
        return failed_in is None or failed_in in phases

    def some(values: Iterator[Any]) -> list[Any]:
        return list(values if failed_in is None else itertools.islice(values, 1))

    for section in (section for section in ("ppo", "distill") if section in stages and helps("generation")):
        for rows in some(_divisors(getattr(config, section).generation_rows(ranks))):
            reason = f"rollouts in parts of {rows} rows; the same samples but for rounding"
            yield Change({f"{section}.generation_batch_size": rows}, reason)
    has_reference = "dpo" in stages and "reference" in model_placements(config, "dpo")
    if has_reference:
        yield Change({"dpo.reference": "precomputed"}, "one pass over the pairs before training; the same numbers")
    if helps(*_WITH_ROWS):
        for settings in some(_smaller_micro_batches(config, stages, environment)):
            yield Change(settings, "more passes for a step; the same numbers")
    if helps("training") and not config.model.gradient_checkpointing:
        yield Change({"model.gradient_checkpointing": True}, "about a third more time for updates; the same numbers")
    # After an error, the frozen weights under adapters are quantized instead.
    if ranks > 1 and stage != "auto" and (failed_in is None or (failed_in != "loading" and not trained_adapters)):
        cost = {1: "hardly slower", 2: "hardly slower", 3: "weights are sent around in every pass"}
        first = stage + 1 if failed_in is None else max(stage + 1, 3)
        for larger in (possible for possible in environment.zero_stages if possible >= first):
            yield Change({"engine.zero_stage": larger}, f"{cost[larger]}; the same numbers")
    sharded = ranks > 1 and in_ppo and model_placements(config, "ppo")["actor"].zero_stage == 3
    if failed_in == "generation" and sharded and ppo.generation_weights != "layerwise":
        yield Change({"ppo.generation_weights": "layerwise"}, "slow rollouts; the same samples")
    if in_ppo and ppo.ema and not ppo.ema_on_host and can_offload:
        yield Change({"ppo.ema_on_host": True}, "the average is computed on the host; the same numbers")
    if can_offload:
        yield from _offloads(config, stages, failed_in, environment)
    if failed_in == "generation" and (rows := _smaller_rollout(config, ranks)):
        yield Change({"ppo.batch_size": rows}, "smaller rollouts: other results")
    if failed_in and environment.precision == "fp32" != best_precision:
        yield Change({"precision": "auto"}, f"computes in {best_precision}: other results")
    rank = config.lora.rank or _LORA_RANK
    if not trained_adapters:
        yield Change({"lora.rank": rank}, "adapters are trained in place of all weights: other results")
    has_frozen = in_ppo or has_reference or "distill" in stages
    if config.engine.frozen == "auto" and (trained_adapters or (failed_in is None and has_frozen)):
        for bits in some(iter((8, 4))):
            yield Change({"engine.frozen": f"int{bits}"}, f"frozen weights are rounded to {bits} bits")
    if failed_in is None and config.engine.frozen == "auto" and not trained_adapters:
        yield Change({"lora.rank": rank, "engine.frozen": "int8"}, "adapters on weights that are rounded to 8 bits")
    lengths = {key: getattr(config.data, key) for key in ("max_prompt_length", "max_completion_length")}
    longest = max(lengths, key=lambda key: lengths[key])
    if failed_in in (*_WITH_ROWS, "generation") and lengths[longest] > 1:
        yield Change({f"data.{longest}": lengths[longest] // 2}, "shorter texts: other results")


def find_fewest_devices(config: Config, stages: Sequence[Stage], environment: Environment) -> int | None:
    """Return the smallest number of devices on which the stages fit; None if no number suffices."""
    common = math.gcd(*(_rows_of_a_rank(config, stage, 1) for stage in stages))
    for ranks in (ranks for ranks in range(1, min(common, _MAX_DEVICES) + 1) if common % ranks == 0):
        with contextlib.suppress(ConfigError):  # a micro-batch that does not divide a share
            if stages_fit(config, stages, _with_ranks(environment, ranks)):
                return ranks
    return None


def _with_ranks(environment: Environment, ranks: int) -> Environment:
    """Return the same machine with another number of ranks, which share its host's memory."""

    def share(limit: int) -> int:
        return limit * environment.ranks // ranks

    return replace(
        environment,
        ranks=ranks,
        host_limit=environment.host_limit and share(environment.host_limit),
        device_limit=share(environment.device_limit) if environment.unified_memory else environment.device_limit,
    )


def find_largest_micro_batch(config: Config, stage: Stage, environment: Environment) -> int | None:
    """Return the most rows in one forward pass of a rank with which the stage fits; None if not even one does."""
    rows = _rows_of_a_rank(config, stage, environment.ranks)
    for part in [rows, *_divisors(rows)]:
        changed = apply_settings(config, {f"{stage}.micro_batch_size": part})
        if _is_possible(changed, [stage], environment.ranks) and stages_fit(changed, [stage], environment):
            return part
    return None


def apply_settings(config: Config, settings: dict[str, Any]) -> Config:
    """Return the configuration with other values of the keys, for example of `ppo.batch_size`."""
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        if section:
            changed = getattr(config, section).model_copy(update={name: value})
            config = config.model_copy(update={section: changed})
        else:
            config = config.model_copy(update={name: value})
    return config


def _is_possible(config: Config, stages: Sequence[Stage], ranks: int) -> bool:
    """Return whether the models can be placed, and the batches divided, as the settings say."""
    try:
        check_placements(config, stages)
        for stage in stages:
            config.check_batches(stage, ranks)
    except ConfigError:
        return False
    return True


def _scope(change: Change) -> str:
    """Return when a change is still possible: at any time, before its stage starts, or before the run starts."""
    fixed = [key for key in change.settings if key.rpartition(".")[2] not in CHANGEABLE_ON_RESUME]
    if not fixed:
        return "any time"
    return "run" if any(key.partition(".")[0] in SHARED_SECTIONS for key in fixed) else "stage"


def _offloads(
    config: Config, stages: Sequence[Stage], failed_in: Phase | None, environment: Environment
) -> Iterator[Change]:
    zero_stage = {"engine.zero_stage": 1} if config.engine.zero_stage in (0, "auto") else {}
    optimizer = Change({"engine.offload": "optimizer"} | zero_stage, "the optimizer steps on the host: slower updates")
    if failed_in is None:
        if config.engine.offload in ("none", "auto"):
            yield optimizer
            if 3 in environment.zero_stages:
                everything = {"engine.offload": "all", "engine.zero_stage": 3}
                yield Change(everything, "weights come from the host in every pass: slow")
        return
    for value in ("all", "optimizer", "parameters"):
        changed = apply_settings(config, {"engine.offload": value})
        if _is_possible(changed, stages, environment.ranks):
            if _offloaded(changed, stages) != _offloaded(config, stages):
                yield Change({"engine.offload": value}, "the host holds more, and the device waits for it: slower")
                return
            break
    if failed_in != "loading" and zero_stage and not config.lora.rank:
        yield optimizer


def _offloaded(config: Config, stages: Sequence[Stage]) -> list[tuple[bool, bool]]:
    placements = (placement for stage in stages for placement in model_placements(config, stage).values())
    return [(placement.offloads_optimizer, placement.offloads_parameters) for placement in placements]


def _smaller_micro_batches(
    config: Config, stages: Sequence[Stage], environment: Environment
) -> Iterator[dict[str, int]]:
    """Yield settings of all stages together, each with at most half as many rows as the one before."""
    rows = {
        stage: getattr(config, stage).micro_batch_size or _rows_of_a_rank(config, stage, environment.ranks)
        for stage in stages
    }
    while any(count > 1 for count in rows.values()):
        rows = {stage: next(_divisors(count), 1) for stage, count in rows.items()}
        yield {f"{stage}.micro_batch_size": count for stage, count in rows.items()}


def _smaller_rollout(config: Config, ranks: int) -> int:
    """Return the largest rollout of at most half the rows that can be divided in the same way; 0 if there is none."""
    for rows in range(config.ppo.batch_size // 2, 0, -1):
        with contextlib.suppress(ConfigError):
            config.ppo.model_copy(update={"batch_size": rows}).minibatch(ranks)
            return rows
    return 0


def _rows_of_a_rank(config: Config, stage: Stage, ranks: int) -> int:
    """Return the rows of one optimizer step on a rank."""
    if stage == "ppo":
        return (config.ppo.minibatch_size or config.ppo.batch_size) // ranks
    return config.supervised(stage).batch_size // ranks


def _divisors(rows: int) -> Iterator[int]:
    """Yield numbers of rows into which `rows` divide, the largest first, each at most half the one before."""
    last = rows
    for part in range(rows // 2, 0, -1):
        if rows % part == 0 and part <= last // 2:
            last = part
            yield part
