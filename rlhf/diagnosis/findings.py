"""Findings about a stage: the outcomes of `rlhf.diagnosis.checks` on its records, its warnings, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlhf.diagnosis.checks import CHECKS
from rlhf.diagnosis.records import RunRecords, StageRecords, Text
from rlhf.diagnosis.subject import Check, Outcome, State, Subject
from rlhf.reporting.health import fill_keys
from rlhf.reporting.rules import RULES, Topic
from rlhf.reporting.summary import format_value

SEVERITY: dict[State, int] = {"fine": 0, "cannot tell": 1, "look here": 2, "wrong": 3}


class Finding(NamedTuple):
    """The outcome of one check of a stage.

    Attributes:
        text: one sentence with the numbers that decided.
        step: the step at which it shows, if there is one.
        remedy: what to do; empty if nothing.
    """

    name: str
    topic: Topic
    state: State
    text: str
    step: int | None = None
    remedy: str = ""


def examine_stage(run: RunRecords, stage: StageRecords) -> list[Finding]:
    """Return the findings of all checks that apply to a stage, in the order of `CHECKS`, then its other warnings."""
    subject, findings = Subject(stage, run), []
    checks = [check for check in CHECKS if stage.name in check.stages]
    warned = {warning.rule: warning for warning in stage.warnings}
    for check in checks:
        if check.name in warned:  # seen in training, perhaps at a step that is not recorded
            findings.append(_read_warning(warned[check.name], "wrong" if check.is_invariant else "look here"))
        elif outcome := _examine(check, subject):
            remedy = fill_keys(check.remedy, run.config, stage.name) if SEVERITY[outcome.state] > 1 else ""
            findings.append(Finding(check.name, check.topic, outcome.state, outcome.text, outcome.step, remedy))
    names = {check.name for check in checks}
    return findings + [_read_warning(text, "look here") for text in stage.warnings if text.rule not in names]


def _examine(check: Check, subject: Subject) -> Outcome | None:
    missing = [name for name in check.needs if not subject.stage.curve(name)]
    if missing:
        text = f"not recorded: {' and '.join(missing)}"
        return Outcome("cannot tell", text) if check.is_invariant else None
    try:
        return check.examine(subject)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # records of another version, or damaged
        return Outcome("cannot tell", f"{check.name}: the records cannot be read ({type(error).__name__}: {error})")


def worst(findings: Sequence[Finding]) -> State:
    """Return the most severe state; a check that cannot tell makes a stage no worse, unless no other can."""
    states = [finding.state for finding in findings if finding.state != "cannot tell"]
    return max(states, key=SEVERITY.__getitem__, default="cannot tell")


def _read_warning(warning: Text, state: State) -> Finding:
    """Return the finding of a warning of the health monitor; one of an earlier version is one text."""
    topics: dict[str, Topic] = {rule.name: rule.topic for rule in RULES}
    topic = topics.get(warning.rule, "updates")
    return Finding(warning.rule or "warning", topic, state, warning.state or warning.text, warning.step, warning.remedy)


def summarize_stage(run: RunRecords, stage: StageRecords, findings: Sequence[Finding]) -> str:
    """Return the verdict on a stage in one sentence: its most severe finding, or what it has learned."""
    state = worst(findings)
    if state in ("wrong", "look here"):
        return next(finding.text for finding in findings if finding.state == state)
    learned = [finding.text for finding in findings if finding.topic == "learning" and finding.state == "fine"]
    if learned:
        return learned[0]
    measures = [
        f"{name.removeprefix('heldout_').replace('_', ' ')} {format_value(name, curve.last)}"
        for name, curve in stage.curves.items()
        if name.startswith("heldout_")
    ]
    return ", ".join(measures[:3]) or f"{stage.step:,} steps are recorded"
