"""The checks of learning: a hundred steps of each stage against golden numbers, drawn completions, recorded steps."""

from __future__ import annotations

from typing import Any

from rlhf.certify.checks import Check, Facts, Subject
from rlhf.certify.fixed_state import PRECISIONS, STAGES, STEPS
from rlhf.certify.processes import CheckFailed
from rlhf.config.schema import Stage


def check_golden(subject: Subject, facts: Facts) -> None:
    """Compare each stage in each precision that the device grants and that has golden numbers."""
    folder, precisions = _prepare(subject, facts)
    facts["compared"], rows, failures = 0, list[Any](), list[str]()
    facts["worst of each phase"] = rows
    for stage, names in precisions.items():
        for precision in names:
            arguments = (subject.name, folder, stage, precision, STEPS)
            result = subject.processes.task("compare_with_golden", *arguments)
            rows += result["rows"]
            facts["compared"] += result["compared"]
            failures += filter(None, [result["failure"]])
    if failures:
        raise CheckFailed("; ".join(failures))


def check_drawn(subject: Subject, facts: Facts) -> None:
    """Let the device draw the completions of PPO's steps."""
    folder, precisions = _prepare(subject, facts)
    facts["precision"] = precision = _choose(subject, precisions["ppo"])
    _judge(facts, subject.processes.task("compare_draws", subject.name, folder, precision, STEPS))


def check_captured(subject: Subject, facts: Facts) -> None:
    """Compare recorded or compiled steps with plain ones."""
    folder, precisions = _prepare(subject, facts)
    facts["precision"] = precision = _choose(subject, precisions["ppo"])
    _judge(facts, subject.processes.task("compare_captured", subject.name, folder, precision))


def _prepare(subject: Subject, facts: Facts) -> tuple[str, dict[Stage, list[str]]]:
    """Write the fixed state, if no check has; return its folder, and each stage's precisions that can be compared."""
    folder = subject.folder("fixed-state")
    recorded = subject.processes.task("write_fixed_state", subject.name, str(folder))["stages"]
    granted = [name for name in PRECISIONS if subject.explanation["precisions"][name]["ok"]]
    precisions: dict[Stage, list[str]] = {
        stage: [name for name in granted if name in recorded.get(stage, [])] for stage in STAGES
    }
    lacking = [
        f"{', '.join(stages)} in {name}"
        for name in granted
        if (stages := [stage for stage, names in precisions.items() if name not in names])
    ]
    if lacking:
        facts["note"] = f"not compared, for lack of golden numbers: {'; '.join(lacking)}"
    if missing := [stage for stage, names in precisions.items() if not names]:
        grants = ", ".join(granted)
        raise CheckFailed(f"{', '.join(missing)}: no golden numbers of a precision that the device grants ({grants})")
    return str(folder), precisions


def _choose(subject: Subject, precisions: list[str]) -> str:
    """Return the precision of runs, or else the first one that can be compared."""
    automatic: str = subject.explanation["precisions"]["auto"]["name"]
    return automatic if automatic in precisions else precisions[0]


def _judge(facts: Facts, result: Facts) -> None:
    facts |= result
    if failure := facts.pop("failure", ""):
        raise CheckFailed(failure)
    if parts := facts.get("fallbacks"):
        raise CheckFailed(f"{', '.join(parts)} were not recorded or compiled; the log has the reason")
    if facts.get("graphs") == 0:  # None: the backend does not count
        raise CheckFailed("the backend offers recorded or compiled steps, but its count of graphs is 0 after a step")


GOLDEN = Check(
    "golden",
    f"{STEPS} steps of each stage give the golden numbers: each phase of the first step, and the curves of all",
    check_golden,
)
DRAWN = Check(
    "drawn",
    f"tokens of fixed logits, and completions of {STEPS} PPO steps, are drawn from their distribution",
    check_drawn,
)
CAPTURED = Check(
    "captured", "recorded or compiled steps, if there are any, give the numbers of plain ones", check_captured
)
