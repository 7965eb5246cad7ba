"""Exit codes and the line that goes with each."""

import errno
import os
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from accelerators import AcceleratorError
from rlhf.config.schema import STAGES, Config, Stage, load_config
from rlhf.errors import DataError, OutOfMemory, RemoteRankError, RLHFError
from rlhf.launchers.exit_status import ExitStatus, InternalError, Interrupted, find_root_cause
from rlhf.runs.directory import RunDirectory
from rlhf.trainers import run as launch


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
    outcome = ExitStatus.from_error(error)
    assert outcome.code == code
    assert outcome.line.startswith(line)


def test_a_message_of_several_lines_becomes_one() -> None:
    assert ExitStatus.from_error(DataError("a\n  b")).line == "rlhf: error: a b"


def test_anything_else_is_a_defect_whose_traceback_is_kept(tmp_path: Path) -> None:
    outcome = ExitStatus.from_error(InternalError.from_error(ZeroDivisionError("division by zero"), tmp_path))
    assert outcome.code == 1
    assert "bug of rlhf: ZeroDivisionError: division by zero" in outcome.line
    assert "ZeroDivisionError" in (tmp_path / "traceback.txt").read_text()


def run_that(monkeypatch: pytest.MonkeyPatch, folder: Path, error: BaseException) -> None:
    def fail(config: Config, *_: object) -> None:
        directory = RunDirectory(config.output)
        with directory.open_for(config):
            directory.stage("sft").finish({})
            raise error

    monkeypatch.setattr(launch, "_open", fail)
    monkeypatch.setenv("RLHF_ACCELERATOR", "cpu")
    launch.run(load_config(None, [f"output='{folder / 'run'}'"]))


def test_an_interrupted_run_says_what_is_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match=r"sft is complete; to continue: rlhf --output .*run --resume"):
        run_that(monkeypatch, tmp_path, KeyboardInterrupt())


def test_a_defect_leaves_its_traceback_in_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="KeyError"):
        run_that(monkeypatch, tmp_path, KeyError("x"))
    assert "KeyError" in (tmp_path / "run" / "traceback.txt").read_text()


def test_an_error_of_the_user_passes_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        run_that(monkeypatch, tmp_path, DataError("no rows"))


def lacking_memory() -> list[BaseException]:
    """What torch and Python raise: by a real allocation on the host, and as a device's allocator says it."""
    import torch

    try:
        torch.empty(2**55)
    except RuntimeError as error:
        host = error

    class DeviceOutOfMemory(RuntimeError):
        """As a vendor's runtime may name it."""

    device = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return [host, device, DeviceOutOfMemory("2 GiB"), MemoryError(), from_(host, said=True), from_(device, said=False)]


def from_(cause: BaseException, said: bool) -> BaseException:
    """A KeyError that an error led to, as it says (`raise ... from`) or as it shows."""
    try:
        try:
            raise cause
        except BaseException as error:
            if said:
                raise KeyError("cleaning up") from error
            raise KeyError("cleaning up")  # noqa: B904
    except KeyError as error:
        return error


def test_too_little_memory_is_answered_with_what_to_lower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for error in [*lacking_memory(), OSError(errno.ENOMEM, "Cannot allocate memory")]:
        with pytest.raises(OutOfMemory) as caught:
            run_that(monkeypatch, tmp_path, error)
        for outcome in (ExitStatus.from_error(error), ExitStatus.from_error(caught.value)):
            assert outcome.code == 2
            assert outcome.line.startswith("rlhf: error: not enough memory (")
            for key in ("micro_batch_size", "model.gradient_checkpointing=true", "--resume"):
                assert key in outcome.line
        shutil.rmtree(tmp_path / "run")


def test_a_lack_of_memory_that_was_answered_is_none() -> None:
    hidden = from_(MemoryError(), said=False)
    hidden.__suppress_context__ = True  # raise ... from None
    assert ExitStatus.from_error(hidden).code == 1
    lacking = from_(MemoryError(), said=True)
    for answer in (DataError("use smaller rows"), AcceleratorError("use another card")):
        answer.__cause__ = lacking
        assert ExitStatus.from_error(answer).line == f"rlhf: error: {answer}"
        following = KeyError("x")
        following.__context__ = answer
        assert ExitStatus.from_error(following).code == 1


def test_errors_that_led_to_each_other_have_an_end() -> None:
    first, second = KeyError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    assert ExitStatus.from_error(first).code == 1


@pytest.mark.parametrize("library", ["torch", "safetensors"])
def test_a_full_disk_is_answered_with_what_to_do(library: str) -> None:
    import torch
    from safetensors import SafetensorError

    if library == "torch":
        with pytest.raises(RuntimeError) as caught:
            torch.save(torch.zeros(100_000), "/dev/full")
    else:  # as its releases word it; a file cannot be had here, for it writes beside the name and renames
        with pytest.raises(SafetensorError) as caught:
            raise SafetensorError('I/O error: Os { code: 28, kind: StorageFull, message: "No space left on device" }')
    outcome = ExitStatus.from_error(caught.value)
    assert outcome.code == 2 and "the disk is full" in outcome.line and "--resume" in outcome.line


