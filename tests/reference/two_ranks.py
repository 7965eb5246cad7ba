"""What two processes of one group run for `test_two_ranks`: a few steps of each stage, left in a folder."""

from __future__ import annotations

from pathlib import Path

import torch

import accelerators
from rlhf.engine import distributed
from tests.reference import cases, real

ROWS = {"sft": 6, "reward": 6, "ppo": 14}
"""Two less than fill the last batch: the second rank's share lacks them."""

RUNS = {
    "sft": ("sft", {"micro_batch_size": 1}),
    "reward": ("reward", {"micro_batch_size": 1}),
    "ppo": ("ppo", {"micro_batch_size": 1}),
    "ppo, LoRA": ("ppo", {"engine": {"zero_stage": 0}, "lora": cases.LORA}),
}


def main(folder: str) -> None:
    with distributed.session(accelerators.select("cpu", environ={})) as accelerator:
        for name, (stage, changes) in RUNS.items():
            config, output = cases.configuration(stage, **changes), Path(folder) / name
            if stage == "ppo":
                models = cases.Models.build(lora=bool(config.lora.rank))
                found = real.reinforced(accelerator, config, models, ROWS[stage], output)
            else:
                found = real.supervised(stage, accelerator, config, model(stage), ROWS[stage], output)
            torch.save(found, Path(folder) / f"{name}, rank {distributed.world().rank}")


def model(stage: str) -> torch.nn.Module:
    return cases.language_model(1) if stage == "sft" else cases.scalar_model(1)
