"""Sides that take turns on the whole machine: A B C A B C ..., so that whatever else the machine does meets all.

After every round the results file is written. One that is not complete yet is gone on with by the next call, where
neither the settings nor the code have changed; `--seconds` has a call stop in time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import report
from channel import Worker
from machine import HERE, ROOT, device_file, limits, machine, results_file, shown

TRL_PYTHON = HERE / ".trl-venv" / "bin" / "python"
UNFINISHED = 3  # exit code: the same command goes on
CODE = ("rlhf", "accelerators")


def add_arguments(parser: argparse.ArgumentParser, *, rounds: int = 5, warmup: int = 2) -> None:
    parser.add_argument("--rounds", type=int, default=rounds, help=f"timed steps of each side (default: {rounds})")
    parser.add_argument("--warmup", type=int, default=warmup, help=f"steps before those (default: {warmup})")
    parser.add_argument("--seconds", type=float, help="stop after so long; the same call again goes on")
    parser.add_argument("--accelerator", default="cpu", help="backend to run on (default: cpu)")
    parser.add_argument("--apart", action="store_true", help="one process at a time: in blocks, A A A B B B A A B B")
    parser.add_argument("--fresh", action="store_true", help="do not go on with what an earlier call has measured")
    parser.add_argument("--once", action="store_true", help="do nothing where this code's results are there already")
    parser.add_argument("--rows", type=Path, help="file that the rows are written to as well")
    parser.add_argument("--limits", type=Path, help="file that machine.py --json wrote; else they are measured now")
    parser.add_argument("--output", type=Path, help="JSON file (default: results/NAME-CHIP.json)")


def need_trl() -> None:
    if not TRL_PYTHON.exists():
        sys.exit(f"{TRL_PYTHON}: no such environment; run ci/bench/setup_trl.sh first")


def write(work: Mapping[str, Any], folder: Path) -> Path:
    """The file from which the sides read what they are to do."""
    file = folder / "work.json"
    file.write_text(json.dumps(work))
    return file


def trl(work: Path, precision: str, options: Mapping[str, Any] | None = None) -> list[str]:
    """The command of the TRL side."""
    command = [str(TRL_PYTHON), str(HERE / "trl_worker.py"), str(work), "--precision", precision]
    return command + (["--options", json.dumps(options)] if options else [])


def ours(work: Path) -> list[str]:
    """The command of our side."""
    return [sys.executable, str(HERE / "ours_worker.py"), str(work)]


def start(command: list[str], name: str, folder: Path, accelerator: str) -> Worker:
    """A side's process, once it is ready."""
    # TRL's environment has no `rlhf`, and ours is not to be found there.
    paths = {"PYTHONPATH": str(ROOT)} if command[0] == sys.executable else {"PYTHONPATH": ""}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if accelerator == "cpu" else {}
    return Worker(command, errors=folder / f"{name.replace(' ', '-')}.log", environment=paths | hidden)


