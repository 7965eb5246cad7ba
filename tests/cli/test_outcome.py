"""Exit codes and the line that goes with each."""

import errno
from pathlib import Path

import pytest

from accelerators import AcceleratorError
from rlhf import launch
from rlhf.config import Config, load_config
from rlhf.errors import DataError
from rlhf.outcome import Defect, Interrupted, Outcome
from rlhf.run import RunDirectory


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (DataError("rows.jsonl: no usable row"), 2, "rlhf: error: rows.jsonl: no usable row"),
        (AcceleratorError("no such accelerator"), 2, "rlhf: error: no such accelerator"),
        (Interrupted("in runs/a, sft is complete"), 130, "rlhf: interrupted; in runs/a, sft is complete"),
        (KeyboardInterrupt(), 130, "rlhf: interrupted; nothing was started"),
        (
            OSError(errno.ENOSPC, "No space left on device", "a"),
            2,
            "rlhf: error: a: No space left on device; make room",
        ),
    ],
)
def test_each_error_has_its_code_and_line(error: BaseException, code: int, line: str) -> None:
    outcome = Outcome.of(error)
    assert outcome.code == code
    assert outcome.line.startswith(line)


def test_a_message_of_several_lines_becomes_one() -> None:
    assert Outcome.of(DataError("a\n  b")).line == "rlhf: error: a b"


def test_anything_else_is_a_defect_whose_traceback_is_kept(tmp_path: Path) -> None:
    outcome = Outcome.of(Defect.of(ZeroDivisionError("division by zero"), tmp_path))
    assert outcome.code == 1
    assert "defect of rlhf: ZeroDivisionError: division by zero" in outcome.line
    assert "ZeroDivisionError" in (tmp_path / "traceback.txt").read_text()


def run_that(monkeypatch: pytest.MonkeyPatch, folder: Path, error: BaseException) -> None:
    def fail(config: Config, selection: object, directory: RunDirectory, *rest: object) -> None:
        directory.begin(config)
        directory.stage("sft").finish({})
        raise error

    monkeypatch.setattr(launch, "_run", fail)
    monkeypatch.setattr(launch.signal, "signal", lambda number, handler: None)
    monkeypatch.setenv("RLHF_ACCELERATOR", "cpu")
    launch.run(load_config(None, [f"output='{folder / 'run'}'"]))


def test_an_interrupted_run_says_what_is_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="sft is complete; continue with --resume"):
        run_that(monkeypatch, tmp_path, KeyboardInterrupt())


def test_a_defect_leaves_its_traceback_in_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(Defect, match="KeyError"):
        run_that(monkeypatch, tmp_path, KeyError("x"))
    assert "KeyError" in (tmp_path / "run" / "traceback.txt").read_text()


def test_an_error_of_the_user_passes_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        run_that(monkeypatch, tmp_path, DataError("no rows"))
