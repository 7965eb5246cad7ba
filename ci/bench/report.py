"""Print the rows of all benchmark results: our measurement, the baseline, their ratio and the target.

    python ci/bench/report.py               the rows of all results in ci/bench/results
    python ci/bench/report.py --markdown    the same as a table for README.md

A row compares two measurements of the same quantity. If its goal is "at least", the ratio is baseline / ours: how many
times as fast ours is, or the share of a limit that it reaches. If its goal is "at most", the ratio is ours / baseline,
for memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from machine import name_chip

HERE = Path(__file__).resolve().parent
HEADER = ("row", "ours", "baseline", "ratio", "target", "")


def row(
    name: str,
    *,
    ours: float,
    baseline: float,
    unit: str,
    goal: Literal["at least", "at most"] = "at least",
    target: float | None = None,
) -> dict[str, Any]:
    """Return a row; `met` is None without a target, and otherwise compares the target with the unrounded ratio."""
    ratio = baseline / ours if goal == "at least" else ours / baseline
    met = None if target is None else (ratio >= target if goal == "at least" else ratio <= target)
    return {
        "row": name,
        "ours": round(ours, 3),
        "baseline": round(baseline, 3),
        "unit": unit,
        "ratio": round(ratio, 3),
        "goal": goal,
        "target": target,
        "met": met,
    }


def summarize(steps: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the medians of a side's steps and of their phases, the highest memory, and the seconds of each step."""
    keys = [key for key in steps[0] if not key.endswith("_gib")]
    medians = {key: statistics.median(step[key] for step in steps) for key in keys}
    summary: dict[str, Any] = {f"median_{key}": round(median, 4) for key, median in medians.items()}
    summary |= {key: max(step[key] for step in steps) for key in steps[0] if key.endswith("_gib")}
    return summary | {"seconds": [round(step["seconds"], 4) for step in steps]}


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the texts of a row's columns, in the order of `HEADER`."""
    sign = "≥" if row["goal"] == "at least" else "≤"
    target = "" if row["target"] is None else f"{sign} {row['target']:g}"
    verdict = {None: "", True: "met", False: "MISSED"}[row["met"]]
    figures = [f"{row[key]:.3g} {row['unit']}" for key in ("ours", "baseline")]
    return (row["row"], *figures, f"{row['ratio']:.2f}", target, verdict)


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return the rows as a table of plain text."""
    lines = [HEADER, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in lines)


def markdown(rows: Iterable[dict[str, Any]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [HEADER, ("---",) * len(HEADER), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the results in `folder` by machine, in the order of the files' names."""
    rows_by_machine: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        result = json.loads(file.read_text())
        if rows := [row for row in result.get("rows", ()) if "ratio" in row]:
            rows_by_machine.setdefault(name_chip(result["machine"]), []).extend(rows)
    return rows_by_machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    parser.add_argument("--folder", type=Path, default=HERE / "results", help="default: ci/bench/results")
    arguments = parser.parse_args()
    for machine, rows in results(arguments.folder).items():
        print(f"{machine}\n\n{markdown(rows) if arguments.markdown else table(rows)}\n")


if __name__ == "__main__":
    main()
