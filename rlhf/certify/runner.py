"""Run the checks, stop at the first failure, and write the bundle."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import accelerators
from accelerators import describe_error
from rlhf.certify.bundle import write_bundle
from rlhf.certify.checks import CHECKS, Check, Subject
from rlhf.certify.environment import record_machine
from rlhf.certify.processes import CheckFailed, Processes
from rlhf.errors import ConfigError, RunError
from rlhf.version import __version__

Size = Literal["toy", "full"]

TOY_SECONDS = 1200.0
"""Time limit of each process at toy size: one that hangs in a driver must not keep the report from being written."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check; `reason` is empty if it passed."""

    check: str
    expected: str
    result: Literal["passed", "failed"]
    reason: str
    seconds: float
    facts: dict[str, Any]


def select_checks(only: Sequence[str]) -> list[Check]:
    """Return the named checks in their order; all, if none is named.

    Raises:
        ConfigError: a name is not known.
    """
    known = [check.name for check in CHECKS]
    if unknown := [name for name in only if name not in known]:
        raise ConfigError(f"--only {unknown[0]}: no such check; use one of {', '.join(known)}")
    return [check for check in CHECKS if not only or check.name in only]


def certify(
    name: str,
    *,
    level: str = "first-contact",
    size: Size = "full",
    only: Sequence[str] = (),
    output: Path | None = None,
    report_progress: Callable[[str], None] = lambda line: None,
) -> tuple[dict[str, Any], Path]:
    """Run the checks in order until one fails, and return the report and the path of the bundle.

    Args:
        name: the backend; auto: the one that a run would use.
        level: the name of the checks, for the report.
        size: `full` for a device, `toy` for a test on a CPU.
        only: names of checks; empty: all.
        output: path of the bundle; None: a file in the working directory, named by backend and time.
        report_progress: called with lines about what is done.

    Raises:
        AcceleratorError: the backend cannot be selected.
        ConfigError: a name of a check is not known, or the bundle has no folder.
        RunError: the bundle cannot be written.
    """
    checks = select_checks(only)
    selection = accelerators.select(name, environ={})
    now = datetime.now(timezone.utc)
    path = output or Path(f"rlhf-certify-{selection.name}-{now:%Y%m%d-%H%M%S}.zip")
    if path.is_dir():
        raise ConfigError(f"--output {path}: it is a folder; name a file")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"--output {path}: the folder {path.parent} does not exist; create it, or name another file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"--output {path}: it cannot be written; name a file in another folder")
    (probed,) = (report.probe for report in accelerators.available() if report.name == selection.name)
    with tempfile.TemporaryDirectory(prefix="rlhf-certify-") as temporary:
        logs = Path(temporary, "logs")
        logs.mkdir()
        processes = Processes(Path(temporary), logs / "environment.log", TOY_SECONDS)
        subject = Subject(selection.name, max(1, probed.count if probed else 1), size == "full", processes)
        environment: dict[str, Any] = {}
        results: list[CheckResult] = []
        try:
            report_progress(f"{selection.name}: {level}, {size} size; recording the environment")
            environment |= record_machine() | _record_backend(processes, selection.name)
            for number, check in enumerate(checks, start=1):
                report_progress(f"{number:2}/{len(checks)} {check.name}\n      expected: {check.expected}")
                processes.log = logs / f"{number:02}-{check.name}.log"
                processes.seconds = check.seconds if size == "full" else TOY_SECONDS
                results.append(_run_check(check, subject))
                report_progress(f"      {_describe(results[-1])}")
                if results[-1].result == "failed":
                    break
        finally:  # after an interruption too
            report = {
                "accelerator": selection.name,
                "provider": selection.provider,
                "model": probed.model if probed else "",
                "rlhf": __version__,
                "level": level,
                "size": size,
                "date": now.isoformat(timespec="seconds"),
                "passed": [result.result for result in results] == ["passed"] * len(checks),
                "checks": [vars(result) for result in results],
                "not run": [check.name for check in CHECKS if check.name not in [result.check for result in results]],
            }
            _write(path, report, environment, logs)
            if len(results) < len(checks) and all(result.result == "passed" for result in results):
                report_progress(f"stopped; bundle of the checks so far: {path}")
    return report, path


def _write(path: Path, report: dict[str, Any], environment: dict[str, Any], logs: Path) -> None:
    try:
        write_bundle(path, report, environment, logs)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); choose another --output") from error


def _describe(result: CheckResult) -> str:
    return f"{result.result} in {result.seconds:.0f} s{result.reason and f': {result.reason}'}"


def _record_backend(processes: Processes, name: str) -> dict[str, Any]:
    try:
        return {"backend": processes.task("record_environment", name)}
    except CheckFailed as error:  # the first check will fail, too
        return {"backend": f"({error})"}


def _run_check(check: Check, subject: Subject) -> CheckResult:
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
    return CheckResult(check.name, check.expected, "failed" if reason else "passed", reason, seconds, facts)
