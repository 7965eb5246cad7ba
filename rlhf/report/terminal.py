"""Print the verdict on a run in the terminal: each stage's state and sentence, and the findings that need a reader."""

from __future__ import annotations

from rich.text import Text

from rlhf.diagnosis.subject import State
from rlhf.diagnosis.verdict import SIGNS, ExaminedRun
from rlhf.reporting.console import console

_STYLES: dict[State, str] = {"fine": "green", "look here": "yellow", "wrong": "bold red", "cannot tell": "dim"}


def print_verdict(run: ExaminedRun, *, show_all: bool = False) -> None:
    """Print each stage's state and sentence, and its findings that are not fine; with `show_all`, all of them."""
    _print((run.records.name, "bold"), (f"  {run.records.state}", "dim"))
    for stage in run.stages:
        _print("  ", _sign(stage.state), "  ", (f"{stage.records.title}: ", "bold"), stage.sentence)
        for finding in stage.findings:
            if not show_all and finding.state == "fine":
                continue
            if show_all or finding.text != stage.sentence:
                place = "" if finding.step is None else f" (step {finding.step:,})"
                _print(" " * 6, _sign(finding.state), f"  {finding.text}{place}")
            if finding.remedy:
                _print(" " * 9, (finding.remedy, "dim"))


def print_states(run: ExaminedRun) -> None:
    """Print one line for each stage: its state and sentence."""
    for stage in run.stages:
        _print(_sign(stage.state), "  ", (f"{stage.records.title}: ", "bold"), stage.sentence)


def _sign(state: State) -> tuple[str, str]:
    return f"{SIGNS[state]} {state}", _STYLES[state]


def _print(*parts: str | tuple[str, str]) -> None:
    console.print(Text.assemble(*parts), soft_wrap=True)
