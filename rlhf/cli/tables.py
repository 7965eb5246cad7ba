"""Print the results of commands: tables on a terminal, tab-separated lines in a pipe, JSON on request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer


@contextmanager
def route_notes_to_stderr(as_json: bool) -> Iterator[bool]:
    """Yield whether a program reads standard output, through a pipe or as JSON; if so, send notes to standard error."""
    from rlhf.reporting.console import console

    piped, before = as_json or not console.is_terminal, console.stderr
    console.stderr = before or piped
    try:
        yield piped
    finally:
        console.stderr = before


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a titled table; in a pipe, the columns and rows with tabs between their cells."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        for row in (columns, *rows):
            typer.echo("\t".join(row))
        return
    # Text: a reason in [brackets] is no markup.
    table = Table(title=Text(title, "table.title"), title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")  # a name that is cut off names nothing
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def print_json(value: Any) -> None:
    """One JSON document."""
    typer.echo(json.dumps(value, indent=2))


def flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Nested values under names with dots."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return found
