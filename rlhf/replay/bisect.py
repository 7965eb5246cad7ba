"""The first phase of the first step in which two runs differ: from their records, then by computing that step again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf.config.schema import EVERY_STAGE, Stage
from rlhf.errors import ConfigError, RLHFError, RunError
from rlhf.replay.recording import TensorDifference, compare_entries
from rlhf.replay.replay import NO_EFFECT, Replay, find_step, phase_of, replay
from rlhf.reporting.step_records import PHASES, StepRecord, list_steps, read_steps
from rlhf.runs.description import read_description
from rlhf.runs.directory import RunDirectory
from rlhf.runs.resume import list_differing_leaves


@dataclass(frozen=True)
class FirstDifference:
    """The first step in which two runs differ, as their records show it.

    Attributes:
        phase: the first phase that differs.
        text: both values.
    """

    stage: Stage
    step: int
    phase: str
    text: str


@dataclass(frozen=True)
class Computed:
    """The first difference of a step that both runs computed again.

    Attributes:
        step: from 1; that of the records' first difference, or an earlier one, whose update made it.
        phase: the first phase that differs; empty if none does.
        difference: its first tensor; None if no tensor differs.
        replays: the step of each run.
    """

    step: int
    phase: str
    difference: TensorDifference | None
    replays: tuple[Replay, Replay]


@dataclass(frozen=True)
class Bisection:
    """The result of a comparison of two runs.

    Attributes:
        stages: the stages that were compared.
        origins: what differs in their descriptions, one line each.
        not_compared: of which steps only one run has records, one line each.
        compared: the number of steps.
        found: the first difference of their records; None if there is none.
        computed: that of the step computed again; None if it was not.
        failure: why it could not be.
    """

    stages: Sequence[Stage]
    origins: list[str]
    not_compared: list[str]
    compared: int
    found: FirstDifference | None
    computed: Computed | None = None
    failure: str = ""


def bisect(
    first: Path,
    second: Path,
    stage: str | None = None,
    *,
    tolerance: float = 0.0,
    computes: bool = True,
    trust: bool = False,
) -> Bisection:
    """Find the first difference of two runs.

    Args:
        stage: compare only this one.
        tolerance: the relative difference up to which metrics and rewards count as equal.
        computes: compute the step that differs again.
        trust: run code that another user could have written.

    Raises:
        RunError, ConfigError: there is nothing to compare.
    """
    stages = list_common_stages(first, second, stage)
    found, compared = find_first_difference(first, second, stages, tolerance)
    not_compared = list_not_compared(first, second, stages, only=stage is not None)
    if not compared:
        raise RunError(f"no step of both runs can be read: {'; '.join(not_compared)}; name other runs")
    result = Bisection(stages, compare_origins(first, second, stages), not_compared, compared, found)
    if not found or not computes:
        return result
    try:
        return replace(result, computed=compute_difference(first, second, found, trust=trust))
    except RLHFError as error:
        return replace(result, failure=str(error))


def compare_origins(first: Path, second: Path, stages: Sequence[Stage]) -> list[str]:
    """Return what differs in the descriptions of two runs, one line each: settings, rows, models, versions.

    Args:
        stages: the stages that both have.

    Raises:
        RunError: one is no run.
    """
    one, other = (_describe(folder) for folder in (first, second))
    sections = {key for run in (one, other) for key in run.get("config", {}) if key not in EVERY_STAGE or key in stages}
    configs = [{key: run.get("config", {}).get(key) for key in sections} for run in (one, other)]
    leaves = list_differing_leaves(configs[0], configs[1], NO_EFFECT)
    lines = [f"setting {key}: {first!r} and {second!r}" for key, first, second in leaves]
    lines += list_other_rows(one.get("data", {}), other.get("data", {}))
    for stage in stages:
        models = [run.get("stages", {}).get(stage, {}).get("models", {}) for run in (one, other)]
        lines += list_other_models(stage, *models)
    versions = [run.get("versions", {}) for run in (one, other)]
    lines += [
        f"version of {name}: {versions[0].get(name)} and {versions[1].get(name)}"
        for name in sorted(versions[0].keys() | versions[1].keys())
        if versions[0].get(name) != versions[1].get(name)
    ]
    devices = [(run.get("accelerator") or {}).get("device") or {} for run in (one, other)]
    if devices[0].get("model") != devices[1].get("model"):
        lines.append(f"device: {devices[0].get('model')} and {devices[1].get('model')}")
    return lines


def list_other_rows(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return a line for each source whose rows differ between the descriptions of two runs."""
    lines = []
    for source in sorted(one.keys() | other.keys()):
        digests = [rows.get(source, {}).get("digest") for rows in (one, other)]
        if digests[0] != digests[1]:
            lines.append(f"rows of {source}: {' and '.join('none' if d is None else d[:12] for d in digests)}")
    return lines


