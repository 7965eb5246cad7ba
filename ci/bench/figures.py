"""List the measured figures of the pages with their age, mark old ones in the pages, and measure them again.

    python ci/bench/figures.py                    each figure: its commit, and how many files of its code changed since
    python ci/bench/figures.py --write            write the notes of the pages: machine, date, commit, older or not
    python ci/bench/figures.py --check            exit with 1 if a page is wrong about a figure's age
    python ci/bench/figures.py --measure [ID ...] measure again what this machine can, and write values and notes

`figures.yaml` has every figure: its text on each page, the template that makes the text from a result, the command, and
the code that it is about. A result is a JSON file of `results/`, or the stages of a run's folder. The rows of all
results are written into the tables of `README.md` in this folder, with the notes. `tests/docs/test_figures.py` finds
figures of pages that are not there. A change of comments and docstrings alone makes no figure old.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import io
import json
import os
import re
import string
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import report
import yaml
from machine import HERE, ROOT, chip_name, machine

FILE = HERE / "figures.yaml"
ROWS = "ci/bench/README.md"  # the page with the rows of all results
BEGIN, END = "<!-- measured: made by ci/bench/figures.py -->\n", "<!-- end of measured -->\n"
ROWS_BEGIN, ROWS_END = "<!-- rows: made by ci/bench/figures.py -->\n", "<!-- end of rows -->\n"
UNITS = {"GiB": 2**30, "min": 60, "%": 0.01}


class _Template(string.Formatter):
    """Formats whose specification may end in a unit: `{peak:.1GiB}` is `14.4 GiB`."""

    def format_field(self, value: Any, format_spec: str) -> str:
        for unit, size in UNITS.items():
            if format_spec.endswith(unit):
                return f"{format(value / size, format_spec.removesuffix(unit) + 'f')} {unit}"
        return str(super().format_field(value, format_spec))


class _Dumper(yaml.SafeDumper):
    """YAML with texts of several lines as blocks."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def load() -> dict[str, Any]:
    """Return the contents of `figures.yaml`."""
    document: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return document


def save(document: dict[str, Any]) -> None:
    """Write `figures.yaml`, and keep the comment at its top."""
    lines = FILE.read_text(encoding="utf-8").splitlines(keepends=True)
    comment = "".join(line for line in lines if line.startswith("#"))
    FILE.write_text(comment + dump(document), encoding="utf-8")


def dump(document: dict[str, Any]) -> str:
    """Return the contents of `figures.yaml`, without its comment."""
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return text


def read_result(entry: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of an entry; None if it is a run whose folder is not on this machine."""
    if "result" in entry:
        result: dict[str, Any] = json.loads((ROOT / entry["result"]).read_text(encoding="utf-8"))
        return result
    folder = ROOT / entry["run"]
    if not (folder / "run.json").is_file():
        return None
    stages = {name: json.loads((folder / name / "stage.json").read_text()) for name in ("sft", "reward", "ppo")}
    before, after = stages["ppo"]["before"], stages["ppo"]["after"]
    seconds = sum(stage["seconds"] for stage in stages.values())
    return {
        **stages,
        "seconds": seconds,
        "about": round(seconds, -1),
        "rise": (after["reward"] - before["reward"]) / before["reward_std"],
        "table": _closing_table(list(stages.values())),
    }


def _closing_table(stages: list[dict[str, Any]]) -> str:
    from rich.console import Console

    from rlhf.reporting.summary import summary_table

    text = io.StringIO()
    Console(file=text, width=80, color_system=None).print(summary_table(stages))
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def fill(template: str, result: dict[str, Any]) -> str:
    """Return the text of a figure with the values of a result."""
    return _Template().vformat(template, (), result)


def texts(entry: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (page, text) of each figure of an entry, the rows of its result among them."""
    listed = [(page, figure["text"]) for page, figures in entry["figures"].items() for figure in figures]
    rows = json.loads((ROOT / entry["result"]).read_text()).get("rows", []) if "result" in entry else []
    return listed + [(ROWS, f"| {' | '.join(report.cells(row))} |") for row in rows if "ratio" in row]


def count_changes(entry: dict[str, Any]) -> int | None:
    """Return how many files of an entry's code have changed since its measurement; None if git lacks its commit."""
    then, now = (_git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}") for name in (entry["commit"], "HEAD"))
    if not then:
        return None
    names = _git("diff", "--name-only", "--no-renames", then, now, "--", *entry["code"].split()).splitlines()
    return sum(_statements(then, name) != _statements(now, name) for name in names)


@functools.cache
def _statements(commit: str, name: str) -> str:
    """Return a file's code without its comments and docstrings."""
    text = _git("show", f"{commit}:{name}")
    if name.endswith((".c", ".h")):
        return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL).split())
    if not name.endswith(".py"):
        return text
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for field, statements in ast.iter_fields(node):
            if isinstance(statements, list):
                setattr(node, field, [statement for statement in statements if not _is_docstring(statement)])
    return ast.dump(tree)


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _git(*words: str) -> str:
    completed = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return completed.stdout.strip() if completed.returncode == 0 else ""