class Turns:
    """One benchmark's measurements, on disk after every round."""

    def __init__(self, name: str, what: str, settings: dict[str, Any], given: argparse.Namespace) -> None:
        self.name, self.given = name, given
        self._begun = time.perf_counter()
        self.limits = json.loads(given.limits.read_text()) if given.limits else limits(given.accelerator)
        print(shown(self.limits), flush=True)
        self._nested = given.accelerator != "cpu" and not given.output
        default = results_file(HERE, name) if given.accelerator == "cpu" else device_file(self.limits["chip"])
        self.file = given.output or default
        self.result: dict[str, Any] = {
            "what": what,
            "command": f"python ci/bench/{Path(sys.argv[0]).name} {' '.join(_lasting(sys.argv[1:]))}".strip(),
            "settings": settings,
            "accelerator": given.accelerator,
            "code": code(),
            "complete": False,
        }
        earlier = self._all().get(name, {}) if self._nested else self._all()
        same = all(earlier.get(key) == self.result[key] for key in ("settings", "accelerator", "code"))
        if same and earlier["complete"] and given.once:
            self._show(earlier["rows"])
            sys.exit(0)
        self.steps: dict[str, list[dict[str, float]]] = {}
        self.facts: dict[str, Any] = {}
        self.tried: dict[str, dict[str, float]] = {}
        if same and not earlier["complete"] and not given.fresh:
            self.steps, self.facts, self.tried = (earlier[key] for key in ("steps", "facts", "tried"))
            print(f"going on after {self.done} of {given.rounds} rounds in {self.file}", flush=True)

    @property
    def done(self) -> int:
        """Rounds that all sides have taken."""
        return min(map(len, self.steps.values()), default=0)

    def fastest(self, side: str, tries: Mapping[str, Callable[[], float]]) -> str:
        """The setting of a side that takes least; the seconds of each are kept."""
        tried = self.tried.setdefault(side, {})
        for name, seconds in tries.items() if len(tries) > 1 else ():
            if name not in tried:
                tried[name] = round(seconds(), 3)
                print(f"{side}, {name}: {tried[name]:.2f} s", flush=True)
                self._write()
        return min(tried, key=tried.__getitem__) if tried else next(iter(tries))

    def measure(self, sides: Mapping[str, Callable[[], Worker]]) -> None:
        """Have the sides take turns until there are as many rounds as are wanted; exit where time is up before."""
        rounds = self.given.rounds
        groups = [[name] for name in sides] if self.given.apart else [list(sides)]
        for name in sides:
            self.steps.setdefault(name, [])
        for until in ((rounds + 1) // 2, rounds) if self.given.apart else (rounds,):
            for group in groups:
                if min(len(self.steps[name]) for name in group) < until:
                    self._block({name: sides[name] for name in group}, until)

    def _block(self, sides: Mapping[str, Callable[[], Worker]], until: int) -> None:
        """Have these sides, all there at once, take turns until each has `until` steps."""
        given = self.given
        if given.seconds is not None and self._spent() >= given.seconds:
            self._leave()
        workers: dict[str, Worker] = {}
        for name, starting in sides.items():
            begun = time.perf_counter()
            workers[name] = starting()
            self.facts[name] = {key: value for key, value in workers[name].ready.items() if key != "peak_gib"}
            print(f"{name}: ready after {time.perf_counter() - begun:.0f} s", flush=True)
        done = min(len(self.steps[name]) for name in sides)
        for number in range(-given.warmup, until - done):
            if number > 0 and given.seconds is not None and self._spent() >= given.seconds:
                break
            took: dict[str, float] = {}
            for name, worker in workers.items():
                begun = time.perf_counter()
                reply = worker.step(record=False)
                took[name] = time.perf_counter() - begun
                if number >= 0:
                    self.steps[name].append({"seconds": took[name], **reply})
            which = f"round {done + number + 1} of {given.rounds}" if number >= 0 else "warm-up"
            print(f"{which}: {', '.join(f'{name} {each:.2f} s' for name, each in took.items())}", flush=True)
            if number >= 0:
                self._write()
        for worker in workers.values():
            worker.stop()
        if min(len(self.steps[name]) for name in sides) < until:
            self._leave()

    def _spent(self) -> float:
        return time.perf_counter() - self._begun

    def _leave(self) -> None:
        print(f"{self.done} of {self.given.rounds} rounds: the same command goes on with them ({self.file})")
        sys.exit(UNFINISHED)

    def sides(self) -> dict[str, dict[str, Any]]:
        """Each side's facts and medians."""
        return {name: {**self.facts[name], **report.summary(steps)} for name, steps in self.steps.items()}

    def finish(self, rows: list[dict[str, Any]], **more: Any) -> None:
        """Write the results, and print the rows."""
        self.result["complete"] = True
        self._save({"tried": self.tried, "sides": self.sides(), **more, "rows": rows})
        self._show(rows)

    def _show(self, rows: list[dict[str, Any]]) -> None:
        print(report.table(rows), self.file, sep="\n", flush=True)
        if self.given.rows:
            self.given.rows.write_text(json.dumps(rows))

    def _all(self) -> dict[str, Any]:
        return json.loads(self.file.read_text()) if self.file.exists() else {}

    def _write(self) -> None:
        self._save({"facts": self.facts, "tried": self.tried, "steps": self.steps})

    def _save(self, found: dict[str, Any]) -> None:
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        result = {**self.result, "date": date, "machine": machine(), "limits": self.limits, **found}
        content = {**self._all(), self.name: result} if self._nested else result
        self.file.parent.mkdir(parents=True, exist_ok=True)
        beside = self.file.with_suffix(".part")
        beside.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(beside, self.file)


def code() -> str:
    """What the code that is measured was: its trees in git, and whether files have been changed since."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    trees = " ".join(tree[:12] for tree in git("rev-parse", *(f"HEAD:{part}" for part in CODE)).split())
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *CODE)
    return (trees or "not in git") + (" with changes" if changed else "")


def _lasting(arguments: list[str]) -> list[str]:
    """Without what only a call of its own asks for."""
    kept, skip = [], False
    for argument in arguments:
        if skip or argument in ("--fresh", "--once"):
            skip = False
        elif argument in ("--seconds", "--limits", "--output", "--rows"):
            skip = True
        else:
            kept.append(argument)
    return kept
