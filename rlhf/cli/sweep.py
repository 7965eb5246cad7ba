"""`rlhf sweep`: one recipe at every point of a grid of settings, with one table and plots of them all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf.cli.options import Options, shared
from rlhf.cli.tables import print_json, print_table
from rlhf.errors import ConfigError, RunError

if TYPE_CHECKING:
    from rlhf.contrib.sweep.grid import Grid, Point
    from rlhf.contrib.sweep.results import PointOutcome, PointResult, SweepDirectory


@shared("overrides", "accelerator", "precision", "output", "seed", "dry_run", "ranks", "debug")
def sweep(
    context: typer.Context,
    options: Options,
    grid: Annotated[Path, typer.Argument(help="YAML file of the sweep: a recipe and a grid.", metavar="GRID.yaml")],
    report: Annotated[
        bool, typer.Option("--report", metavar="", help="Renew the table and the plots, and run nothing.")
    ] = False,
    retry: Annotated[
        bool, typer.Option("--retry", metavar="", help="Try points again that were refused or have failed.")
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory of each device, e.g. 80GiB: points that would not fit are refused.", metavar="SIZE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")] = False,
) -> None:
    """Train a recipe at every point of a grid, one run a point, and compare them: one table, one plot.

    A grid file names a recipe (or has keys under [bold]base[/]), and axes:

    [bold]recipe: ../opt/1.3b.yaml[/]

    [bold]stages: \\[ppo][/]             [dim]# of every point[/]

    [bold]share: \\[sft, reward][/]      [dim]# trained once, for all of them[/]

    [bold]grid:[/]

    [bold]  engine.zero_stage: \\[2, 3][/]

    [bold]  offload: {resident: {}, offload: {engine.offload: all}}[/]

    [bold]names: {engine.zero_stage: zero}[/]

    Points are called zero2-resident, zero2-offload and so on. Each is a folder of the sweep's, a run like any other:
    [bold]rlhf chat runs/NAME/zero2-offload[/]. What it printed is in its console.log.

    The same command resumes a sweep. A point that cannot be trained is refused with its reason, one that
    runs out of memory is recorded with its peak, and neither stops the others. [bold]--dry-run[/] lists the points
    and which would be refused, and runs nothing.

    [bold]rlhf sweep example_scripts/sweeps/world.yaml[/]         [dim]# two minutes on a laptop[/]

    [bold]rlhf sweep grid.yaml --dry-run --memory 80GiB[/]        [dim]# which points would fit?[/]

    [bold]rlhf sweep grid.yaml --report --json[/]

    Exit code 0: every point is complete, refused, left out, or out of memory; 1: a point failed; 2: something has to
    be fixed first.
    """
    from rlhf.contrib.sweep.grid import load_grid
    from rlhf.contrib.sweep.results import SweepDirectory
    from rlhf.reporting.console import console
    from rlhf.utils.units import parse_bytes

    names = ("accelerator", "precision", "output", "seed")
    found = load_grid(
        grid, options.overrides or (), options={name: getattr(options, name) for name in names}, ranks=options.ranks
    )
    if memory:
        found = replace(found, memory=parse_bytes(memory, "--memory"))
    _check_alone()
    folder = SweepDirectory(found.output)
    if report and not folder.description.is_file():
        raise RunError(f"{folder.path}: holds no sweep to report; leave --report out to start it")
    if not report:
        folder.check(found)
    if options.dry_run:
        _foresee(found, folder, as_json)
        return
    if as_json or not _has_terminal():
        console.stderr = True  # how it goes is no part of the result
    collect_results = _renewed(found, folder) if report else _run(found, folder, retry=retry, debug=options.debug)
    _print(found, folder, collect_results, as_json)
    if any(row.status == "failed" for row in collect_results):
        raise typer.Exit(1)


def _check_alone() -> None:
    from rlhf.utils.process_info import current_process

    if launcher := current_process().launcher:
        raise ConfigError(f"rlhf sweep starts the processes of each point itself; start it without {launcher}")


def _foresee(grid: Grid, folder: SweepDirectory, as_json: bool) -> None:
    """Print what a sweep would do with each point."""
    from rlhf.contrib.sweep.results import collect_results
    from rlhf.contrib.sweep.runner import SweepRunner

    sweeping, points = SweepRunner(grid, folder), {point.name: point for point in grid.points}
    foreseen = []
    for row in collect_results(grid, folder, folder.read_outcomes(grid)):
        reason = sweeping.find_refusal(points[row.name]) if row.status == "waiting" else ""
        foreseen.append(replace(row, status="refused", reason=reason) if reason else row)
    if as_json:
        from rlhf.contrib.sweep.report import to_document

        print_json(to_document(grid, foreseen))
        return
    aside = _has_terminal()
    header = ("point", "status", "sets", *([] if aside else ["reason"]))
    table = [(row.name, row.status, _written(row.keys), row.reason)[: len(header)] for row in foreseen]
    print_table(f"{grid.file}: {len(points)} points in {folder.path}", header, table)
    if aside:
        _print_reasons(foreseen)


def _run(grid: Grid, folder: SweepDirectory, *, retry: bool, debug: bool) -> list[PointResult]:
    from rlhf.contrib.sweep.report import describe_result, write_index, write_report
    from rlhf.contrib.sweep.results import collect_results
    from rlhf.contrib.sweep.runner import SweepRunner
    from rlhf.utils import file_lock

    with file_lock.lock_folder(folder.path):
        outcomes = {} if retry else folder.read_outcomes(grid)
        write_index(grid, folder, collect_results(grid, folder, outcomes))

        def report_point(point: Point, outcome: PointOutcome | None) -> str:
            if outcome:
                outcomes[point.name] = outcome
            now = collect_results(grid, folder, outcomes)
            write_report(grid, folder, now)
            return next(describe_result(grid, row) for row in now if row.name == point.name)

        SweepRunner(grid, folder, debug).run(
            [point for point in grid.points if point.name not in outcomes], report_point
        )
        found = collect_results(grid, folder, outcomes)
        write_report(grid, folder, found)
    return found


def _renewed(grid: Grid, folder: SweepDirectory) -> list[PointResult]:
    """Return the rows as they are now; check and renew files, unless a running sweep does that itself."""
    from rlhf.contrib.sweep.report import write_report
    from rlhf.contrib.sweep.results import collect_results
    from rlhf.utils import file_lock

    found = collect_results(grid, folder, folder.read_outcomes(grid))
    with ExitStack() as held:
        try:
            held.enter_context(file_lock.lock_folder(folder.path))
        except RunError:
            return found
        folder.check(grid)
        write_report(grid, folder, found)
    return found


def _print(grid: Grid, folder: SweepDirectory, collect_results: list[PointResult], as_json: bool) -> None:
    from rlhf.contrib.sweep.report import format_table, to_document
    from rlhf.reporting.console import console

    if as_json:
        print_json(to_document(grid, collect_results))
        return
    header, lines = format_table(grid, collect_results, people=_has_terminal())
    print_table(f"{grid.file}: {', '.join(grid.stages)}", header, lines)
    if _has_terminal():
        _print_reasons(collect_results)
        there = [path for path in (folder.plot, folder.curves, folder.table) if path.is_file()]
        console.print(f"in {', '.join(map(str, there))}", markup=False, soft_wrap=True)


def _has_terminal() -> bool:
    from rich.console import Console

    return Console().is_terminal


def _print_reasons(collect_results: Sequence[PointResult]) -> None:
    """Below a table, in which they would be columns of single words."""
    from rlhf.reporting.console import console

    for row in collect_results:
        if row.reason:
            again = "; --retry tries it again" if row.status == "failed" else ""
            console.print(f"{row.name}: {row.status}: {row.reason}{again}", markup=False, soft_wrap=True)


def _written(keys: dict[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in keys.items())
