"""Measure several sides on the whole machine, by turns, so that other load on the machine affects all of them.

The sides run apart, in blocks: A A A B B B A A B B. Then each has the memory of the machine, as it has in use. Sides of
one program can also be in memory together and take turns step by step, A B C A B C, which shows smaller differences.

The results file is written after every round. If it is incomplete, the next call with the same settings and the same
code resumes it. `--seconds` limits the time of a call.
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
from functools import partial
from pathlib import Path
from typing import Any

import report
from channel import Worker
from machine import HERE, ROOT, better, describe_limits, device_file, limits, machine, results_file, usual_precision

TRL_ENVIRONMENTS = {"ppo": ".trl-venv"}  # the last releases with a PPOTrainer; the newest for the other trainers
UNFINISHED = 3  # exit code: time ran out, and the same command resumes
CODE = ("rlhf", "accelerators")  # folders of the code that is measured
SAME = ("settings", "accelerator", "apart", "machine", "code")  # what is equal if a call resumes an earlier one


def add_arguments(parser: argparse.ArgumentParser, *, rounds: int = 5, warmup: int = 2, apart: bool = True) -> None:
    """Add the options that all benchmarks of several sides share; `apart` is how they run by default."""
    parser.add_argument("--rounds", type=int, default=rounds, help=f"timed steps per side (default: {rounds})")
    parser.add_argument("--warmup", type=int, default=warmup, help=f"untimed steps before them (default: {warmup})")
    parser.add_argument("--seconds", type=float, help="stop after this time; the same command resumes")
    parser.add_argument("--accelerator", default="cpu", help="backend to run on (default: cpu)")
    parser.add_argument(
        "--apart",
        action=argparse.BooleanOptionalAction,
        default=apart,
        help="run one process at a time, A A A B B B A A B B, or all together, A B A B (default: %(default)s)",
    )
    parser.add_argument("--fresh", action="store_true", help="start again instead of resuming an earlier call")
    parser.add_argument("--once", action="store_true", help="measure nothing if complete results of this code exist")
    parser.add_argument("--rows", type=Path, help="additional file for the rows")
    parser.add_argument("--limits", type=Path, help="output of machine.py --json, for the limits before the sides")
    parser.add_argument("--output", type=Path, help="JSON file (default: results/NAME-CHIP.json)")


def add_lora(parser: argparse.ArgumentParser) -> None:
    """Add the option for LoRA on all sides."""
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank (default: all weights)")


def add_precision(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add the option for the precision of all sides; without a default, `choose_precision` sets that of the device."""
    shown = default or "bf16 if the device multiplies it, otherwise fp32"
    parser.add_argument("--precision", choices=("fp32", "bf16"), default=default, help=f"default: {shown}")


def choose_precision(arguments: argparse.Namespace) -> None:
    """Set the precision that the device usually has, unless the caller named one; exit if the device lacks it."""
    usual = usual_precision(arguments.accelerator)
    if arguments.precision == "bf16" and usual == "fp32":
        sys.exit("--precision bf16: this processor has no bf16 instructions; leave the option out to run in fp32")
    arguments.precision = arguments.precision or usual


def mark_precision(arguments: argparse.Namespace, mark: str) -> str:
    """Return `mark` followed by the precision, for names of results and rows; "" for bf16."""
    return "" if arguments.precision == "bf16" else f"{mark}{arguments.precision}"


def find_trl(trainer: str) -> Path:
    """Return the interpreter of the environment with the TRL whose trainer (sft, ppo, grpo, ...) is the other side."""
    return HERE / TRL_ENVIRONMENTS.get(trainer, ".trl-newest-venv") / "bin" / "python"


def require_trl(trainer: str) -> None:
    """Exit with a line that says what to do if TRL's environment does not exist."""
    if not find_trl(trainer).exists():
        sys.exit(f"{find_trl(trainer)}: no such environment; run bash ci/bench/setup_trl.sh first")


def write(work: Mapping[str, Any], folder: Path) -> Path:
    """Write the work of the sides to a file, and return the file."""
    file = folder / "work.json"
    file.write_text(json.dumps(work))
    return file


