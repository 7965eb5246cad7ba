"""Run a fuzz target in a forked process that may write to one folder only, within bounds of time and memory."""

from __future__ import annotations

import faulthandler
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy

from accelerators.errors import causes, is_out_of_memory
from rlhf.launchers.exit_status import USER_ERROR, ExitStatus

SECONDS = 30
MEMORY = 4 * 2**30
"""Bytes of address space that a target may take in addition to those of the process that is forked."""
_BATCH = 2000  # inputs of one search: hypothesis remembers all of them
_WRITES = {"os.mkdir": 0, "os.remove": 0, "os.rmdir": 0, "os.truncate": 0, "os.chmod": 0, "os.link": 1, "os.symlink": 1}
"""The position of the written path in the arguments of audit events."""


class HangError(BaseException):
    """An input took too long; not an Exception, so that the target does not catch it."""


def run_bounded(
    inputs: SearchStrategy[Any], call: Callable[[Any], object], count: int, allowed: Collection[Path]
) -> Counter[str]:
    """Call `call` with `count` inputs in a fork, and return how many were accepted, and refused with a user's error.

    Args:
        call: works in the current folder, which is new and empty for each input.
        allowed: further folders to which it may write.

    Raises:
        AssertionError: an input ended in any other error, took too long, or wrote to another folder.
    """
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name).resolve()
        report = folder / "report"
        sys.stdout.flush()
        child = os.fork()
        if not child:
            _be_child(inputs, call, count, report, folder / "work", [str(path.resolve()) for path in allowed])
        _, status = os.waitpid(child, 0)
        text = report.read_text(encoding="utf-8", errors="replace")
        assert status == 0, f"{text[-8000:]}\nexit code {os.waitstatus_to_exitcode(status)}"
        tally: Counter[str] = Counter()
        tally["accepted"], tally["refused"] = map(int, text.rpartition("\n")[2].split())
        return tally


def _be_child(*arguments: Any) -> None:
    """Search in this process, which was forked, and end it; standard error goes to the report."""
    report: Path = arguments[3]
    with report.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stderr, sys.stdout = file, open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        code = 1
        try:
            tally = _search(*arguments)
            file.write(f"\n{tally['accepted']} {tally['refused']}")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            file.flush()
            os._exit(code)


def _search(
    inputs: SearchStrategy[Any],
    call: Callable[[Any], object],
    count: int,
    report: Path,
    folder: Path,
    allowed: list[str],
) -> Counter[str]:
    limit = MEMORY + int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    foreign: list[str] = []
    tempfile.tempdir = str(report.parent)
    sys.addaudithook(lambda event, values: _note_foreign_write(event, values, [str(report.parent), *allowed], foreign))

    def raise_hang(*_: object) -> None:
        raise HangError

    signal.signal(signal.SIGALRM, raise_hang)
    tally: Counter[str] = Counter()

    def examine(value: Any) -> None:
        os.chdir(report.parent)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        os.chdir(folder)
        foreign.clear()
        signal.alarm(SECONDS)
        faulthandler.dump_traceback_later(2 * SECONDS, exit=True)  # for code that keeps Python from running
        try:
            call(value)
            tally["accepted"] += 1
        except HangError:
            raise AssertionError(f"an input took more than {SECONDS} s") from None
        except BaseException as error:
            if any(map(is_out_of_memory, causes(error))):  # a user's error, but not for an input of a few kilobytes
                raise AssertionError(f"an input took more than {MEMORY / 2**30:g} GiB") from error
            if isinstance(error, KeyboardInterrupt) or ExitStatus.from_error(error).code != USER_ERROR:
                raise
            tally["refused"] += 1
        finally:
            signal.alarm(0)
            faulthandler.cancel_dump_traceback_later()
        assert not foreign, f"written outside of its folder: {foreign[0]}"

    for start in range(0, count, _BATCH):
        options = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
        search = settings(max_examples=min(_BATCH, count - start), print_blob=False, **options)(given(inputs)(examine))
        seed(start)(search)()  # the same inputs in each run
    return tally


def _note_foreign_write(event: str, values: tuple[Any, ...], allowed: list[str], foreign: list[str]) -> None:
    """Note the path of an event that writes, if it is not below one of the allowed folders."""
    paths: list[Any] = []
    if event == "open":
        mode, flags = values[1] or "", values[2] or 0
        if set(mode) & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            paths = [values[0]]
    elif event == "os.rename":
        paths = [*values[:2]]
    elif event in _WRITES:
        paths = [values[_WRITES[event]]]
    for path in paths:
        if isinstance(path, str | bytes | os.PathLike):
            place = os.path.realpath(os.fsdecode(path))
            if place != os.devnull and not any(place == top or place.startswith(f"{top}/") for top in allowed):
                foreign.append(f"{event} {place}")
