"""Put the load on rlhf that no test has time for, and fail if it needs more than it may.

    python ci/load.py rows --rows 1000000       prepare a JSONL file of a million rows, twice (10 minutes)
    python ci/load.py steps --steps 10000       take 10,000 steps of PPO with the embedded model (30 minutes)
    python ci/load.py sessions --count 100      open 100 sessions of Python, one after the other (10 minutes)

`rows` trains one step of SFT on a file of about 300 bytes per row, with the command that users run. The first run
parses and tokenizes the rows, the second finds them in the cache. Each may use a GiB, libraries included; the first
shows its progress, and the second takes a minute at most.

`steps` and `sessions` watch the memory, open files and threads of the process; `steps` also the seconds of a step and
the bytes that it adds to the log. The first tenth is left out. Each slope comes with a 95 % interval from a block
bootstrap: measurements close in time are alike, so the usual interval would be too narrow. A slope passes if 0 is in
its interval, or if the whole interval is below the harm that is printed with it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

MAX_MIB = 1024  # of a rank that prepares a million rows
MAX_SECONDS = 60  # of a run that finds its rows in the cache, from start to end
PER_STEPS, PER_SESSIONS = 1000, 100  # the units of slopes
HARM = {"MiB": 1.0, "open files": 1.0, "threads": 1.0}  # per 1,000 steps
HARM_OF_SESSIONS = {"MiB": 10.0, "open files": 1.0, "threads": 1.0}  # per 100 sessions
RELATIVE_HARM = 0.01  # of the median per 1,000 steps, for seconds and bytes per step
TOY = {
    "sft.max_steps": 2,
    "reward.max_steps": 2,
    "ppo.batch_size": 4,
    "ppo.minibatch_size": 4,
    "data.max_prompt_length": 32,
    "data.max_completion_length": 8,
    "data.heldout_fraction": 0.001,
}
BLOCKS = 12  # of a series, for the bootstrap
DRAWS = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("rows", help="prepare a large file twice")
    rows.add_argument("--rows", type=int, default=1_000_000, help="rows of the file (default: %(default)s)")
    steps = commands.add_parser("steps", help="take many steps of PPO")
    steps.add_argument("--steps", type=int, default=10_000, help="steps to take (default: %(default)s)")
    steps.add_argument("--every", type=int, default=50, help="steps between measurements (default: %(default)s)")
    sessions = commands.add_parser("sessions", help="open many sessions in one process")
    sessions.add_argument("--count", type=int, default=100, help="sessions to open (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.command == "rows":
            problems = check_rows(Path(folder), arguments.rows)
        elif arguments.command == "steps":
            problems = check_steps(Path(folder), arguments.steps, arguments.every)
        else:
            problems = check_sessions(Path(folder), arguments.count)
    print("\n".join(f"FAILED: {problem}" for problem in problems) or "passed")
    sys.exit(bool(problems))


def check_rows(folder: Path, count: int) -> list[str]:
    """Return what is wrong with two runs that prepare a file of `count` rows."""
    problems = []
    path = folder / "rows.jsonl"
    write_rows(path, count)
    print(f"{count:,} rows, {path.stat().st_size / 2**20:,.0f} MiB", flush=True)
    settings = {
        "data.datasets": json.dumps([{"path": str(path), "stages": ["sft"]}]),
        "data.heldout_fraction": 1e-4,
        "sft.max_steps": 1,
        "sft.batch_size": 4,
    }
    for turn in ("first", "second"):
        start, log = time.monotonic(), folder / f"{turn}.log"
        _, status, usage = os.wait4(start_run(folder, "sft", turn, settings).pid, 0)
        seconds, mib, output = time.monotonic() - start, usage.ru_maxrss / 1024, log.read_text(encoding="utf-8")
        print(f"{turn} run: {seconds:.0f} s, at most {mib:.0f} MiB", flush=True)
        if status:
            return [f"the {turn} run ended with exit code {os.waitstatus_to_exitcode(status)}: {output}"]
        if mib > MAX_MIB:
            problems.append(f"the {turn} run used {mib:.0f} MiB, more than {MAX_MIB}")
        bars = [f"reading {path}: {count:,} rows", f"sft: tokenizing {path}: {count:,} rows"]
        if turn == "first" and (missing := [bar for bar in bars if bar not in output]):
            problems.append(f"the first run did not show {missing}")
        if turn == "second" and seconds > MAX_SECONDS:
            problems.append(f"the second run took {seconds:.0f} s, more than {MAX_SECONDS}")
    return problems


def write_rows(path: Path, count: int) -> None:
    """Write rows of about 300 bytes, with words that the embedded model knows."""
    from rlhf.data.toy_world import generate_records

    rng, records = random.Random(0), list(islice(generate_records(0), 1000))
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            prompt = " ".join(record["prompt"] for record in rng.choices(records, k=3))
            response = " ".join(record["response"] for record in rng.choices(records, k=2))
            file.write(json.dumps({"prompt": f"{number} {prompt}", "response": response}) + "\n")


def check_steps(folder: Path, count: int, every: int) -> list[str]:
    """Return which measurements of a run grow over `count` steps of PPO."""
    settings = TOY | {"ppo.steps": count, "ppo.checkpoint_every": max(every, count // 20), "ppo.samples_every": every}
    process = start_run(folder, "--stages=sft,reward,ppo", "run", settings)
    metrics = folder / "run" / "ppo" / "metrics.jsonl"
    series, size = Series(), 0
    for step, seconds in follow_steps(metrics, process, every):
        added, size = metrics.stat().st_size - size, metrics.stat().st_size
        series.add(step, measure(process.pid) | {"seconds a step": seconds, "bytes a step": added / every})
    if process.wait():
        return [f"the run ended with exit code {process.returncode}: {(folder / 'run.log').read_text()}"]
    return series.judge(PER_STEPS, "steps", HARM)


def follow_steps(metrics: Path, process: subprocess.Popen[bytes], every: int) -> Iterator[tuple[int, float]]:
    """Yield each step that is a multiple of `every`, and the mean seconds of these steps, while the run takes them."""
    seconds: list[float] = []
    while process.poll() is None and not metrics.exists():
        time.sleep(0.1)
    if not metrics.exists():
        return
    with metrics.open(encoding="utf-8") as file:
        rest = ""
        while (text := file.read()) or process.poll() is None:
            *lines, rest = (rest + text).split("\n")
            for record in map(json.loads, lines):
                if "seconds" in record:
                    seconds.append(record["seconds"])
                    if len(seconds) % every == 0 and process.poll() is None:
                        yield len(seconds), float(np.mean(seconds[-every:]))
            time.sleep(0.01)


def check_sessions(folder: Path, count: int) -> list[str]:
    """Return which measurements of this process grow over `count` sessions that train SFT, a reward model and PPO."""
    import rlhf

    series = Series()
    for number in range(1, count + 1):
        with rlhf.session(TOY, output=folder / "session") as session:
            session.run("sft", "reward")
            ppo = session.ppo()
            ppo.step()
            del ppo
        subprocess.run(["rm", "-r", folder / "session"], check=True)
        gc.collect()
        series.add(number, measure(os.getpid()))
    return series.judge(PER_SESSIONS, "sessions", HARM_OF_SESSIONS)


def start_run(folder: Path, stages: str, name: str, settings: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    """Start a run in `folder/name`; its output goes to `name`.log."""
    command = [sys.executable, "-m", "rlhf", stages, "--output", str(folder / name)]
    command += [option for key, value in settings.items() for option in ("--set", f"{key}={value}")]
    environment = os.environ | {"HF_DATASETS_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


def measure(pid: int) -> dict[str, float]:
    """Return the memory, open files and threads of a process."""
    place = Path("/proc", str(pid))
    pages = int((place / "statm").read_text().split()[1])
    return {
        "MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "open files": float(len(os.listdir(place / "fd"))),
        "threads": float(len(os.listdir(place / "task"))),
    }


class Slope(NamedTuple):
    """The slope of a series, and its 95 % interval."""

    value: float
    low: float
    high: float


class Series:
    """Measurements at increasing places."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._values: dict[str, list[float]] = {}

    def add(self, place: int, values: Mapping[str, float]) -> None:
        """Add the measurements at one place, and print them."""
        self._places.append(place)
        for name, value in values.items():
            self._values.setdefault(name, []).append(value)
        print(f"{place:,}: " + ", ".join(f"{value:.4g} {name}" for name, value in values.items()), flush=True)

    def judge(self, per: int, noun: str, harm: Mapping[str, float]) -> list[str]:
        """Print the slopes per so many places, and return the series that grow."""
        first = -(-len(self._places) // 10)
        problems = []
        for name, values in self._values.items():
            limit = harm.get(name, RELATIVE_HARM * float(np.median(values)))
            slope = fit_slope(np.array(self._places[first:]) / per, np.array(values[first:]))
            line = f"{name}: {slope.value:+.3g} per {per:,} {noun} ({slope.low:+.3g} to {slope.high:+.3g})"
            print(f"{line}, harmful from {limit:.3g}")
            if not (slope.low <= 0 <= slope.high or slope.high < limit):
                problems.append(line)
        return problems


def fit_slope(places: np.ndarray, values: Sequence[float] | np.ndarray) -> Slope:
    """Fit a line by least squares; draw blocks of its residuals for the interval."""
    slope, start = np.polyfit(places, values, 1)
    residuals = values - (slope * places + start)
    length = max(1, len(places) // BLOCKS)
    rng = np.random.default_rng(0)
    starts = rng.integers(0, len(places) - length + 1, (DRAWS, -(-len(places) // length)))
    drawn = (starts[:, :, None] + np.arange(length)).reshape(DRAWS, -1)[:, : len(places)]
    centred = places - places.mean()
    slopes = slope + residuals[drawn] @ centred / (centred @ centred)
    return Slope(float(slope), *map(float, np.quantile(slopes, [0.025, 0.975])))


if __name__ == "__main__":
    main()
