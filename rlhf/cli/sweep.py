"""`rlhf sweep`: one recipe at every point of a grid of settings, with one table and one page about all points."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf.cli.options import Options, shared
from rlhf.cli.outcome import BAD_RESULT
from rlhf.cli.tables import AsJSON, AsTSV, print_json, print_line, print_table
from rlhf.errors import ConfigError, RunError
from rlhf.reporting.console import Terminal, console
from rlhf.utils.file_lock import lock_folder
from rlhf.utils.process_info import current_process
from rlhf.utils.units import parse_bytes

if TYPE_CHECKING:
    from rlhf.contrib.sweep.directory import PointOutcome, SweepDirectory
    from rlhf.contrib.sweep.grid import Grid, Point
    from rlhf.contrib.sweep.results import PointResult


@shared("overrides", "accelerator", "precision", "output", "seed", "dry_run", "ranks", "trust", "debug")
def sweep(
    options: Options,
    grid: Annotated[Path, typer.Argument(help="YAML file of the sweep: a recipe and a grid.", metavar="GRID.yaml")],
    report: Annotated[
        bool, typer.Option("--report", metavar="", help="Update the table and the page; train nothing.")
    ] = False,
    retry: Annotated[
        bool, typer.Option("--retry", metavar="", help="Retry points that were refused or have failed.")
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory of each device, e.g. 80GiB: points that would not fit are refused.", metavar="SIZE"),
    ] = None,
    as_json: AsJSON = False,
    as_tsv: AsTSV = False,
) -> None:
    """Train a recipe at every point of a grid, one run per point, and compare the points in a table and a page.

    A grid file names a recipe (or has keys under [bold]base[/]) and axes:

    [bold]recipe: ../opt/1.3b.yaml[/]

    [bold]stages: \\[ppo][/]             [dim]# trained at every point[/]

    [bold]share: \\[sft, reward][/]      [dim]# trained once, for all points[/]

    [bold]grid:[/]

    [bold]  engine.zero_stage: \\[2, 3][/]

    [bold]  offload: {resident: {}, offload: {engine.offload: all}}[/]

    [bold]names: {engine.zero_stage: zero}[/]

    The points are called zero2-resident, zero2-offload and so on. Each is a folder in the sweep's folder, and a run
    like any other: [bold]rlhf chat runs/NAME/zero2-offload[/]. Its console.log has everything that it printed.

    The same command resumes a sweep. A point that cannot be trained is refused with a reason, a point that runs out
    of memory is recorded with its peak, and neither stops the others. [bold]--dry-run[/] lists the points and those
    that would be refused, and trains nothing.

    [bold]rlhf sweep example_scripts/sweeps/world.yaml[/]         [dim]# two minutes on a laptop[/]

    [bold]rlhf sweep grid.yaml --dry-run --memory 80GiB[/]        [dim]# which points would fit?[/]

    [bold]rlhf sweep grid.yaml --report --json[/]

    Exit code 0: every point is complete, refused, excluded, or out of memory; 3: a point failed; 2: an error that you
    can fix.
    """
    from rlhf.contrib.sweep.directory import SweepDirectory
    from rlhf.contrib.sweep.grid import load_grid
    from rlhf.contrib.sweep.results import to_document

    if launcher := current_process().launcher:
        raise ConfigError(f"rlhf sweep starts the processes of each point itself; start it without {launcher}")
    keys = {name: getattr(options, name) for name in ("accelerator", "precision", "output", "seed")}
    loaded = load_grid(grid, options.overrides or (), options=keys, ranks=options.ranks)
    if memory:
        loaded = replace(loaded, memory=parse_bytes(memory, "--memory"))
    folder = SweepDirectory(loaded.output)
    if report and not folder.description.is_file():
        raise RunError(f"{folder.path}: contains no sweep to report; omit --report to start it")
    if not report:
        loaded.admit_code(trust=options.trust, dry_run=options.dry_run)
        folder.check(loaded)
    if options.dry_run:
        _predict(loaded, folder, as_json, as_tsv)
        return
    if as_json or as_tsv or not _has_terminal():
        console.stderr = True  # progress is not part of the result
    results = _update(loaded, folder) if report else _run(loaded, folder, retry=retry, debug=options.debug)
    if as_json:
        print_json(to_document(loaded, results))
    else:
        _print_results(loaded, folder, results, tsv=as_tsv)
    if any(result.status == "failed" for result in results):
        raise typer.Exit(BAD_RESULT)


def _predict(grid: Grid, folder: SweepDirectory, as_json: bool, as_tsv: bool) -> None:
    """Print what a sweep would do with each point."""
    from rlhf.contrib.sweep.results import collect_results, to_document
    from rlhf.contrib.sweep.runner import SweepRunner

    runner, points = SweepRunner(grid, folder), {point.name: point for point in grid.points}
    results = []
    for result in collect_results(grid, folder, folder.read_outcomes(grid)):
        reason = runner.find_refusal(points[result.name]) if result.status == "waiting" else ""
        results.append(replace(result, status="refused", reason=reason) if reason else result)
    if as_json:
        print_json(to_document(grid, results))
        return
    header = ["point", "status", "sets", *(["reason"] if as_tsv else [])]
    rows = []
    for result in results:
        sets = " ".join(f"{key}={value}" for key, value in result.keys.items())
        rows.append([result.name, result.status, sets, result.reason][: len(header)])
    print_table(f"{grid.file}: {len(points)} points in {folder.path}", header, rows, tsv=as_tsv)
    if not as_tsv:
        _print_reasons(results)


def _run(grid: Grid, folder: SweepDirectory, *, retry: bool, debug: bool) -> list[PointResult]:
    from rlhf.contrib.sweep.results import collect_results, describe_result, write_index, write_report, write_table
    from rlhf.contrib.sweep.runner import SweepRunner

    with lock_folder(folder.path):
        outcomes = {} if retry else folder.read_outcomes(grid)
        write_index(grid, folder, collect_results(grid, folder, outcomes))

        def report_point(point: Point, outcome: PointOutcome | None) -> str:
            if outcome:
                outcomes[point.name] = outcome
            results = collect_results(grid, folder, outcomes)
            write_table(grid, folder, results)
            return next(describe_result(grid, result) for result in results if result.name == point.name)

        SweepRunner(grid, folder, debug).run(
            [point for point in grid.points if point.name not in outcomes], report_point
        )
        results = collect_results(grid, folder, outcomes)
        write_report(grid, folder, results)
    return results


def _update(grid: Grid, folder: SweepDirectory) -> list[PointResult]:
    """Return the present results; check and update the files, unless a running sweep does that itself."""
    from rlhf.contrib.sweep.results import collect_results, write_report

    results = collect_results(grid, folder, folder.read_outcomes(grid))
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_folder(folder.path))
        except RunError:
            return results
        folder.check(grid)
        write_report(grid, folder, results)
    return results


def _print_results(grid: Grid, folder: SweepDirectory, results: list[PointResult], *, tsv: bool) -> None:
    from rlhf.contrib.sweep.results import describe_best, format_table

    files = [path for path in (folder.report, folder.table) if path.is_file()]
    header, rows = format_table(grid, results, people=not tsv)
    print_table(f"{grid.file}: {', '.join(grid.stages)}", header, rows, tsv=tsv)
    if not tsv:
        _print_reasons(results)
    for line in (describe_best(grid, results), f"see {', '.join(map(str, files))}"):
        if line:
            console.print(line, markup=False, highlight=False, soft_wrap=True)  # in a pipe, to standard error


def _has_terminal() -> bool:
    return Terminal().is_terminal  # not `console`, which may print to standard error


def _print_reasons(results: list[PointResult]) -> None:
    """Print reasons below the table, since a column for them would be one word wide."""
    for result in results:
        if result.reason:
            remedy = "; --retry tries it again" if result.status == "failed" else ""
            print_line(f"{result.name}: {result.status}: {result.reason}{remedy}")
