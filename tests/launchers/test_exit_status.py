"""Exit codes and the line that goes with each."""

import errno
import os
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import pytest

from accelerators import AcceleratorError
from rlhf.config.schema import STAGES, Config, Stage, load_config
from rlhf.errors import DataError, OutOfMemory, RemoteRankError, RLHFError
from rlhf.launchers.exit_status import ExitStatus, InternalError, Interrupted, find_root_cause
from rlhf.runs.directory import RunDirectory
from rlhf.trainers import run as launch
from tests.helpers import build_tokenizer


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (DataError("rows.jsonl: no usable row"), 2, "rlhf: error: rows.jsonl: no usable row"),
        (DataError("a\n  b"), 2, "rlhf: error: a b"),
        (AcceleratorError("no such accelerator"), 2, "rlhf: error: no such accelerator"),
        (
            RuntimeError("mat1 and mat2"),
            1,
            "rlhf: error: this is a bug of rlhf: RuntimeError: mat1 and mat2; its trace",
        ),
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


def run_that(monkeypatch: pytest.MonkeyPatch, folder: Path, error: BaseException) -> None:
    def fail(config: Config, *_: object) -> None:
        directory = RunDirectory(config.output)
        with directory.open_for(config):
            directory.stage("sft").finish({"stage": "sft"})
            raise error

    monkeypatch.setattr(launch, "_open", fail)
    monkeypatch.setenv("RLHF_ACCELERATOR", "cpu")
    launch.run(load_config(None, [f"output='{folder / 'run'}'"]))


@pytest.mark.parametrize("error", [KeyError("x"), OSError(errno.EIO, "Input/output error")])
def test_internal_error_leaves_its_traceback_in_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException
) -> None:
    with pytest.raises(InternalError, match=type(error).__name__):
        run_that(monkeypatch, tmp_path, error)
    assert type(error).__name__ in (tmp_path / "run" / "traceback.txt").read_text()


def lacking_memory() -> list[BaseException]:
    """Return the errors of torch and Python: a real one of the host, and the text of a device's allocator."""
    import torch

    try:
        torch.empty(2**55)
    except RuntimeError as error:
        host = error

    class DeviceOutOfMemory(RuntimeError):
        """As a vendor's runtime may name it."""

    device = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return [
        host,
        device,
        DeviceOutOfMemory("2 GiB"),
        MemoryError(),
        from_(host, explicit=True),
        from_(device, explicit=False),
    ]


def from_(cause: BaseException, explicit: bool) -> BaseException:
    """Return a KeyError caused by another error: with `raise ... from`, or raised while that one was handled."""
    try:
        try:
            raise cause
        except BaseException as error:
            if explicit:
                raise KeyError("cleaning up") from error
            raise KeyError("cleaning up")  # noqa: B904
    except KeyError as error:
        return error


def test_lack_of_memory_names_the_settings_to_lower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for error in [*lacking_memory(), OSError(errno.ENOMEM, "Cannot allocate memory")]:
        with pytest.raises(OutOfMemory) as caught:
            run_that(monkeypatch, tmp_path, error)
        for outcome in (ExitStatus.from_error(error), ExitStatus.from_error(caught.value)):
            assert outcome.code == 2
            assert outcome.line.startswith("rlhf: error: not enough memory (")
            for key in ("micro_batch_size", "model.gradient_checkpointing=true", "--resume"):
                assert key in outcome.line
        shutil.rmtree(tmp_path / "run")


def test_translated_lack_of_memory_is_not_reported_again() -> None:
    hidden = from_(MemoryError(), explicit=False)
    hidden.__suppress_context__ = True  # raise ... from None
    assert ExitStatus.from_error(hidden).code == 1
    lacking = from_(MemoryError(), explicit=True)
    for answer in (DataError("use smaller rows"), AcceleratorError("use another card")):
        answer.__cause__ = lacking
        assert ExitStatus.from_error(answer).line == f"rlhf: error: {answer}"
        following = KeyError("x")
        following.__context__ = answer
        assert ExitStatus.from_error(following).code == 1
    first, second = KeyError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    assert ExitStatus.from_error(first).code == 1, "a ring of causes has an end"


@pytest.mark.parametrize("library", ["torch", "safetensors", "tokenizers"])
def test_full_disk_is_reported_with_the_remedy(library: str) -> None:
    import torch
    from safetensors import SafetensorError

    if library == "torch":
        with pytest.raises(RuntimeError) as caught:
            torch.save(torch.zeros(100_000), "/dev/full")
    elif library == "tokenizers":
        with pytest.raises(Exception, match="No space left on device") as caught:
            build_tokenizer().backend_tokenizer.save("/dev/full")
    else:  # the text of its releases; it cannot write to /dev/full, since it renames a temporary file
        with pytest.raises(SafetensorError) as caught:
            raise SafetensorError('I/O error: Os { code: 28, kind: StorageFull, message: "No space left on device" }')
    outcome = ExitStatus.from_error(caught.value)
    assert outcome.code == 2 and "the disk is full" in outcome.line and "--resume" in outcome.line


def test_run_restores_environment_and_signal_handlers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def opened(*_: object) -> AbstractContextManager[object]:
        os.environ.update(OMP_NUM_THREADS="77", NEW="1")
        return nullcontext((None, None))

    monkeypatch.setattr(launch, "_open", opened)
    monkeypatch.delenv("RLHF_ACCELERATOR", raising=False)
    before = dict(os.environ), signal.getsignal(signal.SIGTERM)
    config = load_config(None, [f"output='{tmp_path / 'run'}'", "accelerator=cpu"])
    launch.run(config, dry_run=True)
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == before
    with ThreadPoolExecutor(1) as threads:  # no handler can be set there
        threads.submit(launch.run, config, dry_run=True).result()
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == before


def test_signal_swallowed_while_a_run_opens_ends_it_before_its_stages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """pyarrow swallows the exception in its import of pandas, while rows are read."""

    def opened(*_: object) -> AbstractContextManager[object]:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        return nullcontext((None, None))

    monkeypatch.setattr(launch, "_open", opened)
    config = load_config(None, [f"output='{tmp_path / 'run'}'", "accelerator=cpu"])
    with pytest.raises(Interrupted):
        launch.run(config, dry_run=True)


@pytest.mark.parametrize(
    ("stages", "override", "message"),
    [
        (STAGES, "model.path=./absent", "./absent: no such model folder"),
        (STAGES, "data.datasets=[{path: world, heldout: ./absent}]", "./absent: no such file or folder"),
        (("ppo",), "ppo.reward_model=./absent", "./absent: no such model folder"),
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
            run.stage(name).finish({"stage": name})
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    other = load_config(None, [f"output='{run.path}'", override.replace("{run}", str(run.path))])
    with pytest.raises(RLHFError, match=re.escape(message)):
        launch.run(other, stages=stages, overwrite=True)
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_rank_that_follows_another_is_not_the_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RemoteRankError) as caught:
        run_that(monkeypatch, tmp_path, RemoteRankError("saving failed on rank 0"))
    assert not list(tmp_path.rglob("traceback*"))
    follower, defect = ExitStatus.from_error(caught.value), ExitStatus.from_error(InternalError("KeyError"))
    assert find_root_cause([follower, defect]) == find_root_cause([defect, follower]) == defect
    of_plugin = ExitStatus(3, "rlhf: error: licence", 1.0)
    assert find_root_cause([of_plugin, ExitStatus(1, "defect", 2.0)]) == of_plugin
    assert find_root_cause([of_plugin, ExitStatus(2, "user", 2.0)]).code == 2


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