def note(page: str, entries: list[dict[str, Any]]) -> str:
    """Return the note of a page: where, when and with which commit its figures were measured."""
    groups: dict[tuple[str, str, str, bool], list[str]] = {}
    for entry in entries:
        if any(page == name for name, _ in texts(entry)):
            key = (entry["machine"], str(entry["date"]), entry["commit"], entry["older"])
            groups.setdefault(key, []).append(f"`{entry['command']}`")
    lines = []
    for (chip, date, commit, older), commands in groups.items():
        age = " **The code has changed since.**" if older else ""
        lines.append(f"- {date}, commit {commit}, {chip}: {', '.join(dict.fromkeys(commands))}.{age}\n")
    return "Measurements of this page:\n\n" + "".join(lines)


def tables() -> str:
    """Return the rows of all results, in one table for each machine."""
    rows_by_machine = sorted(report.results(HERE / "results").items())
    return "\n\n".join(f"{chip}:\n\n{report.markdown(rows)}" for chip, rows in rows_by_machine) + "\n"


def write_notes(entries: list[dict[str, Any]]) -> None:
    """Write the note of every page that has figures, and the tables of all rows, each between its two marks."""
    pages = sorted({page for entry in entries for page, _ in texts(entry)})
    for page in pages:
        _write_between(page, BEGIN, note(page, entries), END)
    if ROWS in pages:
        _write_between(ROWS, ROWS_BEGIN, tables(), ROWS_END)


def _write_between(page: str, begin: str, text: str, end: str) -> None:
    path = ROOT / page
    before, mark, rest = path.read_text(encoding="utf-8").partition(begin)
    _, end_mark, after = rest.partition(end)
    if not (mark and end_mark):
        sys.exit(f"{page}: has figures but no place for them; add the lines {begin.strip()} and {end.strip()}")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def find_lack(entry: dict[str, Any]) -> str | None:
    """Return what this machine lacks for the command of an entry; None if it can run."""
    for need in entry["needs"]:
        kind, _, value = need.partition(" ")
        present = {
            "chip": lambda value=value: value in chip_name(),
            "path": lambda value=value: (ROOT / value).exists(),
            "module": lambda value=value: importlib.util.find_spec(value) is not None,
        }[kind]()
        if not present:
            return str(need)
    return None


def measure(entry: dict[str, Any]) -> bool:
    """Run the command of an entry again, and write its values into the entry and the pages; return whether it ran."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    command = ["bash", "-c", entry["command"]]
    code = subprocess.run(command, cwd=ROOT, env=os.environ | {"PATH": path}, check=False).returncode
    result = None if code else read_result(entry)
    if result is None:
        print(f"{entry['id']}: {entry['command']}: failed with exit code {code}; nothing is written")
        return False
    for page, figures in entry["figures"].items():
        file = ROOT / page
        text = file.read_text(encoding="utf-8")
        for figure in figures:
            earlier, figure["text"] = figure["text"], fill(figure["template"], result)
            text = text.replace(earlier, figure["text"])
        file.write_text(text, encoding="utf-8")
    entry["machine"] = f"{chip_name()}, {machine()['cores']} cores"
    entry["date"] = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    entry["commit"], entry["older"] = _git("rev-parse", "--short=7", "HEAD"), False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="write the notes of the pages")
    action.add_argument("--check", action="store_true", help="exit with 1 if a note is wrong about age")
    action.add_argument("--measure", nargs="*", metavar="ID", help="measure these again (default: all)")
    arguments = parser.parse_args()
    document = load()
    entries: list[dict[str, Any]] = document["measured"]
    if arguments.measure is not None:
        _measure(document, arguments.measure)
        return
    wrong = []
    for entry in entries:
        count = count_changes(entry)
        age = "its commit is not in git" if count is None else f"files changed since: {count}" if count else "current"
        print(f"{entry['id']:24} {entry['date']} {entry['commit']}  {age:24} {entry['command']}")
        if entry["older"] != (older := count != 0):
            wrong.append(entry["id"])
            entry["older"] = older if arguments.write else entry["older"]
    if arguments.write:
        save(document)
        write_notes(entries)
    elif wrong and arguments.check:
        sys.exit(f"the pages are wrong about the age of {', '.join(wrong)}; run python ci/bench/figures.py --write")


def _measure(document: dict[str, Any], selected: list[str]) -> None:
    entries = document["measured"]
    if unknown := set(selected) - {entry["id"] for entry in entries}:
        sys.exit(f"--measure: unknown figures, got {', '.join(sorted(unknown))}; python ci/bench/figures.py lists all")
    if changed := _git("status", "--porcelain", "--untracked-files=no", "--", "rlhf", "accelerators", "plugins"):
        sys.exit(f"--measure: files differ from the commit, got {changed.split()[-1]}; commit them first")
    failed = []
    for entry in entries:
        if selected and entry["id"] not in selected:
            continue
        if lack := find_lack(entry):
            print(f"{entry['id']}: not measured: this machine has no {lack}")
        elif not measure(entry):
            failed.append(entry["id"])
        else:
            save(document)
            write_notes(entries)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
