"""Exceptions of a backend: they apply to what they name, and a stale one fails."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from accelerators import AcceleratorError, DeclaredException
from rlhf.certify import exceptions
from rlhf.certify.exceptions import judge, read_exceptions

TODAY = date(2026, 11, 28)
LATER = "2027-03-01"
MM = {"check": "operators", "reason": "ticket 4711", "expires": LATER, "operator": "aten.mm.default"}
FAILURES = {"aten.mm.default": "aten.mm.default in bfloat16: 1", "aten.exp.default": "aten.exp.default: nan"}


def decide(declared: list[dict[str, str]], reason: str = "", *operators: str) -> tuple[str, str, list[str]]:
    """Return the result, the reason and the exceptions' states of a check with these failures."""
    known = read_exceptions(declared, ["operators", "kill"])
    facts: dict[str, Any] = {"failures": [{"operator": name, "failure": FAILURES[name]} for name in operators]}
    return *judge(known, "operators", reason, facts, TODAY), [exception.state for exception in known]


def test_without_exceptions_a_check_passes_or_fails() -> None:
    assert decide([]) == ("passed", "", [])
    assert decide([], "1 of 2 operators", "aten.mm.default") == ("failed", "1 of 2 operators", [])


def test_exception_about_an_operator_applies_to_it_alone() -> None:
    assert decide([MM], "1 operator", "aten.mm.default") == ("excepted", "1 operator", ["applied"])
    result, reason, states = decide([MM], "2 operators", "aten.mm.default", "aten.exp.default")
    assert (result, reason) == ("failed", "1 operators without an exception: aten.exp.default: nan")
    assert states == ["applied"]


def test_exception_about_a_check_applies_to_whatever_it_finds() -> None:
    assert decide([MM | {"operator": ""}], "SIGSEGV") == ("excepted", "SIGSEGV", ["applied"])


def test_exception_of_an_operator_does_not_excuse_a_crash_and_is_not_stale_by_it() -> None:
    assert decide([MM], "SIGSEGV") == ("failed", "SIGSEGV", ["not tried"])


def test_stale_exception_fails_a_check_that_passes() -> None:
    stale = "the exception for aten.mm.default (ticket 4711; until 2027-03-01) is stale, because it passes; remove it"
    assert decide([MM]) == ("failed", stale, ["stale"])


@pytest.mark.parametrize(
    ("expires", "is_over"), [("2026-11-28", True), ("2026-11-29", False), ("0.3.0", True), ("0.3.1", False)]
)
def test_exception_is_over_on_its_date_or_with_its_version(
    monkeypatch: pytest.MonkeyPatch, expires: str, is_over: bool
) -> None:
    monkeypatch.setattr(exceptions, "__version__", "0.3.0")
    result, reason, states = decide([MM | {"expires": expires}], "1 operator", "aten.mm.default")
    assert result == ("failed" if is_over else "excepted")
    assert states == ["stale" if is_over else "applied"]
    assert not is_over or reason.endswith(f"until {expires}) is over; repair it: 1 operator")


def test_exceptions_about_other_checks_stay_untried() -> None:
    assert decide([MM | {"check": "kill", "operator": ""}]) == ("passed", "", ["not tried"])


def test_exception_about_an_unknown_check_is_refused() -> None:
    with pytest.raises(AcceleratorError, match="no check is named 'kil'; use one of operators, kill"):
        read_exceptions([MM | {"check": "kil"}], ["operators", "kill"])


@pytest.mark.parametrize(
    ("reason", "expires"),
    [("", LATER), ("ticket", "soon"), ("ticket", ""), ("ticket", "2027-13-01"), ("ticket", "20270301")],
)
def test_exception_needs_a_reason_and_an_expiry(reason: str, expires: str) -> None:
    with pytest.raises(ValueError, match=r"a refusal needs a reason|expires is "):
        DeclaredException("operators", reason, expires)
