"""`rlhf show`: how a run went, or goes so far: its results, the curves of its main numbers, and its completions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from rlhf.cli.options import Options, shared
from rlhf.cli.tables import AsJSON, print_json, print_line
from rlhf.diagnosis.records import StageRecords, read_run
from rlhf.reporting.console import console
from rlhf.reporting.summary import format_value, print_summary
from rlhf.utils.units import format_seconds

CURVES = {
    "sft": ("loss", "heldout_perplexity", "grad_norm"),
    "reward": ("loss", "accuracy", "margin", "heldout_accuracy"),
    "dpo": ("loss", "accuracy", "margin", "heldout_accuracy"),
    "ppo": ("reward", "kl", "entropy", "response_length", "truncated_share", "explained_variance"),
    "distill": ("loss", "response_length", "truncated_share", "heldout_loss", "heldout_judge_reward"),
}
"""The metrics of each stage whose curves are shown, if they were recorded."""

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 40  # columns of a curve


@shared("debug")
def show(
    options: Options,
    run: Annotated[Path, typer.Argument(help="Folder of a run, finished or in progress.", metavar="RUN")],
    samples: Annotated[int, typer.Option(min=0, help="Prompts whose completions are shown.", metavar="N")] = 2,
    as_json: AsJSON = False,
) -> None:
    """Show how a run went, or goes so far.

    For each stage: its results before and after training, the curves of its main numbers, completions of the same
    prompts at the first, a middle and the last evaluation, and warnings. Nothing is written, and a run in progress is
    not disturbed.

    [bold]rlhf show runs/a[/]
    """
    stages = [_describe_stage(stage) for stage in read_run(run).stages]
    if as_json:
        print_json({"run": str(run), "stages": stages})
        return
    for stage in stages:
        _print_stage(stage, samples)
    # The texts above include the samples of a summary.
    print_summary([{**stage["summary"], "samples": []} for stage in stages if stage["summary"]], console)


def _describe_stage(stage: StageRecords) -> dict[str, Any]:
    """Return the state of a stage, with curves as (step, value), completions by tag as (step, text), and warnings."""
    texts: dict[str, list[tuple[int, str]]] = {}
    for text in stage.completions:
        texts.setdefault(text.tag, []).append((text.step, text.text))
    return {
        "stage": stage.name,
        "title": stage.title,
        "summary": stage.summary,
        "step": stage.step,
        "steps": stage.planned,
        "age": stage.age,
        "curves": {name: [*zip(*curve)] for name in CURVES[stage.name] if len((curve := stage.curve(name)).steps) > 1},
        "texts": texts,
        "warnings": [warning.text for warning in stage.warnings],
    }


def _print_stage(stage: dict[str, Any], samples: int) -> None:
    if stage["summary"]:
        state = f"complete, {stage['summary'].get('steps', stage['step']):,} steps"
    else:
        total = f" of {stage['steps']:,}" if stage["steps"] else ""
        state = f"not complete, step {stage['step']:,}{total}, last record {format_seconds(stage['age'])} ago"
    console.print()
    print_line((stage["title"], "bold"), (f"  {state}", "dim"))
    if stage["curves"]:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(justify="right")
        table.add_column(no_wrap=True, style="cyan")
        table.add_column(justify="right")
        for name, points in stage["curves"].items():
            first, last = (format_value(name, points[place][1]) for place in (0, -1))
            table.add_row(f"  {name.replace('_', ' ')}", first, draw_curve([value for _, value in points]), last)
        console.print(table)
    _print_texts(stage["texts"], samples)
    if not stage["summary"]:  # those of a complete stage are under the closing table
        grid = Table.grid(padding=(0, 2, 0, 0))
        for line in stage["warnings"]:
            grid.add_row(Text("  warning", style="bold yellow", no_wrap=True), Text(line))
        if stage["warnings"]:
            console.print("", grid, sep="\n")


def _print_texts(texts: dict[str, list[tuple[int, str]]], samples: int) -> None:
    """Print texts at the first, a middle and the last step: of held-out prompts if there are any."""
    heldout = {tag: entries for tag, entries in texts.items() if tag.startswith("heldout_")}
    for _, entries in list((heldout or texts).items())[:samples]:
        console.print()
        for step, text in [entries[place] for place in sorted({0, len(entries) // 2, len(entries) - 1})]:
            grid = Table.grid(padding=(0, 2, 0, 0))
            grid.add_column(no_wrap=True, style="dim", min_width=12)
            grid.add_column(overflow="fold")
            grid.add_row(f"  step {step:,}", Text(text.strip()))
            console.print(grid)


def draw_curve(values: Sequence[float]) -> str:
    """Return a curve in one line of at most 40 columns: the mean of each part of the values, by height."""
    width = min(_WIDTH, len(values))
    parts = [values[at * len(values) // width : (at + 1) * len(values) // width] for at in range(width)]
    means = [sum(part) / len(part) for part in parts]
    lowest, highest = min(means), max(means)
    scale = (len(_BARS) - 1) / (highest - lowest) if highest > lowest else 0
    return "".join(_BARS[round((mean - lowest) * scale)] for mean in means)
