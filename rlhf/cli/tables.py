"""Print the results of commands: tables for people; tab-separated lines or JSON for programs, on request."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from rlhf.reporting.console import Terminal, console

AsJSON = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")]
AsTSV = Annotated[bool, typer.Option("--tsv", metavar="", help="Print tables as tab-separated lines.")]

_WIDTH = 120  # columns of a table in a pipe or a file, unless COLUMNS is set


@contextmanager
def route_notes_to_stderr(as_data: bool) -> Iterator[None]:
    """Send notes to standard error if standard output is a pipe, or data (JSON, TSV)."""
    before = console.stderr
    console.stderr = before or as_data or not console.is_terminal
    try:
        yield
    finally:
        console.stderr = before


def print_line(*parts: str | tuple[str, str]) -> None:
    """Print parts, each a text or a (text, style), as one line, without wrapping and without reading markup."""
    console.print(Text.assemble(*parts), soft_wrap=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, tsv: bool = False) -> None:
    """Print a titled table, or the columns and rows with tabs between their cells."""
    if tsv:
        for row in (columns, *rows):
            print("\t".join(" ".join(cell.split()) for cell in row))
        return
    terminal = Terminal()
    if not terminal.is_terminal and "COLUMNS" not in os.environ:
        terminal = Terminal(width=_WIDTH)
    # Text: a reason in [brackets] is not markup.
    table = Table(title=Text(title, "table.title"), title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")  # points of a sweep differ at the ends of their names
    for row in rows:
        table.add_row(*map(Text, row))
    terminal.print(table)


def print_json(value: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(value, indent=2).replace("\x7f", "\\u007f"))  # the one control character that JSON leaves


def flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Return nested values under names with dots."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return flat
