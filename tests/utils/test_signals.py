"""Signals that ask a run to end: which of them ends it at once, and when they raise."""

import importlib
import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from rlhf.utils.signals import collect_signals, continue_after_ctrl_c, interrupt_on_signals, raise_if_interrupted

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
def test_only_a_second_request_to_end_ends_at_once(
    request: pytest.FixtureRequest, numbers: list[int], at_once: bool
) -> None:
    for number in set(numbers):  # nohup ignores one of them
        request.addfinalizer(partial(signal.signal, number, signal.signal(number, signal.SIG_DFL)))
    interrupted = False
    with collect_signals() as received:
        try:
            for number in numbers:
                os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            interrupted = True
    assert received == numbers
    assert interrupted == at_once


@pytest.mark.parametrize(("count", "imported"), [(1, True), (2, False)])
def test_first_signal_during_an_import_is_raised_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, imported: bool
) -> None:
    names = f"signalled_{count}_outer", f"signalled_{count}_inner"
    (tmp_path / f"{names[0]}.py").write_text(f"import {names[1]}\nopen('{tmp_path}/imported', 'w').close()")
    (tmp_path / f"{names[1]}.py").write_text(f"import os\nfor _ in range({count}): os.kill(os.getpid(), 15)")
    monkeypatch.syspath_prepend(str(tmp_path))
    continued = False
    with suppress(KeyboardInterrupt), interrupt_on_signals():
        importlib.import_module(names[0])
        continued = True
    assert (tmp_path / "imported").exists() == imported
    assert not continued


def test_work_that_an_import_does_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may train when it is imported."""
    (tmp_path / "training_module.py").write_text(
        "import os\nfrom rlhf.utils.signals import interrupt_on_signals\n"
        f"with interrupt_on_signals():\n    os.kill(os.getpid(), 15)\n    open('{tmp_path}/continued', 'w').close()"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module("training_module")
    assert not (tmp_path / "continued").exists()


def test_swallowed_signal_is_remembered_until_the_outermost_block_ends() -> None:
    with interrupt_on_signals():
        with interrupt_on_signals(), suppress(KeyboardInterrupt):
            os.kill(os.getpid(), END)
        with pytest.raises(KeyboardInterrupt):
            raise_if_interrupted()
    raise_if_interrupted()


@pytest.mark.parametrize(("number", "continues"), [(signal.SIGINT, True), (END, False)])
def test_ctrl_c_alone_is_forgotten(number: int, continues: bool) -> None:
    """It stops an answer of `rlhf chat`; other signals end the command."""
    continued = False
    with suppress(KeyboardInterrupt), interrupt_on_signals():
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        continue_after_ctrl_c()
        raise_if_interrupted()
        continued = True
    assert continued == continues
