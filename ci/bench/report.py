"""Rows of the benchmarks: what was measured, beside what it is compared with and what it should be.

    python ci/bench/report.py               the rows of all results in ci/bench/results
    python ci/bench/report.py --markdown    as a table for README.md

A row holds two measurements of one kind. Its ratio says how much better ours is: for "at least", baseline / ours (how
many times as fast, or the share of a limit that is reached); for "at most", ours / baseline (memory).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

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
    """One row; `met` is None without a target. Judged is the ratio itself, not what is left of it in print."""
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


def summary(steps: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Medians of a side's steps: of each phase by itself; memory, the most that there was."""
    keys = [key for key in steps[0] if not key.endswith("_gib")]
    found: dict[str, Any] = {f"median_{key}": round(statistics.median(step[key] for step in steps), 4) for key in keys}
    found |= {key: max(step[key] for step in steps) for key in steps[0] if key.endswith("_gib")}
    return found | {"seconds": [round(step["seconds"], 4) for step in steps]}


def cells(each: dict[str, Any]) -> tuple[str, ...]:
    sign = "≥" if each["goal"] == "at least" else "≤"
    target = "" if each["target"] is None else f"{sign} {each['target']:g}"
    verdict = {None: "", True: "met", False: "MISSED"}[each["met"]]
    figures = [f"{each[key]:.3g} {each['unit']}" for key in ("ours", "baseline")]
    return (each["row"], *figures, f"{each['ratio']:.2f}", target, verdict)


def table(rows: Iterable[dict[str, Any]]) -> str:
    lines = [HEADER, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in lines)


def markdown(rows: Iterable[dict[str, Any]]) -> str:
    lines = [HEADER, ("---",) * len(HEADER), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of the results in `folder`, by machine and file."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        result = json.loads(file.read_text())
        if rows := [each for each in result.get("rows", ()) if "ratio" in each]:
            found.setdefault(result["machine"]["model"], []).extend(rows)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="a table in Markdown")
    parser.add_argument("--folder", type=Path, default=HERE / "results", help="where the results are")
    given = parser.parse_args()
    for machine, found in results(given.folder).items():
        print(f"{machine}\n\n{markdown(found) if given.markdown else table(found)}\n")


if __name__ == "__main__":
    main()
