"""`rlhf report`, `rlhf doctor` and `rlhf runs`: what the folders of runs say, without a device and without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf.cli.options import Options, shared
from rlhf.cli.outcome import BAD_RESULT
from rlhf.cli.tables import AsJSON, AsTSV, print_json, print_line, print_table
from rlhf.errors import USER_ERRORS, RunError
from rlhf.utils.atomic_io import check_writable

NOT_READABLE = "not readable"
"""The state of a run whose records cannot be read."""

Runs = Annotated[
    list[Path],
    typer.Argument(help="Folders of runs, or of folders that contain runs, such as a sweep.", metavar="RUN..."),
]


@shared("debug")
def report(
    options: Options,
    runs: Runs,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The page's file. Default: report.html in the run's folder.", metavar="FILE"
        ),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", metavar="", help="Show the page on this machine, and update it while a run runs.")
    ] = False,
    port: Annotated[int, typer.Option(help="Port of --serve.", min=1, max=65535, metavar="N")] = 8652,
) -> None:
    """Write one HTML page that explains a run, or compares several: verdict, curves, samples, settings.

    The page needs no network and no server; send it to anyone. Every run writes its own when it ends.

    [bold]rlhf report runs/a[/]

    [bold]rlhf report runs/a runs/b -o comparison.html[/]

    [bold]rlhf report runs/a --serve[/]         [dim]# watch a run in progress[/]
    """
    from rlhf.diagnosis.verdict import examine_runs
    from rlhf.report.page import write_report
    from rlhf.report.server import serve_report
    from rlhf.report.terminal import print_verdict

    paths = _expand(runs)
    if serve:
        serve_report(paths, port, lambda address: print_line(f"{address} shows {_name(paths)}; Ctrl-C ends it"))
        return
    target = output or (paths[0] / "report.html" if len(paths) == 1 else None)
    if target is None:
        raise RunError(f"{len(paths)} runs: name the page's file with --output, such as -o comparison.html")
    if target.is_dir():
        raise RunError(f"{target}: is a folder; name the page's file with --output")
    check_writable(target.parent)
    reports, unread = examine_runs(paths)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_report(reports, target, notes=[(path.name, reason) for path, reason in unread])
    for item in reports:
        print_verdict(item)
    _print_unread(unread)
    print_line(f"wrote {target}")


@shared("debug")
def doctor(
    options: Options,
    runs: Runs,
    show_all: Annotated[bool, typer.Option("--all", metavar="", help="Show checks that are fine, too.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", metavar="", help=f"Exit with {BAD_RESULT} also if a check says: look here.")
    ] = False,
    as_json: AsJSON = False,
) -> None:
    """Check what runs have recorded: is the plumbing right, is the model learning, is it cheating?

    [bold]wrong[/]: an invariant does not hold, so the run's numbers mean nothing. [bold]look here[/]: a signal, and a
    person decides. [bold]cannot tell[/]: the run did not record what the check needs.

    [bold]rlhf doctor runs/a[/]

    Exit code 0: nothing is wrong; 3: a run is wrong; 2: an error that you can fix.
    """
    from rlhf.diagnosis.verdict import examine_runs, to_document, unread_error
    from rlhf.report.terminal import print_verdict

    paths = _expand(runs)
    reports, unread = examine_runs(paths)
    if as_json:
        documents = [to_document(item) for item in reports]
        documents += [{"run": str(path), "state": NOT_READABLE, "note": reason} for path, reason in unread]
        print_json(documents[0] if len(paths) == 1 else documents)
    else:
        for item in reports:
            print_verdict(item, show_all=show_all)
        _print_unread(unread)
        print_line(("docs/diagnosis.md explains each check", "dim"))
    bad = ("wrong", "look here") if strict else ("wrong",)
    if any(item.state in bad for item in reports):
        raise typer.Exit(BAD_RESULT)
    if unread:
        raise unread_error(unread)


@shared("debug")
def runs(
    options: Options,
    folder: Annotated[Path, typer.Argument(help="Folder with runs.", metavar="FOLDER")] = Path("runs"),
    as_json: AsJSON = False,
    as_tsv: AsTSV = False,
) -> None:
    """List the runs in a folder, newest first: state, last stage, verdict, and the reason for it.

    [bold]rlhf runs[/]
    """
    from rlhf.diagnosis.records import find_runs

    rows = sorted(map(_describe_run, find_runs(folder)), key=lambda row: row["age"])
    if as_json:
        print_json(rows)
        return
    columns = ("run", "state", "stage", "step", "verdict", "note")
    cells = [["" if row[name] is None else str(row[name]) for name in columns] for row in rows]
    print_table(f"{len(rows)} runs in {folder}", columns, cells, tsv=as_tsv)


def _describe_run(path: Path) -> dict[str, Any]:
    """Return a run's entry of the list; `age` is the time since its newest record in seconds."""
    from rlhf.diagnosis.findings import SEVERITY
    from rlhf.diagnosis.records import read_run
    from rlhf.diagnosis.verdict import examine_run

    nothing = {"run": str(path), "state": NOT_READABLE, "stage": None, "step": None, "verdict": None}
    try:
        item = examine_run(read_run(path))
    except USER_ERRORS as error:
        return {**nothing, "note": str(error).removeprefix(f"{path}: "), "age": float(2**53)}
    last, records = item.stages[-1], item.records
    worst = max(reversed(item.stages), key=lambda stage: SEVERITY[stage.state])  # of several, the last
    return {
        "run": str(path),
        "state": records.state,
        "stage": last.records.name,
        "step": last.records.step,
        "verdict": item.state,
        "note": worst.sentence,
        "age": round(last.records.age, 1),
    }


def _print_unread(unread: Sequence[tuple[Path, str]]) -> None:
    for path, reason in unread:
        print_line((path.name, "bold"), (f"  {NOT_READABLE}: ", "dim"), reason)


def _expand(paths: Sequence[Path]) -> list[Path]:
    """Return the runs that `paths` name: each a run, or a folder that contains runs."""
    from rlhf.diagnosis.records import find_runs

    return list(dict.fromkeys(run for path in paths for run in find_runs(path)))


def _name(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{len(paths)} runs"
