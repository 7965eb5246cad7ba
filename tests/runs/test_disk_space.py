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
from rlhf.checkpoint import training_state
from rlhf.config.schema import Config
from rlhf.errors import RunError
from rlhf.runs.disk_space import StorageNeed, bytes_needed, check_disk_space
from rlhf.runs.stage_directory import StageDirectory
from rlhf.utils.atomic_io import atomic_rename_dir
from tests.helpers import llama, start, wait_for
from tests.in_process import scalar_llama

FP32, BF16 = Precision(torch.float32, "fp32", ""), Precision(torch.bfloat16, "bf16", "")


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def config(**sections: Any) -> Config:
    return Config.model_validate(sections)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param(FP32, id="fp32"), pytest.param(BF16, id="bf16")])
def test_bytes_needed_are_those_of_a_real_run(
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
    largest = max(size(path) for path in (output / "ppo" / "checkpoints").glob("step-????????"))
    actor, critic = llama(len(tokenizer)), scalar_llama(len(tokenizer))
    settings = config(engine={"zero_stage": 1}, ppo={"checkpoint_every": 1})
    needed = bytes_needed(settings, {"ppo": StorageNeed([actor, critic], 500)}, precision)
    # Names, buffers and counters come on top, which count in a model as small as this one.
    assert 0.8 * 3 * largest < needed < 3 * largest


def test_at_the_fullest_moment_three_checkpoints_lie_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_1000_bytes(engine: Any, folder: Path) -> None:
        (folder / "weights").write_bytes(b"x" * 1000)

    sizes = []

    def measured(temporary: Path, path: Path) -> None:
        sizes.append(sum(file.stat().st_size for file in tmp_path.rglob("weights")))
        atomic_rename_dir(temporary, path)

    monkeypatch.setattr(training_state, "atomic_rename_dir", measured)
    monkeypatch.setattr(training_state, "save_engine", write_1000_bytes)
    monkeypatch.setattr(training_state.fragments, "read_counters", lambda engine: {})
    for step in range(1, 6):
        training_state.save_checkpoint(StageDirectory(tmp_path, "sft"), step, {"model": None}, {})  # type: ignore[dict-item]
    assert sizes == [1000, 2000, 3000, 3000, 3000]


class Disk(NamedTuple):
    total: int
    used: int
    free: int


def test_bytes_needed_are_those_counted_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(1000, 1000, bias=False)  # a million parameters: 12 MB a checkpoint, 4 MB as a model
    few, many = ({stage: StorageNeed([model], steps) for stage in ("sft", "reward")} for steps in (100, 101))
    assert bytes_needed(config(), few, FP32) == (4 + 12 + 4) * 10**6  # a checkpoint of the last step alone
    assert bytes_needed(config(), many, FP32) == (4 + 2 * 12 + 4) * 10**6
    assert (
        bytes_needed(config(), {"sft": StorageNeed([model], 201)}, FP32) == 3 * 12 * 10**6
    )  # three, before the model comes
    best = config(sft={"eval_every": 10, "keep": "best(perplexity)"})  # next to the three
    assert bytes_needed(best, {"sft": StorageNeed([model], 201)}, FP32) == (3 * 12 + 4) * 10**6
    assert (
        bytes_needed(config(reward={"checkpoint_every": 0}), {"reward": StorageNeed([model], 201)}, FP32) == 16 * 10**6
    )
    averaged = config(ppo={"ema": 0.9})  # 4 MB more in a checkpoint, and another model, next to actor and critic
    assert bytes_needed(averaged, {"ppo": StorageNeed([model, model], 1)}, FP32) == (2 * 12 + 4 + 3 * 4) * 10**6
    alone = config(ppo={"save_critic": False})
    assert bytes_needed(alone, {"ppo": StorageNeed([model, model], 1)}, FP32) == (2 * 12 + 4) * 10**6
    assert bytes_needed(averaged, {"sft": StorageNeed([model], 1)}, FP32) == (12 + 4) * 10**6
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(0, 0, 21_000_000))
    check_disk_space(config(), tmp_path / "run", few, FP32)
    with pytest.raises(RunError, match=r"run: checkpoints and models need 31 MiB, and its disk has 20 MiB"):
        check_disk_space(config(), tmp_path / "run", many, FP32)
    (tmp_path / "run" / "sft").mkdir(parents=True)
    (tmp_path / "run" / "sft" / "old").write_bytes(b"x" * 12_000_000)  # gives way to what comes
    check_disk_space(config(), tmp_path / "run", many, FP32)


def test_frozen_weights_are_in_no_checkpoint() -> None:
    model = torch.nn.Linear(1000, 1000, bias=False)
    assert bytes_needed(config(lora={"rank": 4}), {"sft": StorageNeed([model], 500)}, BF16) == 2_000_000