def list_other_models(stage: Stage, one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return a line for each model of a stage whose content differs between the descriptions of two runs."""
    return [
        f"model {key} of {stage}: {one[key]['path']} and {other[key]['path']}"
        for key in sorted(one.keys() & other.keys())
        if one[key]["identity"] != other[key]["identity"]
    ]


def list_common_stages(first: Path, second: Path, stage: str | None) -> list[Stage]:
    """Return the stages of which both runs have steps, or the one that is named.

    Raises:
        RunError, ConfigError: there is none.
    """
    if stage is not None and stage not in EVERY_STAGE:
        raise ConfigError(f"--stage: no stage {stage!r}; use one of {', '.join(EVERY_STAGE)}")
    for folder in (first, second):
        _describe(folder)
    both = [RunDirectory(folder) for folder in (first, second)]
    stages = [
        name for name in EVERY_STAGE if stage in (None, name) and all(run.stage(name).steps.is_file() for run in both)
    ]
    if not stages:
        raise RunError(
            f"{first} and {second}: have no {stage or 'stage'} with a steps.bin in both; record_steps=true writes it"
        )
    return stages


def list_not_compared(first: Path, second: Path, stages: Sequence[Stage], *, only: bool) -> list[str]:
    """Return a line for each stage or part of a stage of which only one run has records.

    Args:
        stages: the stages that are compared.
        only: other stages were not asked for.
    """
    lines = []
    for stage in stages:
        files = [list_steps(RunDirectory(folder).stage(stage).steps) for folder in (first, second)]
        counts = [len(file.steps) for file in files]
        if counts[0] != counts[1] or not all(file.is_whole for file in files):
            parts = (
                f"{folder} has {count:,}{file.note}" for folder, count, file in zip((first, second), counts, files)
            )
            lines.append(f"{min(counts):,} steps of {stage} are compared: {', '.join(parts)}")
    for folder, other in () if only else ((first, second), (second, first)):
        lines += [
            f"{place.name} is not compared: only {folder} has its records"
            for place in RunDirectory(folder).stages
            if place.steps.is_file() and not RunDirectory(other).stage(place.name).steps.is_file()
        ]
    return lines


def find_first_difference(
    first: Path, second: Path, stages: Sequence[Stage], tolerance: float = 0.0
) -> tuple[FirstDifference | None, int]:
    """Return the first difference in the records of two runs, and the number of steps that were compared.

    Args:
        tolerance: the relative difference up to which metrics and rewards count as equal.
    """
    compared = 0
    for stage in stages:
        steps = [read_steps(RunDirectory(folder).stage(stage).steps) for folder in (first, second)]
        for one, other in zip(*steps):
            if one.step != other.step:
                raise RunError(f"{first} and {second}: {stage} has other steps, {one.step} and {other.step}")
            compared += 1
            for phase, text in sorted(_compare(one, other, tolerance), key=lambda pair: PHASES.index(pair[0])):
                return FirstDifference(stage, one.step, phase, text), compared
    return None, compared


def compute_difference(first: Path, second: Path, found: FirstDifference, *, trust: bool = False) -> Computed:
    """Compute the step of a difference in both runs, and return its first tensor that differs.

    Records have no weights, and a metric may be the same with other ones, so the difference may be that of an earlier
    step: halving finds the first step with one.

    Raises:
        RLHFError: one of them cannot be computed.
    """
    computed = _compute_step(first, second, found.stage, found.step, trust=trust)
    if not computed.difference or computed.phase == "rows":
        return computed
    equal, probe = 0, found.step - 1
    while computed.step - equal > 1:
        before = _compute_step(first, second, found.stage, probe, trust=trust)
        if before.difference:
            computed = before
        else:
            equal = probe
        probe = (equal + computed.step) // 2
    return computed


def _compute_step(first: Path, second: Path, stage: Stage, step: int, *, trust: bool) -> Computed:
    steps = [find_step(folder, step, stage) for folder in (first, second)]
    one, other = (replay(found, trust=trust) for found in steps)
    entries = [one.entries, other.entries]
    if steps[0].record.session["ranks"] != steps[1].record.session["ranks"]:  # each rank has other rows
        entries = [[entry for entry in part if entry.phase in ("gradients", "update")] for part in entries]
    differences = compare_entries(*entries)
    first_one = differences[0] if differences else None
    return Computed(step, first_one.entry.phase if first_one else "", first_one, (one, other))


def _describe(folder: Path) -> dict[str, Any]:
    run = RunDirectory(folder)
    if not run.description.is_file():
        raise RunError(f"{folder}: contains no run; name the folder that --output named")
    return read_description(run.description)


def _compare(one: StepRecord, other: StepRecord, tolerance: float) -> Iterator[tuple[str, str]]:
    """Yield (phase, line) of what differs between two records of a step."""
    if len(one.ranks) == len(other.ranks):
        for rank, (left, right) in enumerate(zip(one.ranks, other.ranks)):
            yield from _compare_ranks(rank, left, right, tolerance)
    else:  # each rank has other rows
        rows, tokens = ([join(record) for record in (one, other)] for join in (_join_rows, _join_ids))
        if sorted(rows[0]) != sorted(rows[1]):
            yield "rows", f"other rows: {_first_of(sorted(rows[0]), sorted(rows[1]))}"
        if tokens[0] != tokens[1]:
            yield "rollout", f"other tokens were drawn: {_first_of(*tokens)}"
    yield from _compare_metrics(one.metrics, other.metrics, tolerance)


def _compare_ranks(rank: int, left: Any, right: Any, tolerance: float) -> Iterator[tuple[str, str]]:
    where = f" on rank {rank}" if rank else ""
    digests = [[part.digests.get(name) for name in ("rows", "generator", "log_probs")] for part in (left, right)]
    if left.rows != right.rows:
        kind = "the same rows in another order" if sorted(left.rows) == sorted(right.rows) else "other rows"
        yield "rows", f"{kind}{where}: {_first_of(left.rows, right.rows)}"
    elif digests[0][0] != digests[1][0]:
        yield "rows", f"the same rows have other tokens{where}"
    if digests[0][1] != digests[1][1]:
        yield "rollout", f"the generator that draws was in another state{where}"
    arrays = [{name: array.tolist() for name, array in part.arrays.items()} for part in (left, right)]
    for name in ("lengths", "ids"):
        if arrays[0].get(name) != arrays[1].get(name):
            pair = arrays[0].get(name, []), arrays[1].get(name, [])
            yield "rollout", f"other {'tokens' if name == 'ids' else 'lengths'} were drawn{where}: {_first_of(*pair)}"
    if digests[0][2] != digests[1][2] and not tolerance:
        yield "rollout", f"tokens were drawn with other log-probabilities{where}"
    for name in sorted(arrays[0].keys() & arrays[1].keys() - {"lengths", "ids", "log_probs"}):
        pairs = list(zip(arrays[0][name], arrays[1][name]))
        for row, (now, then) in enumerate(pairs):
            if now != then and not abs(now - then) <= tolerance * max(abs(then), 1):
                yield "scores", f"{name.removeprefix('part/')} of row {row}{where}: {now:.9g} and {then:.9g}"
                break


def _compare_metrics(
    one: Mapping[str, float], other: Mapping[str, float], tolerance: float
) -> Iterator[tuple[str, str]]:
    for name in [*one, *(name for name in other if name not in one)]:
        if name not in one or name not in other:
            yield phase_of(name), f"{name}: only one of the two has it"
        elif one[name] != other[name] and not abs(one[name] - other[name]) <= tolerance * max(abs(one[name]), 1):
            yield phase_of(name), f"{name}: {one[name]:.17g} and {other[name]:.17g}"


def _join_rows(record: StepRecord) -> list[int]:
    return [row for rank in record.ranks for row in rank.rows]


def _join_ids(record: StepRecord) -> list[int]:
    return [number for rank in record.ranks for number in rank.arrays.get("ids", ())]


def _first_of(one: Sequence[int], other: Sequence[int]) -> str:
    """Return the first place at which two lists differ, with both values."""
    for place, (left, right) in enumerate(zip(one, other)):
        if left != right:
            return f"{left} and {right} at place {place}"
    return f"{len(one)} and {len(other)} of them"
