"""Run the checks of levels, stop at the first failure, and write the certificate, its page and the bundle."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import accelerators
from accelerators import AcceleratorError, describe_error
from rlhf.certify.bundle import Redactor, write_bundle
from rlhf.certify.checks import Check, Subject
from rlhf.certify.environment import find_commit, record_machine
from rlhf.certify.exceptions import KnownFailure, judge, read_exceptions
from rlhf.certify.levels import LEVELS, Level, select_levels
from rlhf.certify.page import render_certificate
from rlhf.certify.processes import CheckFailed, Processes
from rlhf.errors import ConfigError, RunError
from rlhf.utils.atomic_io import atomic_write
from rlhf.version import __version__

Size = Literal["toy", "full"]

FORMAT = 1
"""Version of the certificate's form."""

TOY_SECONDS = 1200.0
"""Time limit of each process at toy size: one that hangs in a driver must not keep the report from being written."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check of a level; `reason` is empty if it passed.

    It is `excepted` if it failed as the backend has declared.
    """

    level: str
    check: str
    expected: str
    result: str
    reason: str
    seconds: float
    facts: dict[str, Any]


def certify(
    name: str,
    *,
    level: str | None = None,
    up_to: str | None = None,
    size: Size = "full",
    only: Sequence[str] = (),
    output: Path | None = None,
    report_progress: Callable[[str], None] = lambda line: None,
) -> tuple[dict[str, Any], Path]:
    """Run the checks of levels in order until one fails, and return the certificate and the folder that has it.

    The folder gets `certificate.json`, `certificate.html` and `bundle.zip`, after an interruption too.

    Args:
        name: the backend; auto: the one that a run would use.
        level: one level or `all`; None: the first one, unless `up_to` is given.
        up_to: the last level; those before it are included.
        size: `full` for a device, `toy` for a test on a CPU.
        only: names of checks; empty: all.
        output: the folder; None: one in the working directory, named by backend and time.
        report_progress: called with lines about what is done.

    Raises:
        AcceleratorError: the backend cannot be selected.
        ConfigError: a name of a level or a check is not known, or the folder cannot be made.
        RunError: the files cannot be written.
    """
    levels = select_levels(level, up_to, only)
    selection = accelerators.select(name, environ={})
    now = datetime.now(timezone.utc)
    folder = _make_folder(output or Path(f"rlhf-certify-{selection.name}-{now:%Y%m%d-%H%M%S}"))
    (probed,) = (report.probe for report in accelerators.available() if report.name == selection.name)
    with tempfile.TemporaryDirectory(prefix="rlhf-certify-") as temporary:
        logs = Path(temporary, "logs")
        logs.mkdir()
        processes = Processes(Path(temporary), logs / "environment.log", TOY_SECONDS)
        subject = Subject(selection.name, max(1, probed.count if probed else 1), size == "full", processes)
        environment: dict[str, Any] = {}
        exceptions: list[KnownFailure] = []
        results: list[CheckResult] = []
        count = sum(len(each.checks) for each in levels)
        try:
            names = ", ".join(each.name for each in levels)
            report_progress(f"{selection.name}: {names}, {size} size; recording the environment")
            environment |= record_machine() | _record_backend(processes, selection.name)
            if isinstance(environment["backend"], dict):  # otherwise the first check will fail, too
                exceptions += _list_exceptions(processes, selection.name)
            for each in levels:
                _run_level(each, subject, exceptions, results, count, report_progress)
                if results[-1].result == "failed":
                    break
        finally:  # after an interruption too
            done = [(result.level, result.check) for result in results]
            certificate = _name_not_finite(
                {
                    "format": FORMAT,
                    "accelerator": selection.name,
                    "provider": selection.provider,
                    "model": probed.model if probed else "",
                    "rlhf": __version__,
                    "commit": find_commit(),
                    "command": shlex.join(["rlhf", *sys.argv[1:]]),
                    "size": size,
                    "date": now.isoformat(timespec="seconds"),
                    "passed": len(results) == count and all(result.result != "failed" for result in results),
                    "exceptions": [vars(exception) for exception in exceptions],
                    "levels": [_summarize_level(each, results, subject) for each in levels],
                    "checks": [vars(result) for result in results],
                    "not run": [
                        check.name for each in LEVELS for check in each.checks if (each.name, check.name) not in done
                    ],
                }
            )
            _write(folder, certificate, environment, logs)
            if len(results) < count and all(result.result != "failed" for result in results):
                report_progress(f"stopped; certificate of the checks so far: {folder}")
    return certificate, folder


