"""The closing table of a run: each stage's results and costs, completions before and after, and warnings.

Its functions take the stages' summaries (the contents of `stage.json`) and print or return text for the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rlhf.utils.units import format_bytes, format_number, format_seconds

_GUIDE = "docs/reading-a-run.md lists healthy values, and what to change"
_NOTES = {"drift": "drift (below 0: away from the data's replies)"}
"""Labels of measures whose names do not show which values are good."""
_SHARES = ("accuracy", "share", "fraction")  # endings of names that are shown as percentages


def print_summary(summaries: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the closing table and, if a stage has `samples`, prompts with their completions.

    Warnings follow. Each summary is `{"stage", "title", "before": {measure: number}, "after": {measure: number},
    "seconds", "set_up_seconds", "peak_memory" (bytes), "steps", "phases": {name: seconds}, "tflops", "peak_share",
    "samples": [{"prompt", "before", "after"}], "warnings": [line]}`; a measure may be missing on one side.
    """
    console.print()
    console.print(summary_table(summaries))
    for summary in summaries:
        if summary.get("samples"):
            console.print(_samples(summary.get("title", summary["stage"]), summary["samples"]))
    warnings = Table.grid(padding=(0, 2, 0, 0))
    for summary in summaries:
        for line in summary.get("warnings", ()):
            warnings.add_row(Text(f"{summary['stage']} warning", style="bold yellow", no_wrap=True), Text(line))
    if warnings.row_count:
        console.print(warnings)
    if summaries:
        console.print(Text(_GUIDE, style="dim"))


def summary_table(summaries: Sequence[dict[str, Any]]) -> Table:
    """Return a table with a section for each stage, and a row for each measure of its `before` and `after`."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("", overflow="fold")
    for side in ("before", "after"):
        table.add_column(side, justify="right", no_wrap=True)
    for position, summary in enumerate(summaries):
        before, after = summary.get("before", {}), summary.get("after", {})
        table.add_row(Text(summary.get("title", summary["stage"]), style="bold"), "", "")
        for name in dict.fromkeys([*before, *after]):
            values = (format_value(name, before.get(name)), format_value(name, after.get(name)))
            table.add_row(
                Text("  " + _NOTES.get(name, name.replace("_", " "))), values[0], Text(values[1], style="bold green")
            )
        if best := summary.get("kept", {}).get("metric"):
            saved = f"  kept: the model of step {summary['kept']['step']:,}, best {best.replace('_', ' ')}"
            table.add_row(Text(saved, style="dim"), "", "")
        if (since := summary.get("over_optimized_since")) is not None:
            reason = f"  ended at step {summary['steps']:,}: over-optimized since step {since:,}"
            table.add_row(Text(reason, style="dim"), "", "")
        costs = _costs(summary)
        for line in costs:
            last = line is costs[-1] and position < len(summaries) - 1
            table.add_row(Text("  " + line, style="dim"), "", "", end_section=last)
    return table


def _costs(summary: dict[str, Any]) -> list[str]:
    """Return the set-up and the shares of the phases, if there are several; and the steps, time, memory and speed."""
    lines, phases = [], summary.get("phases", {})
    if "set_up_seconds" in summary:
        lines.append(f"{format_seconds(summary['set_up_seconds'])} of set-up")
    if len(phases) > 1:
        shares = {name: round(100 * seconds / sum(phases.values())) for name, seconds in phases.items()}
        lines.append(", ".join(f"{name} {share} %" for name, share in shares.items() if share))
    parts = []
    if "steps" in summary:
        parts.append(f"{summary['steps']:,} steps")
    if "seconds" in summary:
        parts.append(format_seconds(summary["seconds"]))
    if summary.get("peak_memory"):
        parts.append(f"{format_bytes(summary['peak_memory'])} peak memory")
    if speed := summary.get("tflops"):
        share = f" ({100 * summary['peak_share']:.0f} % of peak)" if "peak_share" in summary else ""
        parts.append(f"{float(f'{speed:.2g}'):,g} TFLOP/s{share}")
    return [*lines, *([" · ".join(parts)] if parts else [])]


def format_value(name: str, value: float | None) -> str:
    """Return a number as text for people, shares as percentages; empty for None."""
    if value is None:
        return ""
    return f"{100 * value:.1f}%" if name.endswith(_SHARES) else format_number(value)


def _samples(title: str, samples: Sequence[dict[str, str]]) -> RenderableType:
    parts: list[RenderableType] = [
        Text(),
        Rule(Text(f"the same prompts, before and after {title}", style="dim"), align="left"),
    ]
    for sample in samples:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True, style="dim")
        grid.add_column(overflow="fold")
        grid.add_row("prompt", Text(sample["prompt"].strip(), style="italic"))
        grid.add_row("before", Text(sample["before"].strip() or "(empty)"))
        grid.add_row("after", Text(sample["after"].strip() or "(empty)", style="green"))
        parts.append(Padding(grid, (0, 0, 1, 0)))
    return Group(*parts)
