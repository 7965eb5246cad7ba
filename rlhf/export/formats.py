"""The formats of `rlhf export`, and how each is put in its place: no file or folder is ever half-written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, get_args

from rlhf.diagnosis.records import RunRecords
from rlhf.errors import ConfigError, RunError
from rlhf.export.inspect_logs import format_inspect_logs
from rlhf.export.replay import find_target, replay
from rlhf.export.tables import format_tables
from rlhf.utils.atomic_io import atomic_directory, atomic_write, check_writable, refuse_link

Format = Literal["inspect", "csv", "tensorboard", "trackio", "wandb"]
FORMATS: tuple[Format, ...] = get_args(Format)

_TEXTS: Mapping[Format, Callable[[RunRecords], dict[str, str]]] = {
    "csv": format_tables,
    "inspect": format_inspect_logs,
}
"""Formats that are texts by file name; the others are written by other programs."""


def parse_format(text: str) -> Format:
    """Return the format of `--to`.

    Raises:
        ConfigError: it is unknown, or needs a package that is not installed.
    """
    for name in FORMATS:
        if name == text:
            if name not in _TEXTS:
                find_target(name)
            return name
    raise ConfigError(f"--to {text}: no such format; use one of {', '.join(FORMATS)}")


def export_run(run: RunRecords, name: Format, output: Path | None = None) -> list[Path]:
    """Write a run's records in a format, and return the files, or the folder if another program writes it.

    Args:
        output: the folder to write to; None: `export` in the run's folder for csv, a folder in it for the others.
            Only a folder in `export` is replaced as a whole.

    Raises:
        ConfigError: the format needs a package that is not installed.
        RunError: the run has nothing for this format, or the folder cannot be written, has other contents, or is a
            link in the run's folder.
    """
    export = run.path / "export"
    folder = output or (export if name == "csv" else export / name)
    if output is None:
        refuse_link(export)
        refuse_link(folder)
    check_writable(folder)
    if name in _TEXTS:
        texts = _TEXTS[name](run)
        if output is None and name != "csv":
            with atomic_directory(folder) as temporary:
                _write_texts(texts, temporary)
        else:
            _write_texts(texts, folder)
        return [folder / file for file in texts]
    if output is not None and output.exists() and any(output.iterdir()):
        raise RunError(f"{output}: is not empty; name a new folder with --output")
    with atomic_directory(Path(os.path.abspath(folder))) as temporary:  # `.` has no name
        replay(run, name, temporary)
    return [folder]


def _write_texts(texts: Mapping[str, str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        atomic_write(folder / file, text)
