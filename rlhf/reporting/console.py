"""The terminal, and a copy of its output in a file: plain lines, whatever the terminal can show.

A run prints everything through `console`. While a block of `copy_console_to` runs, the output goes to a file too, and
so do the notes that this package logs; progress bars print lines to the copy (`rlhf.reporting.progress`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, NewLine
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.text import Text

_WIDTH = 120  # columns of tables in a copy
_OURS = ("rlhf", "accelerators")


class Terminal(Console):
    """A console that may have a copy."""

    copy: Console | None = None

    def print(self, *objects: Any, **options: Any) -> None:
        # Beside what is said, a live bar prints what moves the cursor, and leaves its line when it ends.
        if self.copy and not any(isinstance(each, (Control, NewLine)) for each in objects):
            text = all(isinstance(each, (str, Text)) for each in objects)
            self.copy.print(*objects, **options | ({"soft_wrap": True} if text else {}))
        super().print(*objects, **options)


console = Terminal(highlight=False)


@contextmanager
def copy_console_to(path: Path, title: str) -> Iterator[None]:
    """Add to the file at `path`, while the block runs, a line `title`, then what is printed; each line at once.

    Raises:
        OSError: the file cannot be written.
    """
    append_line(path, title)
    with path.open("a", encoding="utf-8") as file:
        notes = _Notes(file)
        before, console.copy = console.copy, _plain(file)
        for name in _OURS:
            logging.getLogger(name).addHandler(notes)
        try:
            yield
        finally:
            console.copy = before
            for name in _OURS:
                logging.getLogger(name).removeHandler(notes)


def append_line(path: Path, line: str) -> None:
    """Add a line to a text file, and an end to its last one where a crash has cut that short."""
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{'' if whole else chr(10)}{line}\n")


def _plain(file: TextIO) -> Console:
    return Console(file=file, width=_WIDTH, highlight=False, force_terminal=False, color_system=None)


class _Notes(logging.Handler):
    """Writes notes as the terminal shows them; a live bar prints those itself, through `console`."""

    def __init__(self, file: TextIO) -> None:
        super().__init__(logging.WARNING)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.stderr, FileProxy):
            print(f"rlhf: note: {record.getMessage()}", file=self._file, flush=True)
