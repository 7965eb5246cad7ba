"""What two processes of one group run for `test_two_ranks`: a few steps of each stage, left in a folder."""

from __future__ import annotations

from pathlib import Path

import torch

import accelerators
from rlhf.engine import distributed
from tests.reference import cases, real

ROWS = {"sft": 6, "reward": 6, "ppo": 14}
"""Two less than fill the last batch: the second rank's share lacks them."""

CHANGES = {
    "sft": {"micro_batch_size": 1, "engine": {"zero_stage": 0}, "lora": cases.LORA},
    "reward": {"micro_batch_size": 1},
    "ppo": {"micro_batch_size": 1},
}


def main(folder: str) -> None:
    with distributed.session(accelerators.select("cpu", environ={})) as accelerator:
        for stage, changes in CHANGES.items():
            config, output = cases.configuration(stage, **changes), Path(folder) / stage
            if stage == "ppo":
                found = real.reinforced(accelerator, config, cases.Models.build(), ROWS[stage], output)
            else:
                found = real.supervised(stage, accelerator, config, model(stage), ROWS[stage], output)
            torch.save(found, Path(folder) / f"{stage}, rank {distributed.world().rank}")


def model(stage: str) -> torch.nn.Module:
    return cases.language_model(1) if stage == "sft" else cases.scalar_model(1)
