"""Signals that ask a run to end: which of them ends it at once."""

import os
import signal

import pytest

from rlhf.utils.signals import collect_signals

WARNING, CLOSED, END = signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM


@pytest.mark.parametrize(
    ("numbers", "at_once"),
    [
        ([END], False),
        ([END, END], True),
        ([signal.SIGINT, END], True),
        ([CLOSED, CLOSED], False),
        ([CLOSED, END], True),
        ([WARNING, WARNING], False),
        ([WARNING, END], False),
        ([END, WARNING], False),
        ([WARNING, END, END], True),
    ],
)
def test_only_a_second_request_to_end_ends_at_once(numbers: list[int], at_once: bool) -> None:
    interrupted = False
    with collect_signals() as received:
        try:
            for number in numbers:
                os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            interrupted = True
    assert received == numbers
    assert interrupted == at_once
