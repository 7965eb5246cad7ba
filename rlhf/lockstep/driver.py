"""Compare two backends step by step from one state: first by phases, then, in a step that differs, by operators.

Before each step, B gets A's weights and optimizer, and draws A's completions. So a difference is one of this step, and
the first tensor beyond its band is where it began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rlhf.config.schema import Stage
from rlhf.lockstep.agreement import require_agreement, require_same_start
from rlhf.lockstep.bisection import EndDifference, compare_ends
from rlhf.lockstep.observations import Difference, compare, measure_ratios
from rlhf.lockstep.operators import Fault, Wanted
from rlhf.lockstep.reference import LiveReference, Recording, ReferenceStep
from rlhf.lockstep.rounding import describe_bands

WORST = 10
"""Tensors and operators that a report lists after the first."""

Say = Callable[[str], None]


@dataclass
class Finding:
    """The first step that differs.

    Attributes:
        step: from 1.
        differences: the tensors beyond their bands, in the order of computation.
        faults: the operators at fault, in the order in which they ran.
    """

    stage: str
    step: int
    differences: list[Difference]
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Outcome:
    """The result of a comparison.

    Attributes:
        ratios: by stage and phase, the largest difference in bands.
        steps: by stage, the steps that were compared.
        judged, not_judged: how many operators were judged, and which could not be, with the reason.
        end: the difference of held-out metrics after free runs.
    """

    a: dict[str, Any]
    b: dict[str, Any]
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    judged: int = 0
    not_judged: dict[str, str] = field(default_factory=dict)
    finding: Finding | None = None
    notes: list[str] = field(default_factory=list)
    end: EndDifference | None = None

    @property
    def is_equal(self) -> bool:
        """True if nothing differs."""
        return self.finding is None and self.end is None

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as values for JSON."""
        finding = None
        if self.finding:
            differences = [item._asdict() | {"ratio": item.ratio} for item in self.finding.differences]
            faults = [fault.to_json() for fault in self.finding.faults]
            finding = asdict(self.finding) | {"differences": differences, "faults": faults}
        return {
            "equal": self.is_equal,
            "a": self.a,
            "b": self.b,
            "bands": describe_bands(),
            "steps": self.steps,
            "ratios": self.ratios,
            "judged": self.judged,
            "not_judged": self.not_judged,
            "finding": finding,
            "end": self.end._asdict() if self.end else None,
            "notes": self.notes,
        }


def run_lockstep(
    reference: LiveReference | Recording,
    other: Any,
    stages: Sequence[Stage],
    steps: int,
    *,
    judge_always: bool = False,
    bisect: bool = False,
    say: Say = lambda line: None,
) -> Outcome:
    """Compare the first `steps` steps of each stage, and stop at the first step that differs.

    Args:
        reference: backend A, live or recorded.
        other: backend B: `call(method, ...)` as `rlhf.lockstep.peers.LiveSide`.
        stages: in their order; each starts from A's models.
        steps: of each stage; fewer if the stage has fewer.
        judge_always: judge the operators of each step, not only of one that differs.
        bisect: compare the held-out metrics of free runs of the steps, too; A must be live.
        say: receives lines of progress.
    """
    require_agreement(reference.facts, other.facts, recorded=isinstance(reference, Recording))
    outcome = Outcome(reference.facts, other.facts)
    for number, stage in enumerate(stages):
        say(f"{stage}: loading models and data")
        facts, others = reference.open(stage), other.call("open", stage)
        require_same_start(stage, facts, others)
        if random := others["stochastic"]:
            outcome.notes.append(f"{stage}: {', '.join(random)} uses dropout, whose numbers each device draws itself")
        outcome.ratios[stage] = {}
        for step in range(min(steps, facts["steps"])):
            say(f"{stage}: step {step + 1} of {min(steps, facts['steps'])}")
            outcome.finding = compare_step(reference, other, stage, step, outcome, judge_always=judge_always, say=say)
            outcome.steps[stage] = step + 1
            if outcome.finding:
                return outcome
        if bisect and isinstance(reference, LiveReference):
            outcome.end = compare_ends(reference, other, stage, outcome.steps[stage], say)
            if outcome.end and outcome.end.step:
                step = outcome.end.step - 1
                record = reference.record(stage, step)
                outcome.finding = Finding(stage, outcome.end.step, [])
                judge_operators(reference, other, step, record, outcome.finding, outcome)
            if outcome.end:
                return outcome
        last = number + 1 == len(stages)
        folder = reference.close(stage, keep=not last)
        other.call("close", keep=False)
        if folder:
            other.call("adopt", stage, folder)
    return outcome


def record_steps(reference: LiveReference, stages: Sequence[Stage], steps: int, *, say: Say) -> None:
    """Take the first `steps` steps of each stage on A alone, for a golden file."""
    for number, stage in enumerate(stages):
        facts = reference.open(stage)
        for step in range(min(steps, facts["steps"])):
            say(f"{stage}: step {step + 1} of {min(steps, facts['steps'])}")
            reference.step(stage, step)
        reference.close(stage, keep=number + 1 < len(stages))


def compare_step(
    reference: LiveReference | Recording,
    other: Any,
    stage: Stage,
    step: int,
    outcome: Outcome,
    *,
    judge_always: bool,
    say: Say,
) -> Finding | None:
    """Compare one step; return what differs, or None."""
    record = reference.step(stage, step)
    observed = other.call("take", step, record.state, completions=record.completions)
    differences = compare(record.observed, observed, record.bands)
    for phase, ratio in measure_ratios(record.observed, observed, record.bands).items():
        known = outcome.ratios[stage]
        known[phase] = max(known.get(phase, 0.0), ratio)
    if not differences and not judge_always:
        return None
    finding = Finding(stage, step + 1, differences)
    if differences:
        first = differences[0]
        say(f"{stage}: step {step + 1}: {first.phase} differs ({first.role} {first.name}); judging every operator")
    judge_operators(reference, other, step, record, finding, outcome)
    return finding if differences or finding.faults else None


def judge_operators(
    reference: LiveReference | Recording,
    other: Any,
    step: int,
    record: ReferenceStep,
    finding: Finding,
    outcome: Outcome,
) -> None:
    """Judge the operators of a step, and add those at fault to the finding, with A's values of the first of them."""
    until = finding.differences[0].phase if finding.differences else None
    options = {"completions": record.completions, "until": until}
    faults, judged, not_judged, finding.notes = other.call("judge", step, record.state, **options)
    finding.faults = faults
    outcome.judged += judged
    outcome.not_judged |= not_judged
    wanted = {
        Wanted(fault.module, fault.operator, fault.backward, fault.occurrence, tuple(fault.element)): fault
        for fault in faults[: WORST + 1]
        if fault.kind != "kernel"
    }
    if wanted:
        for place, value in reference.read(step, record, list(wanted)).items():
            wanted[place].other = value
