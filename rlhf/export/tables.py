"""Write a run's records as CSV: one table of numbers for each stage, and one of its held-out rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhf.diagnosis.records import RunRecords
from rlhf.reporting.recorder import select_numbers
from rlhf.utils.jsonl import read_records


def format_tables(run: RunRecords) -> dict[str, str]:
    """Return the tables of a run by their file names.

    `<stage>.csv` has one row for each step, and a column for each recorded number, in the order in which they were
    first recorded; held-out numbers are in the row of their step. `<stage>-heldout.csv` has one row for each held-out
    row of each evaluation, numbered from 0. A cell is empty if nothing was recorded, or no finite number.
    """
    tables = {}
    for stage in run.stages:
        by_step: dict[int, dict[str, Any]] = {}
        for record in read_records(stage.directory.metrics):
            if "tag" not in record:
                by_step.setdefault(record["step"], {"step": record["step"]}).update(select_numbers(record))
        tables[f"{stage.name}.csv"] = _format_table(["step"], list(by_step.values()))
        if stage.heldout:
            rows = [
                {"step": step, "row": number, **row}
                for step, rows in stage.heldout.items()
                for number, row in enumerate(rows)
            ]
            tables[f"{stage.name}-heldout.csv"] = _format_table(["step", "row"], rows)
    return tables


def _format_table(first: Iterable[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV with a header: the columns `first`, then the others as they appear."""
    columns = list(dict.fromkeys([*first, *(name for row in rows for name in row)]))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_format_cell(row.get(name)) for name in columns] for row in rows)
    return file.getvalue()


def _format_cell(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value  # true and false, as in JSON
