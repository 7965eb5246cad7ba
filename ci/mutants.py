"""Planted faults: does a test notice when training goes wrong?

Each fault of ci/mutants/*.yaml is put into a copy of this repository, alone, and the tests that should notice run
there. A fault that none notices is a hole in the tests.

    python ci/mutants.py                      all of them; the table goes to ci/mutants/RESULTS.md
    python ci/mutants.py --list               one line each
    python ci/mutants.py advantage whiten     those whose names contain one of these words

A stage's author adds the faults that its tests must notice: a name, the file, the line as it is (`old`, found exactly
once) and as it must not be (`new`), and the tests to run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "ci" / "mutants"
RESULTS = FAULTS / "RESULTS.md"
_SECONDS = 600  # a fault may make a test hang; that is noticed too


@dataclass(frozen=True)
class Fault:
    """One change that no test suite should let pass."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Plant it in the repository at `root`.

        Raises:
            ValueError: `old` is not there exactly once.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.file} holds its `old` {count} times; it must be there once")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Verdict:
    """Which test noticed a fault; None: none did."""

    fault: Fault
    test: str | None
    seconds: float
    output: str


def faults() -> list[Fault]:
    """Every fault, in the order of the files."""
    found = []
    for path in sorted(FAULTS.glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
            tests = entry.pop("tests")
            found.append(Fault(**entry, tests=tuple(tests.split())))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of names")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="faults tried at a time")
    options = parser.parse_args(arguments)
    chosen = [fault for fault in faults() if not options.words or any(word in fault.name for word in options.words)]
    if options.list:
        print("\n".join(f"{fault.name}  ({fault.file})" for fault in chosen))
        return 0
    if not chosen:
        parser.error(f"no fault's name contains {' or '.join(options.words)}; see --list")
    begun, verdicts = time.monotonic(), {}
    # A test that fails without any fault would catch them all.
    for verdict in _tried([Fault("none", "", "", "", tests) for tests in {f.tests for f in chosen}], options.workers):
        if verdict.test:
            print(f"{verdict.test} fails without a planted fault:\n{verdict.output[-3000:]}")
            return 2
    for verdict in _tried(chosen, options.workers):
        verdicts[verdict.fault] = verdict
        caught = f"caught by {verdict.test}" if verdict.test else "NOT CAUGHT"
        print(f"[{len(verdicts)}/{len(chosen)}] {verdict.fault.name}: {caught} ({verdict.seconds:.0f} s)", flush=True)
        if not verdict.test:
            print(verdict.output[-2000:])
    missed = [fault.name for fault in chosen if not verdicts[fault].test]
    if not options.words:
        RESULTS.write_text(_table([verdicts[fault] for fault in chosen]), encoding="utf-8")
    seconds = time.monotonic() - begun
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults are caught, in {seconds / 60:.0f} minutes")
    return 1 if missed else 0


def _tried(chosen: Sequence[Fault], workers: int) -> Iterator[Verdict]:
    waiting: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    verdicts: queue.SimpleQueue[Verdict | BaseException] = queue.SimpleQueue()
    for fault in chosen:
        waiting.put(fault)

    def work() -> None:
        with tempfile.TemporaryDirectory(prefix="rlhf-mutants-") as folder:
            root = Path(folder) / "rlhf"
            _copy(root)
            while True:
                try:
                    verdicts.put(_try(waiting.get_nowait(), root))
                except queue.Empty:
                    return
                except BaseException as error:
                    verdicts.put(error)
                    return

    for _ in range(min(workers, len(chosen))):
        threading.Thread(target=work, daemon=True).start()
    for _ in chosen:
        verdict = verdicts.get()
        if isinstance(verdict, BaseException):
            raise verdict
        yield verdict


def _try(fault: Fault, root: Path) -> Verdict:
    """Plant the fault in the copy, run its tests there, take it out again."""
    if fault.file:
        fault.apply(root)
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "PYTHONDONTWRITEBYTECODE": "1",  # a .pyc of the same second and size would hide the change
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    pytest = [sys.executable, "-m", "pytest", "-m", "", "-p", "no:cacheprovider"]  # slow tests too
    command = [*pytest, "-x", "-q", "--tb=line", *fault.tests]
    begun = time.monotonic()
    try:
        code, output = _run(command, root, environment)
    finally:
        if fault.file:
            shutil.copy2(ROOT / fault.file, root / fault.file)
    test = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    if code is None:
        caught = f"{fault.tests[0]} (no end within {_SECONDS} s)"
    elif code == 1 and test:
        caught = test.group(1)
    elif code == 0:
        caught = None
    else:  # not a fault of a test: the tests could not even be collected
        raise RuntimeError(f"{fault.name}: pytest could not run (exit code {code}):\n{output[-3000:]}")
    return Verdict(fault, caught, time.monotonic() - begun, output)


def _run(command: list[str], root: Path, environment: dict[str, str]) -> tuple[int | None, str]:
    """(exit code, None after `_SECONDS`; output) of a command and all processes that it starts."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code: int | None = process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):  # what a fault let outlive its tests
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        return code, output.read()


def _copy(root: Path) -> None:
    """The files of this repository that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)


def _table(verdicts: Sequence[Verdict]) -> str:
    rows = [f"| {v.fault.name} | `{v.fault.file}` | {f'`{v.test}`' if v.test else '**none**'} |" for v in verdicts]
    caught = sum(v.test is not None for v in verdicts)
    head = [
        "# Planted faults",
        "",
        f"`python ci/mutants.py` plants these faults one at a time: {caught} of {len(verdicts)} are caught, each by a "
        "test that `bash ci/test.sh` runs.",
        "",
        "| fault | planted in | caught by |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


if __name__ == "__main__":
    sys.exit(main())
