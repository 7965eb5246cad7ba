"""The terminal, and a copy of its output in a file, as plain lines; control characters in texts are made visible.

A run prints everything through `console`. While a block of `copy_console_to` runs, the output goes to a file too, and
so do the notes that this package logs; progress bars print lines to the copy (`rlhf.reporting.progress`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from rich.console import Console, ConsoleOptions, NewLine, RenderableType
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.segment import Segment
from rich.text import Text

from rlhf.reporting.verbosity import OWN_LOGGERS
from rlhf.utils.atomic_io import open_no_link
from rlhf.utils.printable import make_printable

if TYPE_CHECKING:
    from rich.progress import Progress

_WIDTH = 120  # columns of tables in a copy


class Terminal(Console):
    """A console that may have a copy, and a live display of progress bars; `quiet` silences it, but not the copy."""

    copy: Terminal | None = None
    display: Progress | None = None

    def print(self, *objects: Any, **options: Any) -> None:
        """Print to the terminal and to the copy, without the cursor moves and line ends of a live display."""
        if self.copy and not any(isinstance(part, (Control, NewLine)) for part in objects):
            only_text = all(isinstance(part, (str, Text)) for part in objects)
            self.copy.print(*objects, **options | ({"soft_wrap": True} if only_text else {}))
        super().print(*objects, **options)

    @contextmanager
    def loudly(self) -> Iterator[None]:
        """Print what is printed in this block even if `quiet` is set: warnings and verdicts."""
        quiet, self.quiet = self.quiet, False
        try:
            yield
        finally:
            self.quiet = quiet

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render in parts; control characters of text are made visible, those of rich stay."""
        for part in super().render(renderable, options):
            yield part if part.control is not None else Segment(make_printable(part.text), part.style)

    @property
    def file(self) -> IO[str]:
        """The stream that receives the output, below all that make foreign text printable."""
        stream = super().file
        while hasattr(stream, "rich_proxied_file"):
            stream = stream.rich_proxied_file
        return stream

    @file.setter
    def file(self, stream: IO[str]) -> None:
        self._file = stream


console = Terminal(highlight=False)


@contextmanager
def copy_console_to(path: Path, title: str) -> Iterator[None]:
    """Append a line `title` to the file at `path`, then all output of the block, each line at once.

    Raises:
        OSError: the file cannot be written.
    """
    append_line(path, title)
    with open_no_link(path, "a") as file:
        notes, outer = _Notes(file), console.copy
        loggers = [logging.getLogger(name) for name in OWN_LOGGERS]
        added: list[tuple[logging.Logger, logging.Handler]] = [(logger, notes) for logger in loggers]
        # If a program has not configured its logging, Python shows warnings, but no longer once there is a handler.
        if shown := logging.lastResort:
            added += [(logger, shown) for logger in loggers if not logger.hasHandlers()]
        console.copy = Terminal(file=file, width=_WIDTH, highlight=False, force_terminal=False, color_system=None)
        for logger, handler in added:
            logger.addHandler(handler)
        try:
            yield
        finally:
            console.copy = outer
            for logger, handler in added:
                logger.removeHandler(handler)


def append_line(path: Path, line: str) -> None:
    """Append a line to a text file, and end its last line first if a crash has cut it short."""
    complete = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with open_no_link(path, "a") as file:
        file.write(f"{'' if complete else chr(10)}{make_printable(line)}\n")


class _Notes(logging.Handler):
    """Write notes as the terminal shows them; a live display prints them itself, through `console`."""

    def __init__(self, file: TextIO) -> None:
        super().__init__(logging.WARNING)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.stderr, FileProxy):
            print(make_printable(f"rlhf: note: {record.getMessage()}"), file=self._file, flush=True)
