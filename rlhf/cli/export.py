"""`rlhf export`: the records of a run for other programs, without a device."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from rlhf.cli.options import Options, shared
from rlhf.cli.tables import print_line
from rlhf.diagnosis.records import read_run
from rlhf.errors import translate_errors

_HINTS = {
    "inspect": "inspect view --log-dir {folder}",
    "tensorboard": "tensorboard --logdir {folder}",
    "trackio": "TRACKIO_DIR={folder} trackio show",
    "wandb": "cd {folder} && wandb sync --sync-all",
}
"""The commands that read what was written; that of Weights & Biases sends it to its server."""


@shared("debug")
def export(
    options: Options,
    run: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")],
    to: Annotated[str, typer.Option(help="inspect, csv, tensorboard, trackio or wandb.", metavar="FORMAT")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder to write. Default: export in the run's folder.", metavar="DIR"),
    ] = None,
) -> None:
    """Write the records of a run, finished or not, for another program; nothing leaves this machine.

    [bold]csv[/]: a table of numbers for each stage, and one of its held-out rows. [bold]inspect[/]: PPO's held-out
    completions with their scores, a log of Inspect AI for each evaluation. [bold]tensorboard[/]: the events that the
    run wrote, if they were deleted. [bold]trackio[/], [bold]wandb[/]: the numbers, if the package is installed.

    [bold]rlhf export runs/a --to csv[/]

    [bold]rlhf export runs/a --to inspect -o logs[/]
    """
    from rlhf.export.formats import export_run, parse_format

    name = parse_format(to)
    records = read_run(run)
    with translate_errors(output or run):
        paths = export_run(records, name, output)
    folder = paths[0] if paths[0].is_dir() else paths[0].parent
    for path in paths:
        print_line(f"wrote {path}")
    if name in _HINTS:
        print_line((f"open it: {_HINTS[name].format(folder=quote(str(folder)))}", "dim"))
