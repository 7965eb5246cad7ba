"""`rlhf checkpoints`: what a run can resume from, whether it is intact, and how to remove it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf.cli.options import report_interruption
from rlhf.cli.outcome import BAD_RESULT
from rlhf.cli.tables import AsJSON, AsTSV, print_json, print_line, print_table
from rlhf.runs.checkpoints import SavedFolder, list_saved, remove_checkpoints
from rlhf.runs.directory import RunDirectory
from rlhf.utils.units import format_bytes

app = typer.Typer(
    no_args_is_help=True,
    help="List, verify and remove the checkpoints of a run, from which [bold]--resume[/] continues. A complete stage "
    "has none: its result is its model.",
)

Run = Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")]


@app.command("list")
@report_interruption()
def list_checkpoints(run: Run, as_json: AsJSON = False, as_tsv: AsTSV = False) -> None:
    """List the checkpoints of a run: step, size, time, and whether all files are there.

    [bold]rlhf checkpoints list runs/a[/]

    [bold]rlhf ppo --output runs/a --resume=step-00000040[/]     [dim]# resume from one of them[/]
    """
    saved = list_saved(RunDirectory(run))
    if as_json:
        print_json([_describe(item) for item in saved])
        return
    if not (saved or as_tsv):
        print_line(f"{run}: no checkpoints; a complete stage has none, others have by STAGE.checkpoint_every")
        return
    print_table(f"Checkpoints of {run}", _COLUMNS, [_row(item) for item in saved], tsv=as_tsv)


@app.command()
@report_interruption()
def verify(run: Run, as_json: AsJSON = False, as_tsv: AsTSV = False) -> None:
    """Read all checkpoints, saved models and records of a run, and compare every file with its SHA-256.

    [bold]rlhf checkpoints verify runs/a[/]

    Exit code 0: nothing is damaged; 3: something is; 2: an error that you can fix.
    """
    saved = list_saved(RunDirectory(run), verify=True)
    if as_json:
        print_json([_describe(item) for item in saved])
    else:
        print_table(f"Checkpoints, models and records of {run}", _COLUMNS, [_row(item) for item in saved], tsv=as_tsv)
    if any(item.damage for item in saved):
        raise typer.Exit(BAD_RESULT)


@app.command()
@report_interruption()
def remove(
    run: Run,
    names: Annotated[list[str], typer.Argument(help="Names of checkpoints.", metavar="step-N...")],
    stage: Annotated[
        str | None,
        typer.Option(
            help="Their stage, if several have one of that name: sft, reward, dpo, ppo or distill.", metavar="NAME"
        ),
    ] = None,
    last: Annotated[
        bool, typer.Option("--last", metavar="", help="Also the last undamaged one; its stage would start again.")
    ] = False,
) -> None:
    """Remove checkpoints of a run.

    The last undamaged one of a stage stays, unless [bold]--last[/] is given.

    [bold]rlhf checkpoints remove runs/a step-00000040[/]
    """
    for path in remove_checkpoints(RunDirectory(run), names, stage=stage, last=last):
        print_line(f"removed {path}")


_COLUMNS = ("stage", "name", "size", "written", "state")


def _row(item: SavedFolder) -> list[str]:
    written = f"{datetime.fromtimestamp(item.written):%Y-%m-%d %H:%M}"
    return [item.stage, item.name, format_bytes(item.bytes), written, item.damage or "intact"]


def _describe(item: SavedFolder) -> dict[str, Any]:
    return {
        "stage": item.stage,
        "name": item.name,
        "path": str(item.path),
        "bytes": item.bytes,
        "written": round(item.written),
        "damage": item.damage or None,
    }
