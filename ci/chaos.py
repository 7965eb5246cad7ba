"""Kill runs, send them signals and damage their files, at random; count what is lost.

    python ci/chaos.py --kills 1000 --signals 500 --damages 300 --seed 1
    python ci/chaos.py --table                 # the counts so far, as in docs/reliability.md

Each fault strikes a run of three stages (tiny models) on one or two ranks. The run is then continued to its end and
compared with one that was left alone: saved weights bit for bit, held-out rows, and all numbers of every step except
times. With --keep, counts are added to ci/results/chaos.json. An outcome that is not allowed is printed with its
seed.

Most runs start in a fork of a process that has imported the libraries, so that moments fall into all of a run and not
into its imports; every fourth starts a new interpreter, whose start is struck too.

Exit codes: 0 all outcomes are allowed, 1 some are not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlhf.reporting.recorder import read_heldout  # noqa: E402
from rlhf.utils.atomic_io import atomic_write, atomic_write_json  # noqa: E402
from rlhf.utils.manifest import hash_file  # noqa: E402
from tests.forks import Forks  # noqa: E402
from tests.helpers import WORDS, build_tokenizer, llama, user_environment  # noqa: E402

RESULTS = ROOT / "ci" / "results" / "chaos.json"
PAGE = ROOT / "docs" / "reliability.md"
_TABLE, _TABLE_END = "<!-- written by ci/chaos.py --keep -->", "<!-- end of the table -->"

SAME = "same result"
COMPLETE = "run was complete"
EARLY = "before rlhf's first line"
NAMED = "refused, file named"
OFFERED = "refused, the offered command gives the same result"
FOUND = "same result; verify names the file"
UNREAD = "same result; the file is a record or for people"
ALLOWED = (SAME, COMPLETE, EARLY, NAMED, OFFERED, FOUND, UNREAD)
LOST = "LOST"

STAGES = ("sft", "reward", "ppo")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_BOUND = 60.0  # seconds in which all processes of a run must have ended
_START = 0.15  # seconds in which an interpreter runs nothing of rlhf yet
_STRIKES = 3  # most kills or signals of one run
# Times, and numbers about what a process has done since it started, which a resumed run has more often.
_NOT_COMPARED = re.compile(r"time|seconds|memory|tflops|per_second|_share$|weights$|_gap|compilations|fallbacks")
_RECORD = re.compile(r"console\.log|README\.md|report\.html|events\.out|recipe\.yaml")  # nothing continues from it


class Process:
    """A command of rlhf that runs: a fork, or a new interpreter if it starts `cold`; with it, all that it starts.

    They are recognized by their working directory, which only they have.
    """

    def __init__(self, forks: Forks, arguments: list[str], folder: Path, *, cold: bool = False) -> None:
        self._folder, command = folder, ["-m", "rlhf", *arguments]
        if cold:
            environment = _environment() | {"PYTHONPATH": str(ROOT)}
            with (folder / "errors").open("w") as errors:
                self._process: Any = subprocess.Popen(
                    [sys.executable, *command], cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=errors
                )
        else:
            self._process = forks.start(*command, cwd=folder)
        self._cold, self.started = cold, time.monotonic()
        # A killed process keeps its lock until its last thread has ended; by then another may have its number.
        self._seen: set[tuple[int, str]] = set()

    def lasts(self, seconds: float) -> bool:
        """Wait so long; return whether it still runs."""
        while time.monotonic() < self.started + seconds and self._process.poll() is None:
            time.sleep(0.002)
        return self._process.poll() is None

    def send(self, number: int, to: str) -> None:
        """Send a signal to "the command", to "one rank" that it has started, or to "all processes"."""
        found = self._list()
        ranks = [pid for pid in found if pid != self._process.pid]
        for pid in {"the command": [self._process.pid], "one rank": ranks[:1]}.get(to, found):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _list(self) -> list[int]:
        found = _list_processes(self._folder)
        self._seen.update((pid, _read_stat(pid)[1]) for pid in found)
        return found

    def wait(self) -> tuple[int, str]:
        """Return the exit code and what it wrote to standard error.

        Raises:
            TimeoutError: it, or a process that it has started, has not ended; the message names them.
        """
        end = time.monotonic() + _BOUND
        while self._process.poll() is None or self._list() or any(_is_alive(*seen) for seen in self._seen):
            if time.monotonic() > end:
                left = [f"{pid} ({_describe(pid)})" for pid, start in self._seen if _is_alive(pid, start)]
                self.send(signal.SIGKILL, "all processes")
                raise TimeoutError(f"processes stay {_BOUND:.0f} s: {', '.join(left) or 'only the command'}")
            time.sleep(0.01)
        if self._cold:
            return self._process.wait(), (self._folder / "errors").read_text(errors="replace")
        return self._process.wait(), self._process.communicate()[1]


class Chaos:
    """The runs, and what strikes them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed, self.lost = folder, seed, False
        self._lock = threading.Lock()  # the process that is forked answers one request at a time
        self.counts: dict[str, Counter[str]] = {}
        self._forks = Forks(_environment())
        self._recipe = _write_recipe(folder)
        self._results: dict[int, dict[str, Any]] = {}  # of runs that are left alone, by ranks
        self._seconds: dict[tuple[int, bool], float] = {}  # that they took, by ranks and start
        for ranks, cold in ((1, False), (1, True), (2, False), (2, True)):
            run = self._make_run(f"whole-{ranks}-{cold}")
            process = self._start(run, ranks, cold=cold)
            code, errors = process.wait()
            assert code == 0, errors
            self._seconds[ranks, cold] = time.monotonic() - process.started
            self._results[ranks] = _read_result(run)
        self._interrupted = self._make_run("interrupted")
        process = self._start(self._interrupted, 1)
        while not (self._interrupted / "ppo" / "checkpoints" / "step-00000002").exists():
            time.sleep(0.002)
        process.send(signal.SIGKILL, "all processes")
        process.wait()

    def close(self) -> None:
        """End the process that is forked."""
        self._forks.close()

    def kill(self, number: int) -> None:
        """Kill a run, and its continuations, at random moments."""
        rng, run = random.Random(f"{self.seed} kill {number}"), self._make_run(f"kill-{number}")
        ranks, cold, faults = rng.choice([1, 2]), rng.random() < 0.25, []
        outcome = SAME
        for _ in range(_STRIKES):
            process = self._start(run, ranks, cold=cold)
            victim = rng.choice(["all processes", "the command", "one rank"]) if ranks > 1 else "the command"
            if not process.lasts(rng.uniform(0, 1.05 * self._seconds[ranks, cold])):
                break
            process.send(signal.SIGKILL, victim)
            faults.append(f"SIGKILL, {_count(ranks)}: {victim}")
            try:
                process.wait()
            except TimeoutError as error:
                outcome = str(error)
                break
        if faults and outcome == SAME:
            outcome = self._continue(run, ranks)
        for fault in faults:
            self._add(fault, outcome, f"kill {number}")
        shutil.rmtree(run.parent)

    def signal(self, number: int) -> None:
        """Send a run a signal at a random moment, and continue it."""
        rng, run = random.Random(f"{self.seed} signal {number}"), self._make_run(f"signal-{number}")
        ranks, cold = rng.choice([1, 2]), rng.random() < 0.25
        sent, receiver = rng.choice(SIGNALS), rng.choice(["the command", "all processes"])
        process = self._start(run, ranks, cold=cold)
        if process.lasts(rng.uniform(0, 1.05 * self._seconds[ranks, cold])):
            after, complete = time.monotonic() - process.started, (run / STAGES[-1] / "stage.json").exists()
            process.send(sent, receiver)
            outcome = self._judge_end(process, run, complete=complete, early=after < _START)
            if outcome == SAME:
                outcome = self._continue(run, ranks)
            self._add(f"{sent.name}, {_count(ranks)}: {receiver}", outcome, f"signal {number}, after {after:.2f} s")
        shutil.rmtree(run.parent)

    def damage(self, number: int) -> None:
        """Damage a file of an interrupted run, and continue it."""
        rng, run = random.Random(f"{self.seed} damage {number}"), self._make_run(f"damage-{number}")
        shutil.copytree(self._interrupted, run)
        file = rng.choice(sorted(path for path in run.rglob("*") if path.is_file()))
        kind, name = rng.choice(sorted(DAMAGES)), file.relative_to(run).as_posix()
        file.write_bytes(DAMAGES[kind](file.read_bytes(), rng))
        if kind == "removed":
            file.unlink()
        verified, _ = self._run(["checkpoints", "verify", str(run)], run).wait()
        code, errors = self._start(run, 1).wait()
        if "Traceback" in errors or code not in (0, 2) or verified not in (0, 2, 3):
            outcome = f"exit code {code}, of verify {verified}: {errors[-300:]}"
        elif code:
            outcome = self._judge_refusal(run, file, errors)
        else:
            found, expected = _read_result(run), self._results[1]
            different = {key for key in expected if found.get(key) != expected[key]}
            if different - {name}:
                outcome = f"other {', '.join(sorted(different))}"
            elif verified:
                outcome = FOUND
            else:
                outcome = UNREAD if different or _RECORD.search(name) else SAME
        self._add(f"file {kind}", outcome, f"damage {number}: {name}")
        shutil.rmtree(run.parent)

    def _judge_end(self, process: Process, run: Path, *, complete: bool, early: bool) -> str:
        """Return how a run has ended after a signal."""
        try:
            code, errors = process.wait()
        except TimeoutError as error:
            return str(error)
        if code == 130 and "Traceback" not in errors:
            return SAME
        if code == 0:
            return COMPLETE if complete else "the signal is swallowed"
        return EARLY if early and not run.exists() else f"exit code {code}: {errors[-300:]}"

    def _judge_refusal(self, run: Path, file: Path, errors: str) -> str:
        if file.name not in errors and file.parent.name not in errors:
            return f"refused without its name: {errors[-300:]}"
        if offered := re.search(r"--resume=step-\d+", errors):
            code, errors = self._run(["--output", str(run), offered[0]], run).wait()
            return (
                OFFERED if code == 0 and _read_result(run) == self._results[1] else f"not as offered: {errors[-300:]}"
            )
        return NAMED

    def _continue(self, run: Path, ranks: int) -> str:
        """Continue a run to its end, and compare its result."""
        try:
            code, errors = self._start(run, ranks).wait()
        except TimeoutError as error:
            return f"hangs when it is continued: {error}"
        if code:
            return f"cannot be continued: exit code {code}: {errors[-300:]}"
        if remains := [path.name for path in run.parent.rglob("*") if path.suffix in (".partial", ".replaced")]:
            return f"leaves {', '.join(remains)}"
        found, expected = _read_result(run), self._results[ranks]
        different = [key for key in expected if found.get(key) != expected[key]]
        return f"other {', '.join(different)}" if different else SAME

    def _make_run(self, name: str) -> Path:
        """Return where a run goes, in a new folder that is its working directory."""
        (self.folder / name).mkdir()
        return self.folder / name / "run"

    def _start(self, run: Path, ranks: int, *, cold: bool = False) -> Process:
        wanted = ["--resume"] if (run / "run.json").exists() else ["--config", str(self._recipe)]
        options = ["--ranks", str(ranks)] if ranks > 1 else []
        return self._run(["--output", str(run), *options, *wanted], run, cold=cold)

    def _run(self, arguments: list[str], run: Path, *, cold: bool = False) -> Process:
        with self._lock:
            return Process(self._forks, arguments, run.parent, cold=cold)

    def _add(self, fault: str, outcome: str, case: str) -> None:
        allowed = outcome in ALLOWED
        self.counts.setdefault(fault, Counter())[outcome if allowed else LOST] += 1
        if not allowed:
            self.lost = True
            print(f"LOST: {fault}: {outcome} (--seed {self.seed}, {case})", flush=True)


