"""The fuzz tests find what they look for: inputs that break a bound are planted here."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from rlhf.errors import DataError
from tests.fuzz import bounds


def refuse(value: Any) -> None:
    raise DataError("a test")


def take_memory(value: Any) -> None:
    try:
        bytearray(2 * bounds.MEMORY)
    except MemoryError as error:
        raise DataError("cannot be read") from error


def write_elsewhere(value: Any) -> None:
    Path(__file__).with_name("written").touch()


def test_accepted_and_refused_inputs_are_counted() -> None:
    assert bounds.run_bounded(st.none(), refuse, 1, [])["refused"] == 1
    assert bounds.run_bounded(st.none(), lambda value: None, 1, [])["accepted"] == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda value: {}["a"], "KeyError"),
        (lambda value: time.sleep(60), "took more than 1 s"),
        (lambda value: bytearray(2 * bounds.MEMORY), "took more than 4 GiB"),
        (take_memory, "took more than 4 GiB"),
        (write_elsewhere, "written outside of its folder"),
    ],
    ids=["traceback", "hang", "memory", "memory that is called a user's error", "write"],
)
def test_input_that_breaks_a_bound_is_found(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[Any], object], message: str
) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 1)
    try:
        with pytest.raises(AssertionError, match=message):
            bounds.run_bounded(st.none(), call, 1, [])
    finally:
        Path(__file__).with_name("written").unlink(missing_ok=True)