def trl_command(trainer: str, work: Path, precision: str, options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the command of the TRL side."""
    command = [str(find_trl(trainer)), str(HERE / "trl_worker.py"), trainer, str(work), "--precision", precision]
    return command + (["--options", json.dumps(options)] if options else [])


def ours_command(work: Path) -> list[str]:
    """Return the command of our side."""
    return [sys.executable, str(HERE / "ours_worker.py"), str(work)]


def start_worker(command: list[str], name: str, folder: Path, accelerator: str) -> Worker:
    """Start the process of a side, and return it when it is ready."""
    # TRL's environment has no `rlhf`, and must not import ours.
    paths = {"PYTHONPATH": str(ROOT)} if command[0] == sys.executable else {"PYTHONPATH": ""}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if accelerator == "cpu" else {}
    return Worker(command, errors=folder / f"{name.replace(' ', '-')}.log", environment=paths | hidden)


def time_one_step(*side: Any) -> float:
    """Start a side's worker and return the seconds of its second step; the first step warms up."""
    worker = start_worker(*side)
    worker.step(record=False)
    worker.step(record=True)
    worker.stop()
    return worker.seconds[0]


class Turns:
    """The measurements of one benchmark, written to disk after every round."""

    def __init__(self, name: str, what: str, settings: dict[str, Any], arguments: argparse.Namespace) -> None:
        self.name, self.arguments = name, arguments
        self._start_time = time.perf_counter()
        self.limits = json.loads(arguments.limits.read_text()) if arguments.limits else self._measure_limits()
        print(describe_limits(self.limits), flush=True)
        self._nested = arguments.accelerator != "cpu" and not arguments.output
        default = results_file(HERE, name) if arguments.accelerator == "cpu" else device_file(self.limits["chip"])
        self.file = arguments.output or default
        self.result: dict[str, Any] = {
            "what": what,
            "command": f"python ci/bench/{Path(sys.argv[0]).name} {' '.join(_drop_call_options(sys.argv[1:]))}".strip(),
            "settings": settings,
            "accelerator": arguments.accelerator,
            "apart": arguments.apart,
            "machine": machine(),
            "code": code_version(),
            "complete": False,
        }
        earlier = self._read_file().get(name, {}) if self._nested else self._read_file()
        same = all(earlier.get(key) == self.result[key] for key in SAME)
        if same and earlier["complete"] and arguments.once:
            self._print_rows(earlier["rows"])
            sys.exit(0)
        self.steps: dict[str, list[dict[str, float]]] = {}
        self.facts: dict[str, Any] = {}
        self.tried: dict[str, dict[str, float]] = {}
        if same and not earlier["complete"] and not arguments.fresh:
            self.steps, self.facts, self.tried = (earlier[key] for key in ("steps", "facts", "tried"))
            print(f"resuming after {self.completed_rounds} of {arguments.rounds} rounds in {self.file}", flush=True)

    @property
    def completed_rounds(self) -> int:
        """The number of rounds that all sides have taken."""
        return min(map(len, self.steps.values()), default=0)

    def _measure_limits(self) -> dict[str, Any]:
        return limits(self.arguments.accelerator, getattr(self.arguments, "precision", None))

    def best_limits(self) -> dict[str, Any]:
        """Measure the machine's limits again, and return the better of before and after the sides."""
        self.limits = better(self.limits, self._measure_limits())
        return self.limits

    def choose_fastest(self, side: str, trials: Mapping[str, Callable[[], float]]) -> str:
        """Return the fastest setting of a side, and record the seconds of each; a single setting is not timed."""
        tried = self.tried.setdefault(side, {})
        for name, time_setting in trials.items() if len(trials) > 1 else ():
            if name not in tried:
                tried[name] = round(time_setting(), 3)
                print(f"{side}, {name}: {tried[name]:.2f} s", flush=True)
                self._save_progress()
        return min(tried, key=tried.__getitem__) if tried else next(iter(trials))

    def fastest_trl(
        self, side: str, trainer: str, work: Path, options: Mapping[str, Mapping[str, Any]]
    ) -> partial[Worker]:
        """Return the start of a side of TRL, `trl <precision>`, with the fastest of these options for its trainer."""

        def call(function: Callable[..., Any], changes: Mapping[str, Any]) -> partial[Any]:
            command = trl_command(trainer, work, side.removeprefix("trl "), changes)
            return partial(function, command, side, work.parent, self.arguments.accelerator)

        trials = {name: call(time_one_step, changes) for name, changes in options.items()}
        return call(start_worker, options[self.choose_fastest(side, trials)])

    def measure(self, sides: Mapping[str, Callable[[], Worker]]) -> None:
        """Let the sides take turns until all rounds are complete; exit with `UNFINISHED` if time runs out before."""
        rounds = self.arguments.rounds
        groups = [[name] for name in sides] if self.arguments.apart else [list(sides)]
        for name in sides:
            self.steps.setdefault(name, [])
        for target in ((rounds + 1) // 2, rounds) if self.arguments.apart else (rounds,):
            for group in groups:
                if min(len(self.steps[name]) for name in group) < target:
                    self._measure_block({name: sides[name] for name in group}, target)

    def _measure_block(self, sides: Mapping[str, Callable[[], Worker]], target: int) -> None:
        """Start all of these sides, and let them take turns until each has `target` steps."""
        arguments = self.arguments
        if arguments.seconds is not None and self._elapsed() >= arguments.seconds:
            self._exit_unfinished()
        workers: dict[str, Worker] = {}
        for name, start_side in sides.items():
            start = time.perf_counter()
            workers[name] = start_side()
            self.facts[name] = {key: value for key, value in workers[name].ready.items() if key != "peak_gib"}
            print(f"{name}: ready after {time.perf_counter() - start:.0f} s", flush=True)
        earlier = min(len(self.steps[name]) for name in sides)
        for number in range(-arguments.warmup, target - earlier):
            if number > 0 and arguments.seconds is not None and self._elapsed() >= arguments.seconds:
                break
            seconds: dict[str, float] = {}
            for name, worker in workers.items():
                if number >= 0 and len(workers) > 1:
                    worker.step(record=False)  # memory that was idle during the turns of others is slow at first
                start = time.perf_counter()
                reply = worker.step(record=False)
                seconds[name] = time.perf_counter() - start
                if number >= 0:
                    self.steps[name].append({"seconds": seconds[name], **reply})
            label = f"round {earlier + number + 1} of {arguments.rounds}" if number >= 0 else "warm-up"
            print(f"{label}: {', '.join(f'{name} {value:.2f} s' for name, value in seconds.items())}", flush=True)
            if number >= 0:
                self._save_progress()
        for worker in workers.values():
            worker.stop()
        if min(len(self.steps[name]) for name in sides) < target:
            self._exit_unfinished()

    def _elapsed(self) -> float:
        return time.perf_counter() - self._start_time

    def _exit_unfinished(self) -> None:
        rounds = f"{self.completed_rounds} of {self.arguments.rounds} rounds"
        print(f"{rounds} are complete; the same command resumes ({self.file})")
        sys.exit(UNFINISHED)

    def sides(self) -> dict[str, dict[str, Any]]:
        """Return the facts and the medians of each side."""
        return {name: {**self.facts[name], **report.summarize(steps)} for name, steps in self.steps.items()}

    def finish(self, rows: list[dict[str, Any]], **details: Any) -> None:
        """Write the complete results with further details, and print the rows."""
        self.result["complete"] = True
        self._save({"tried": self.tried, "sides": self.sides(), **details, "rows": rows})
        self._print_rows(rows)

    def _print_rows(self, rows: list[dict[str, Any]]) -> None:
        print(report.table(rows), self.file, sep="\n", flush=True)
        if self.arguments.rows:
            self.arguments.rows.write_text(json.dumps(rows))

    def _read_file(self) -> dict[str, Any]:
        return json.loads(self.file.read_text()) if self.file.exists() else {}

    def _save_progress(self) -> None:
        self._save({"facts": self.facts, "tried": self.tried, "steps": self.steps})

    def _save(self, values: dict[str, Any]) -> None:
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        result = {**self.result, "date": date, "limits": self.limits, **values}
        content = {**self._read_file(), self.name: result} if self._nested else result
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial_file = self.file.with_suffix(".part")
        partial_file.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(partial_file, self.file)


def code_version() -> str:
    """Return the version of the measured code: its trees in git, and whether files differ from them."""

    def git(*words: str) -> str:
        completed = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return completed.stdout.strip() if completed.returncode == 0 else ""

    trees = " ".join(tree[:12] for tree in git("rev-parse", *(f"HEAD:{part}" for part in CODE)).split())
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *CODE)
    return (trees or "not in git") + (" with changes" if changed else "")


def _drop_call_options(arguments: list[str]) -> list[str]:
    """Return the arguments without the options that concern a single call and not the measurement."""
    remaining, skip = [], False
    for argument in arguments:
        if skip or argument in ("--fresh", "--once"):
            skip = False
        elif argument in ("--seconds", "--limits", "--output", "--rows"):
            skip = True
        else:
            remaining.append(argument)
    return remaining