def test_other_errors_of_torch_stay_defects() -> None:
    assert ExitStatus.from_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied")).code == 1


def test_the_process_is_left_as_it_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def opened(*_: object) -> AbstractContextManager[object]:
        os.environ.update(OMP_NUM_THREADS="77", NEW="1")
        return nullcontext((None, None))

    monkeypatch.setattr(launch, "_open", opened)
    monkeypatch.delenv("RLHF_ACCELERATOR", raising=False)
    found = dict(os.environ), signal.getsignal(signal.SIGTERM)
    config = load_config(None, [f"output='{tmp_path / 'run'}'", "accelerator=cpu"])
    launch.run(config, dry_run=True)
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == found
    with ThreadPoolExecutor(1) as threads:  # where no handler can be set
        threads.submit(launch.run, config, dry_run=True).result()
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == found


@pytest.mark.parametrize(
    ("stages", "override", "message"),
    [
        (STAGES, "model.path=./absent", "./absent: no such model folder"),
        (STAGES, "data.datasets=[{path: absent.jsonl}]", "absent.jsonl: no such file"),
        (STAGES, "data.datasets=[{path: world, heldout: ./absent}]", "./absent: no such file or folder"),
        (STAGES, "reward.model=./absent", "./absent: no such model folder"),
        (("ppo",), "ppo.reward_model=./absent", "./absent: no such model folder"),
        (STAGES, "sft.micro_batch_size=7", "sft.micro_batch_size 7"),
        (STAGES, "model.path={run}/sft/model", "sft/model lies in the sft stage that --overwrite replaces"),
        (STAGES, "model.tokenizer={run}/ppo/model", "ppo/model lies in the ppo stage that --overwrite replaces"),
    ],
)
def test_what_can_be_known_is_known_before_a_run_is_replaced(
    tmp_path: Path, stages: tuple[Stage, ...], override: str, message: str
) -> None:
    run = RunDirectory(tmp_path / "run")
    config = load_config(None, [f"output='{run.path}'"])
    with run.open_for(config):
        for name in STAGES:
            run.stage(name).finish({})
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    other = load_config(None, [f"output='{run.path}'", override.replace("{run}", str(run.path))])
    with pytest.raises(RLHFError, match=re.escape(message)):
        launch.run(other, stages=stages, overwrite=True)
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_a_stage_says_which_one_it_needs_before_anything_starts(tmp_path: Path) -> None:
    config = load_config(None, [f"output='{tmp_path / 'run'}'"])
    with pytest.raises(RLHFError, match=r"holds no finished sft stage.*`rlhf sft`.*ppo\.actor"):
        launch.run(config, stages=("ppo",))
    assert not (tmp_path / "run").exists()


def test_a_rank_that_follows_another_leaves_no_traceback_and_is_not_the_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(RemoteRankError) as caught:
        run_that(monkeypatch, tmp_path, RemoteRankError("saving failed on rank 0"))
    assert not list(tmp_path.rglob("traceback*"))
    follower, defect = ExitStatus.from_error(caught.value), ExitStatus.from_error(InternalError("KeyError"))
    assert find_root_cause([follower, defect]) == find_root_cause([defect, follower]) == defect


def test_an_error_of_a_plugin_with_a_code_of_its_own_is_reported() -> None:
    own = ExitStatus(3, "rlhf: error: licence", 1.0)
    assert find_root_cause([own, ExitStatus(1, "defect", 2.0)]) == own
    assert find_root_cause([own, ExitStatus(2, "user", 2.0)]).code == 2


@pytest.mark.parametrize(
    ("number", "place", "remedy"),
    [
        (errno.EACCES, "run/sft", "choose another --output"),
        (errno.ENOSPC, "run/sft", "make room, then run: rlhf --output {run} --resume"),
        (errno.EACCES, "cache", "check the permissions of this path"),
        (errno.ENOSPC, "cache", "make room there"),
        (errno.EROFS, None, "choose another --output"),
    ],
)
def test_another_output_is_advised_only_where_it_helps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, place: str | None, remedy: str
) -> None:
    error = OSError(number, os.strerror(number), *([str(tmp_path / place)] if place else []))
    with pytest.raises(RLHFError) as caught:
        run_that(monkeypatch, tmp_path, error)
    assert str(caught.value).endswith(f"{os.strerror(number)}; {remedy.format(run=tmp_path / 'run')}")


def test_any_other_error_of_the_system_is_a_defect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InternalError):
        run_that(monkeypatch, tmp_path, OSError(errno.EIO, "Input/output error"))
    assert "OSError" in (tmp_path / "run" / "traceback.txt").read_text()