def _name_not_finite(value: Any) -> Any:
    """Return a value for JSON, which has no infinity and no NaN, with their names."""
    if isinstance(value, Mapping):
        return {key: _name_not_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_name_not_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _make_folder(folder: Path) -> Path:
    """Make the folder of a certificate, or take one that exists.

    Raises:
        ConfigError: it cannot be made or written.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder}: it is a file; name a folder")
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"--output {folder}: the folder {folder.parent} does not exist; create it, or name another")
    if not os.access(folder if folder.exists() else parent, os.W_OK):
        raise ConfigError(f"--output {folder}: it cannot be written; name a folder in another place")
    folder.mkdir(exist_ok=True)
    return folder


def _run_level(
    level: Level,
    subject: Subject,
    exceptions: Sequence[KnownFailure],
    results: list[CheckResult],
    count: int,
    report_progress: Callable[[str], None],
) -> None:
    """Add the results of a level's checks, until one fails."""
    processes, seconds = subject.processes, level.seconds(subject.name, full=subject.full)
    processes.deadline = None if seconds is None else time.monotonic() + seconds
    report_progress(
        f"{level.name}: {level.promise}{'' if seconds is None else f'; at most {seconds / 60:.0f} minutes'}"
    )
    for check in level.checks:
        number = len(results) + 1
        if earlier := next((result for result in results if result.check == check.name), None):
            results.append(replace(earlier, level=level.name, seconds=0.0, facts={"found in": earlier.level}))
            report_progress(f"{number:2}/{count} {check.name}: {earlier.result} in {earlier.level}")
            continue
        report_progress(f"{number:2}/{count} {check.name}\n      expected: {check.expected}")
        processes.log = processes.log.with_name(f"{number:02}-{check.name}.log")
        processes.seconds = check.seconds if subject.full else TOY_SECONDS
        results.append(_run_check(level, check, subject, exceptions))
        report_progress(f"      {_describe(results[-1])}")
        if note := results[-1].facts.get("note"):  # what the check left out
            report_progress(f"      {note}")
        if results[-1].result == "failed":
            return


def _summarize_level(level: Level, results: Sequence[CheckResult], subject: Subject) -> dict[str, Any]:
    """Return the entry of a level: its result, and its time of the time that it had."""
    done = [result for result in results if result.level == level.name]
    failed = any(result.result == "failed" for result in done)
    return {
        "level": level.name,
        "promise": level.promise,
        "result": "failed" if failed else "passed" if len(done) == len(level.checks) else "not run",
        "seconds": round(sum(result.seconds for result in done), 1),
        "limit": level.seconds(subject.name, full=subject.full),
    }


def _write(folder: Path, report: dict[str, Any], environment: dict[str, Any], logs: Path) -> None:
    """Write the certificate, its page and the bundle."""
    certificate = Redactor(os.environ).clean_values(report | {"environment": environment})
    try:
        atomic_write(folder / "certificate.json", json.dumps(certificate, indent=1) + "\n")
        atomic_write(folder / "certificate.html", render_certificate(certificate))
        write_bundle(folder / "bundle.zip", report, environment, logs)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror}); choose another --output") from error


def _describe(result: CheckResult) -> str:
    return f"{result.result} in {result.seconds:.0f} s{result.reason and f': {result.reason}'}"


def _record_backend(processes: Processes, name: str) -> dict[str, Any]:
    try:
        return {"backend": processes.task("record_environment", name)}
    except CheckFailed as error:
        return {"backend": f"({error})"}


def _list_exceptions(processes: Processes, name: str) -> list[KnownFailure]:
    try:
        declared = processes.task("list_exceptions", name)["exceptions"]
    except CheckFailed as error:
        raise AcceleratorError(f"{name}: exceptions() failed: {error}") from error
    return read_exceptions(declared, [check.name for level in LEVELS for check in level.checks])


def _run_check(level: Level, check: Check, subject: Subject, exceptions: Sequence[KnownFailure]) -> CheckResult:
    start, facts, reason = time.monotonic(), dict[str, Any](), ""
    try:
        check.run(subject, facts)
    except CheckFailed as error:
        facts |= error.facts
        reason = str(error)
    except Exception as error:  # such as a full disk: what is known so far must reach the bundle
        subject.processes.write_log(traceback.format_exc())
        reason = f"the check itself failed: {describe_error(error)}"
    seconds = round(time.monotonic() - start, 1)
    result, reason = judge(exceptions, check.name, reason, facts, datetime.now(timezone.utc).date())
    return CheckResult(level.name, check.name, check.expected, result, reason, seconds, facts)
