"""Failures that a backend declares as known, with a reason and an expiry; a stale one fails the certificate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from accelerators import AcceleratorError
from rlhf.version import __version__


@dataclass
class KnownFailure:
    """A declared exception in this certification.

    Attributes:
        state: `not tried`, `applied` if what it excepts has failed, or `stale` if it passed or the time is over.
    """

    check: str
    reason: str
    expires: str
    operator: str = ""
    state: str = field(default="not tried")

    def is_over(self, today: date) -> bool:
        """Return whether its time is over: its date has come, or this version of rlhf is the one it names or later."""
        if "-" in self.expires:
            return today >= date.fromisoformat(self.expires)
        return _numbers(__version__) >= _numbers(self.expires)

    def describe(self) -> str:
        """Return what it excepts, for messages."""
        return f"{self.operator or self.check} ({self.reason}; until {self.expires})"


def read_exceptions(declared: Iterable[Mapping[str, str]], checks: Sequence[str]) -> list[KnownFailure]:
    """Return declared exceptions.

    Raises:
        AcceleratorError: one names a check that does not exist.
    """
    known = [KnownFailure(**entry) for entry in declared]
    for exception in known:
        if exception.check not in checks:
            raise AcceleratorError(
                f"exceptions(): no check is named {exception.check!r}; use one of {', '.join(checks)}"
            )
    return known


def judge(
    exceptions: Sequence[KnownFailure], check: str, reason: str, facts: Mapping[str, Any], today: date
) -> tuple[str, str]:
    """Return the result of a check and its reason, in view of the exceptions about it.

    Args:
        exceptions: all declared exceptions; the states of those about the check are set.
        check: the check.
        reason: why it failed; empty if it passed.
        facts: what it found; `failures` has one entry for each `operator`.

    Returns:
        `passed`, `excepted` or `failed`.
    """
    about = [exception for exception in exceptions if exception.check == check]
    failures = {failure["operator"]: failure["failure"] for failure in facts.get("failures", ())}
    for exception in about:
        if exception.is_over(today):
            exception.state = "stale"
            return "failed", f"the exception for {exception.describe()} is over; repair it{reason and f': {reason}'}"
        if exception.operator in failures or (reason and not exception.operator):
            exception.state = "applied"
        elif failures or not reason:  # else the check has ended before it came to the operator
            exception.state = "stale"
    if stale := [exception for exception in about if exception.state == "stale"]:
        return "failed", f"the exception for {stale[0].describe()} is stale, because it passes; remove it"
    if not reason:
        return "passed", ""
    excepted = {exception.operator for exception in about}
    if "" in excepted or (failures and failures.keys() <= excepted):
        return "excepted", reason
    others = [line for operator, line in failures.items() if operator not in excepted]
    return "failed", f"{len(others)} operators without an exception: {others[0]}" if about and others else reason


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
