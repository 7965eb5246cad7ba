"""The lines of a comparison for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlhf.lockstep.driver import WORST, Finding, Outcome
from rlhf.lockstep.observations import Difference
from rlhf.lockstep.operators import KINDS, Fault
from rlhf.lockstep.rounding import ACCUMULATED, ROUNDINGS, SPREAD


def format_outcome(outcome: Outcome) -> Iterator[str]:
    """Yield the lines: both sides, the bands, the phases of each stage, and what differs first."""
    yield f"A: {_describe(outcome.a)}"
    yield f"B: {_describe(outcome.b)}"
    roundings = ", ".join(f"{name} {count:g}" for name, count in ROUNDINGS.items())
    yield (
        f"band of a tensor: {SPREAD:g} x its RMS deviation if each operator of A errs by one rounding; of an operator: "
        f"its result's roundings ({roundings}), and {ACCUMULATED:g} sqrt(n) of each input over n additions"
    )
    for stage, ratios in outcome.ratios.items():
        largest = ", ".join(f"{phase} {_number(ratio)}" for phase, ratio in ratios.items())
        yield f"{stage}: {outcome.steps.get(stage, 0)} steps; largest difference in bands: {largest}"
    yield from (f"note: {note}" for note in outcome.notes)
    if outcome.judged:
        yield f"{outcome.judged:,} operators of B were judged"
    yield from (f"not judged: {operator} ({reason})" for operator, reason in outcome.not_judged.items())
    if outcome.end:
        end = outcome.end
        origin = f"step {end.step} makes the difference" if end.step else "one state is evaluated differently"
        yield (
            f"{end.stage}: after free runs {end.metric} is {_number(end.value_a)} on A, {_number(end.value_b)} on B, "
            f"band {_number(end.band)}; {origin} ({end.runs} runs of B)"
        )
    if outcome.finding:
        yield from _format_finding(outcome.finding)
    elif outcome.is_equal:
        yield "equal within the bands"


def _format_finding(finding: Finding) -> Iterator[str]:
    if finding.faults:
        first, *later = finding.faults
        yield f"first operator at fault: {_format_fault(first, finding)}"
        yield f"  at {first.line or 'no line of Python'}, inputs {first.shapes}"
        other = "not known" if first.other is None else _number(first.other)
        yield f"  element {list(first.element)}: A {other}, B {_number(first.value)}, truth {_number(first.truth)}"
        yield from (f"  note: {note}" for note in finding.notes)
        if later:
            yield f"the worst of {len(later)} later ones:"
        for fault in sorted(later, key=lambda fault: -fault.ratio)[:WORST]:
            yield f"  {_format_fault(fault, finding)}, at {fault.line}"
    if finding.differences:
        first_difference, *rest = finding.differences
        yield f"first tensor beyond its band: {_format_difference(first_difference, finding)}"
        if rest:
            yield f"the worst of {len(rest)} later ones:"
        for difference in sorted(rest, key=lambda item: -item.ratio)[:WORST]:
            yield f"  {_format_difference(difference, finding)}"
    if not finding.faults:
        yield (
            "none of the operators is at fault when they run one by one: look at what this run lacks, which is graphs "
            "that are compiled or recorded, and copies between host and device"
        )


def _format_fault(fault: Fault, finding: Finding) -> str:
    module = f" in {fault.module}" if fault.module else ""
    direction = ", backward" if fault.backward else ""
    place = f"{finding.stage}, step {finding.step}, {fault.phase}{direction}, {fault.role or 'no model'}"
    return f"{fault.operator}{module} ({place}): {KINDS[fault.kind]}, by {_number(fault.ratio)} bands"


def _format_difference(item: Difference, finding: Finding) -> str:
    place = f"{finding.stage}, step {finding.step}, {item.phase}, {item.role or 'no model'}: {item.name}"
    values = f"A {_number(item.value_a)}, B {_number(item.value_b)} at {list(item.element)}"
    return f"{place}; {values}; RMS difference {_number(item.measure)}, band {_number(item.band)}"


def _describe(facts: dict[str, str]) -> str:
    mode = ", lazy" if facts.get("lazy") else ""
    return f"{facts['accelerator']} ({facts['device']}, {facts['software']}), {facts['precision']}{mode}"


def _number(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else str(value)
