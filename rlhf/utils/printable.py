"""Text of data, models and user code, made safe for a terminal: control characters are shown, not executed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# All of C0, DEL and C1 except line ends and tabs.
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def make_printable(text: str) -> str:
    """Return `text` with its control characters except line ends and tabs as `\\x1b`."""
    return text.translate(_VISIBLE)


@contextmanager
def make_output_printable() -> Iterator[None]:
    """Pass all that this block prints through `make_printable`, whatever prints it.

    Consoles of rich write to the original streams, because their colours are control sequences;
    `rlhf.reporting.console.Terminal` makes their text printable before they add these.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _PrintableStream(streams[0]), _PrintableStream(streams[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


class _PrintableStream:
    """A stream that makes its text printable."""

    def __init__(self, stream: Any) -> None:
        self._stream = self.rich_proxied_file = stream  # rich's name for the stream that its consoles use instead

    def write(self, text: str) -> int:
        self._stream.write(make_printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