def _flip(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content)) if content else 0
    return (
        content[:place]
        + bytes(byte ^ 1 << rng.randrange(8) for byte in content[place : place + 1])
        + content[place + 1 :]
    )


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "with a flipped bit": _flip,
    "with a half of zeros": lambda content, rng: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
    "cut": lambda content, rng: content[: rng.randrange(len(content) or 1)],
    "emptied": lambda content, rng: b"",
    "with bytes appended": lambda content, rng: content + rng.randbytes(rng.randrange(1, 100)),
    "removed": lambda content, rng: content,
}


def _environment() -> dict[str, str]:
    return user_environment() | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _count(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"


def _list_processes(folder: Path) -> list[int]:
    """Return the processes whose working directory is `folder`, except for those that have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(path / "cwd") == str(folder):
                found.append(int(path.name))
    return found


def _read_stat(pid: int) -> tuple[str, str]:
    """Return the state of a process and the time of its start; empty texts if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _is_alive(pid: int, start: str) -> bool:
    state, started = _read_stat(pid)
    with suppress(OSError):
        return started == start != "" and (state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1)
    return False


def _describe(pid: int) -> str:
    """Return the state of a process, the call of the kernel that it waits in, and its command line."""
    texts = [_read_stat(pid)[0]]
    for name in ("wchan", "cmdline"):
        with suppress(OSError):
            texts.append(Path(f"/proc/{pid}/{name}").read_text(errors="replace").replace("\0", " ")[:200])
    return " ".join(texts)


def _read_result(run: Path) -> dict[str, Any]:
    """Return what must not depend on a fault, by file: digests of weights, and records without their times."""
    result: dict[str, Any] = {}
    for stage in STAGES:
        for path in sorted((run / stage).glob("*/*.safetensors")):
            result[path.relative_to(run).as_posix()] = hash_file(path)
        path = run / stage / "metrics.jsonl"
        if path.exists():
            result[f"{stage}/metrics.jsonl"] = list(map(_drop_times, _read_lines(path)))
        path = run / stage / "heldout.jsonl"
        if path.exists():  # a resumed stage appends evaluations that replace earlier ones
            result[f"{stage}/heldout.jsonl"] = read_heldout(path, sys.maxsize)
        path = run / stage / "stage.json"
        with suppress(ValueError):
            summary = json.loads(path.read_text(errors="replace"))
            result[f"{stage}/stage.json"] = {key: summary.get(key) for key in ("before", "after", "kept", "samples")}
    return result


def _read_lines(path: Path) -> list[Any]:
    """Return the records of a file; of one that is damaged, its lines."""
    lines = path.read_text(errors="replace").splitlines()
    try:
        return [json.loads(line) for line in lines]
    except ValueError:
        return lines


def _drop_times(record: Any) -> Any:
    if not isinstance(record, dict):
        return record
    return {key: value for key, value in record.items() if not _NOT_COMPARED.search(key)}


def _write_recipe(folder: Path) -> Path:
    """Write a model, rows and a recipe of a few steps in each stage, with a checkpoint after each."""
    tokenizer, rng = build_tokenizer(), random.Random(1)
    llama(len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")

    def draw(start: str, number: int) -> str:
        return " ".join([start, *rng.choices(WORDS, k=rng.randint(1, 8)), str(number)])

    keys = ("prompt", "response", "chosen", "rejected")
    rows = [{key: draw(key[0], number) for key in keys} for number in range(200)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = {
        "batch_size": 4,
        "eval_rows": 8,
        "eval_every": 2,
        "checkpoint_every": 1,
        "optimizer": {"learning_rate": 1e-3},
    }
    recipe = {
        "precision": "fp32",
        "model": {"path": str(folder / "model")},
        "engine": {"zero_stage": 1},
        "data": {
            "datasets": [{"path": str(folder / "rows.jsonl")}],
            "max_prompt_length": 24,
            "max_completion_length": 16,
            "heldout_fraction": 0.2,
        },
        "sft": stage | {"max_steps": 5, "keep": "best(perplexity)"},
        "reward": stage | {"max_steps": 5},
        "ppo": stage | {"minibatch_size": 4, "steps": 5, "keep": "best(reward)", "ema": 0.9},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


def format_table(counts: dict[str, dict[str, int]]) -> str:
    """Return the table of docs/reliability.md: a row for each fault, a column for each outcome that occurred."""
    outcomes = [outcome for outcome in ALLOWED if any(outcome in row for row in counts.values())] + [LOST]
    head = ["fault", "tries", *outcomes]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for fault in sorted(counts):
        row = counts[fault]
        cells = [fault, f"{sum(row.values()):,}", *(f"{row.get(outcome, 0):,}" for outcome in outcomes)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def read_counts() -> dict[str, dict[str, int]]:
    """Return the kept outcomes by fault."""
    counts: dict[str, dict[str, int]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return counts


def main() -> int:
    """Strike as often as the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="runs to kill, up to three times each")
    parser.add_argument("--signals", type=int, default=0, metavar="N", help="runs to send a signal")
    parser.add_argument("--damages", type=int, default=0, metavar="N", help="runs to damage a file of")
    parser.add_argument("--seed", type=int, default=0, help="other seeds strike at other moments; default: 0")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first run; default: 0")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; default: 1")
    parser.add_argument("--seconds", type=float, default=math.inf, help="strike no run after so many seconds")
    parser.add_argument("--keep", action="store_true", help="add the counts to those of docs/reliability.md")
    parser.add_argument("--table", action="store_true", help="print the table of the kept counts, and end")
    options = parser.parse_args()
    if options.table:
        print(format_table(read_counts()))
        return 0
    for number in (signal.SIGHUP, signal.SIGINT):  # runs would ignore it too: under nohup, in a script's background
        signal.signal(number, signal.SIG_DFL)
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="rlhf-chaos-") as folder, ThreadPoolExecutor(options.jobs) as threads:
        chaos = Chaos(Path(folder).resolve(), options.seed)
        for strike, count in (
            (chaos.kill, options.kills),
            (chaos.signal, options.signals),
            (chaos.damage, options.damages),
        ):

            def strike_in_time(number: int, strike: Callable[[int], None] = strike) -> None:
                if time.monotonic() < end:
                    strike(number)
                    tries = sum(map(Counter.total, chaos.counts.values()))
                    print(f"\r{strike.__name__} {number}: {tries} tries", end="", file=sys.stderr, flush=True)

            list(threads.map(strike_in_time, range(options.first, options.first + count)))
        chaos.close()
    print(file=sys.stderr)
    print(format_table({fault: dict(row) for fault, row in chaos.counts.items()}))
    if options.keep:
        kept = Counter({(fault, outcome): n for fault, row in read_counts().items() for outcome, n in row.items()})
        kept.update({(fault, outcome): n for fault, row in chaos.counts.items() for outcome, n in row.items()})
        total: dict[str, dict[str, int]] = {}
        for (fault, outcome), count in sorted(kept.items()):
            total.setdefault(fault, {})[outcome] = count
        RESULTS.parent.mkdir(exist_ok=True)
        atomic_write_json(RESULTS, total)
        before, _, rest = PAGE.read_text().partition(_TABLE)
        after = rest.partition(_TABLE_END)[2]
        atomic_write(PAGE, f"{before}{_TABLE}\n\n{format_table(total)}\n\n{_TABLE_END}{after}")
    return 1 if chaos.lost else 0


if __name__ == "__main__":
    sys.exit(main())
