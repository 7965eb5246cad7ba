"""Plant faults one at a time and check that a test notices each of them.

The faults of ci/mutants/*.yaml guard numbers and promises. Each is planted alone in a copy of this repository, where
the tests that it names run. A fault that no test notices is a hole in the tests.

    python ci/mutants.py                      all of them; the table goes to ci/mutants/RESULTS.md
    python ci/mutants.py --check              only look whether each fault still has its place (seconds)
    python ci/mutants.py --list               one line each
    python ci/mutants.py advantage whiten     those whose names contain one of these words

ci/faults.py says what a fault consists of.

Exit codes: 0 all are noticed, 1 some are not, 2 some could not be tried (their place is gone, their tests cannot run or
fail without them).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ci.faults import FAULTS, Fault, read_faults  # noqa: E402

RESULTS = FAULTS / "RESULTS.md"
_ALL_SKIPPED = 71  # an exit code of no other meaning
_SECONDS = 300  # a fault may make a test hang, and that counts as noticed


@dataclass(frozen=True)
class Verdict:
    """The test that noticed a fault, None if none did; `problem` says why it could not be tried."""

    fault: Fault
    test: str | None = None
    seconds: float = 0.0
    output: str = ""
    problem: str | None = None


class Worker:
    """A copy of the repository, and a process that has imported torch and forks a child for each run of pytest."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "rlhf"
        _copy(self.root)
        environment = os.environ | {
            "PYTHONPATH": str(self.root),
            "PYTHONDONTWRITEBYTECODE": "1",  # a .pyc of the same second and size would hide the change
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            cwd=self.root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def try_fault(self, fault: Fault) -> Verdict:
        """Plant the fault in the copy, run its tests there, take it out again."""
        path = self.root / fault.file
        text = path.read_text(encoding="utf-8")
        path.write_text(fault.plant(text), encoding="utf-8")
        try:
            answer = self.run(["-x", *fault.tests])
        finally:
            path.write_text(text, encoding="utf-8")
        code, failed, output = answer["code"], answer["failed"], answer["output"]
        if code is None:
            failed = [f"{fault.tests[0]} (no end within {_SECONDS} s)"]
        elif code < 0:
            failed = [f"{fault.tests[0]} (ended by signal {-code})"]
        elif code == _ALL_SKIPPED:
            return Verdict(fault, problem=f"{fault.name}: all of its tests are skipped on this machine")
        elif code and not failed:  # the tests were not run
            return Verdict(fault, problem=f"{fault.name}: pytest ended with {code}: {output[-1000:]}")
        return Verdict(fault, failed[0] if failed else None, answer["seconds"], output)

    def run(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Run pytest; return its exit code (None: stopped), the tests that failed, its seconds and its output."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(list(arguments)), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve() -> None:
    """Run pytest in a child for each line of standard input, answer with a line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of imports is no answer
    sys.path[:2] = [os.getcwd()]  # the copy, in place of this repository and its ci
    os.environ["DS_ACCELERATOR"] = "cpu"  # for the import alone
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # takes a second
    import pytest  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    for name in ("ci.faults", "ci"):  # the copy's are the tests' too
        del sys.modules[name]
    assert not {"rlhf", "accelerators"} & sys.modules.keys()
    del os.environ["DS_ACCELERATOR"]
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what outlives a test becomes a child of this process
    gc.collect()
    gc.freeze()
    try:
        _answer(answers)
    finally:  # Ctrl-C and SIGTERM too
        _kill_children()


def _answer(answers: TextIO) -> None:
    """Run pytest for each line of standard input."""
    for line in sys.stdin:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            output, failed = Path(folder, "output"), Path(folder, "failed")
            failed.touch()
            pid = os.fork()
            if pid == 0:
                _run_pytest(json.loads(line), output, failed)
            code = _wait(pid, started + _SECONDS)
            _kill_children()
            answer = {
                "code": code,
                "failed": [json.loads(name) for name in failed.read_text().splitlines()],
                "seconds": time.monotonic() - started,
                "output": output.read_text(errors="replace")[-4000:] if output.exists() else "",
            }
        print(json.dumps(answer), file=answers)


def _run_pytest(arguments: list[str], output: Path, failed: Path) -> None:
    """Run pytest in this process and end it; the names of tests that fail go to the file `failed`."""
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with output.open("wb") as file, open(os.devnull) as nothing:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            os.dup2(nothing.fileno(), 0)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  # the server has read from its own
        import pytest

        class Failures:
            tests = skipped = 0
            folder = ""  # pytest's root, from here: a plugin's tests have another

            def pytest_configure(self, config: Any) -> None:
                self.folder = os.path.relpath(config.rootpath)

            def pytest_runtest_logreport(self, report: Any) -> None:
                self.tests += report.when == "setup"
                self.skipped += report.skipped
                self.pytest_collectreport(report)

            def pytest_collectreport(self, report: Any) -> None:
                if report.failed:
                    path, separator, name = report.nodeid.partition("::")
                    path = os.path.normpath(f"{self.folder}/{path}")
                    with failed.open("a") as file:
                        print(json.dumps(f"{path}{separator}{name}"), file=file)

        # Slow tests too: -m "" takes the marker's place in pyproject.toml.
        failures = Failures()
        code = int(pytest.main(["-m", "", "-p", "no:cacheprovider", "-q", "--tb=short", *arguments], [failures]))
        if code == 0 and failures.tests == failures.skipped:
            code = _ALL_SKIPPED
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wait(pid: int, deadline: float) -> int | None:
    """The exit code of a child, negative for a signal; None if it was killed at the deadline."""
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _kill_children() -> None:
    """End all processes that a run of pytest left behind; those of a killed parent come to this process."""
    children = Path("/proc/self/task", str(os.getpid()), "children")
    while children.exists():  # Linux
        pids = children.read_text().split()
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if not pids:
            return


def _copy(root: Path) -> None:
    """Copy the files of this repository that git knows or would add."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of names")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    parser.add_argument("--check", action="store_true", help="look for the places and the tests of the faults and stop")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="faults tried at a time")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that folders and processes are cleaned up
    if options.serve:
        serve()
        return 0
    chosen = [
        fault for fault in read_faults() if not options.words or any(word in fault.name for word in options.words)
    ]
    if not chosen:
        parser.error(f"no fault's name contains {' or '.join(options.words)}; see --list")
    if options.list:
        print("\n".join(f"{fault.name}  ({fault.place})" for fault in chosen))
        return 0
    problems = {fault: problem for fault in chosen if (problem := fault.find_problem())}
    print("\n".join(problems.values()), end="\n" if problems else "")
    if options.check:
        print(f"{len(chosen) - len(problems)} of {len(chosen)} faults have their place and their tests")
        return 2 if problems else 0
    if importlib.util.find_spec("pytest") is None:
        parser.error(f"pytest is missing in {sys.prefix}; install the tests' packages: pip install '.[test]'")
    started = time.monotonic()
    verdicts = [Verdict(fault, problem=problem) for fault, problem in problems.items()]
    with tempfile.TemporaryDirectory(prefix="rlhf-mutants-") as folder:
        workers = [Worker(Path(folder, str(number))) for number in range(min(options.workers, len(chosen)))]
        tried = [fault for fault in chosen if fault not in problems]
        for number, verdict in enumerate(_share(workers, [(Worker.try_fault, fault) for fault in tried]), 1):
            verdicts.append(verdict)
            result = verdict.problem or (f"caught by {verdict.test}" if verdict.test else "NOT CAUGHT")
            print(f"[{number}/{len(tried)}] {verdict.fault.name}: {result} ({verdict.seconds:.0f} s)", flush=True)
            if not verdict.test:
                print(verdict.output[-2000:])
        failing = _find_failing(workers, verdicts)
        for worker in workers:
            worker.close()
    minutes = (time.monotonic() - started) / 60
    verdicts.sort(key=lambda verdict: chosen.index(verdict.fault))
    if not options.words:
        RESULTS.write_text(_table(verdicts, minutes), encoding="utf-8")
    print("\n".join([*(f"could not be tried: {v.problem}" for v in verdicts if v.problem), *failing]))
    caught = sum(verdict.test is not None for verdict in verdicts)
    print(f"{caught} of {len(chosen)} faults are caught, in {minutes:.0f} minutes")
    return 2 if failing or any(v.problem for v in verdicts) else int(caught < len(chosen))


