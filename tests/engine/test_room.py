"""What a run will take on its disk is known beforehand, and a disk that is too small is named."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from accelerators import Precision
from rlhf.config import Config
from rlhf.engine.room import bytes_needed, check_room
from rlhf.errors import RunError
from tests.helpers import llama, start, wait_for
from tests.in_process import scalar_llama

FP32, BF16 = Precision(torch.float32, "fp32", ""), Precision(torch.bfloat16, "bf16", "")


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def config(**sections: Any) -> Config:
    return Config.model_validate(sections)


@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_the_need_is_what_a_run_leaves_on_the_disk(
    rlhf: Any, finished_run: Path, tmp_path: Path, tokenizer: Any, precision: Precision
) -> None:
    output = tmp_path / "run"
    models = {"ppo.actor": finished_run / "sft" / "model", "ppo.reward_model": finished_run / "reward" / "model"}
    keys = {**models, "ppo.steps": 500, "ppo.checkpoint_every": 1}
    process = start(
        rlhf, "ppo", "--output", output, "--precision", precision.name,
        *(part for key, value in keys.items() for part in ("--set", f"{key}={value}")),
    )  # fmt: skip
    wait_for(output / "ppo" / "checkpoints" / "step-00000003", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    kept = max(size(path) for path in (output / "ppo" / "checkpoints").glob("step-????????"))
    actor, critic = llama(len(tokenizer)), scalar_llama(len(tokenizer))
    settings = config(engine={"zero_stage": 1}, ppo={"steps": 500, "checkpoint_every": 1})
    found = bytes_needed(settings, {"ppo": [actor, critic]}, precision)
    model = precision.dtype.itemsize * sum(parameter.numel() for parameter in actor.parameters())
    # Names, buffers and a tokenizer come on top, which count in a model as small as this one.
    assert 0.8 * (2 * kept + model) < found < 2 * kept + model


class Disk(NamedTuple):
    total: int
    used: int
    free: int


def test_a_disk_without_room_is_named_with_what_is_free_and_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(1000, 1000, bias=False)  # a million parameters: 12 MB a checkpoint, 4 MB as a model
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(0, 0, 40_000_000))
    two, one = config(), config(sft={"checkpoint_every": 0}, reward={"checkpoint_every": 0})
    assert bytes_needed(two, {"sft": [model], "reward": [model]}, FP32) == 32_000_000
    check_room(two, tmp_path / "run", {"sft": [model], "reward": [model]}, FP32)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(0, 0, 21_000_000))
    check_room(one, tmp_path / "run", {"sft": [model], "reward": [model]}, FP32)
    with pytest.raises(RunError, match=r"run: checkpoints and models will take 32\.0 MB, and its disk has 21\.0 MB"):
        check_room(two, tmp_path / "run", {"sft": [model], "reward": [model]}, FP32)
    (tmp_path / "run" / "sft").mkdir(parents=True)
    (tmp_path / "run" / "sft" / "old").write_bytes(b"x" * 12_000_000)  # gives way to what comes
    check_room(two, tmp_path / "run", {"sft": [model], "reward": [model]}, FP32)


def test_frozen_weights_are_in_no_checkpoint() -> None:
    model = torch.nn.Linear(1000, 1000, bias=False)
    assert bytes_needed(config(lora={"rank": 4}), {"sft": [model]}, BF16) == 2_000_000