def _share(workers: Sequence[Worker], jobs: Sequence[tuple[Any, Any]]) -> Iterator[Any]:
    """The results of function(worker, argument) for each job, as they come."""
    waiting: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)

    def work(worker: Worker) -> None:
        try:
            while True:
                function, argument = waiting.get_nowait()
                results.put(function(worker, argument))
        except queue.Empty:
            pass
        except BaseException as error:
            results.put(error)

    for worker in workers:
        threading.Thread(target=work, args=(worker,), daemon=True).start()
    for _ in jobs:
        result = results.get()
        if isinstance(result, BaseException):
            raise result
        yield result


def _find_failing(workers: Sequence[Worker], verdicts: Sequence[Verdict]) -> list[str]:
    """Lines about tests that caught a fault and fail without any: they would catch everything."""
    files: dict[str, list[str]] = {}
    for test in sorted({v.test for v in verdicts if v.test and not v.test.endswith(")")}):
        files.setdefault(test.partition("::")[0], []).append(test)
    answers = _share(workers, [(Worker.run, tests) for tests in files.values()])
    return [
        f"fails without a planted fault: {', '.join(answer['failed'])}\n{answer['output'][-2000:]}"
        for answer in answers
        if answer["code"] != 0
    ]


def _table(verdicts: Sequence[Verdict], minutes: float) -> str:
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    caught = sum(verdict.test is not None for verdict in verdicts)
    rows = []
    for verdict in verdicts:
        fault, test = verdict.fault, f"`{verdict.test}`" if verdict.test else "**none**"
        place = f"`{fault.file}`" + (f" `{fault.symbol}`" if fault.symbol else "")
        result = "**could not be tried**" if verdict.problem else test
        rows.append(f"| {fault.name} | {place} | {result} |")
    head = [
        "# Planted faults",
        "",
        f"`python ci/mutants.py` planted these faults one at a time in commit {described.stdout.strip() or 'unknown'} "
        f"on {date.today()}: {caught} of {len(verdicts)} were caught, in {minutes:.0f} minutes.",
        "",
        "| fault | planted in | caught by |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


if __name__ == "__main__":
    sys.exit(main())
