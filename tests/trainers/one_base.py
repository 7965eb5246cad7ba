"""What two processes run for `test_shared_base`: two engines on one base, and where its weights are afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import accelerators
from rlhf.config.schema import ModelConfig, OptimizerConfig, build_config
from rlhf.engine import distributed
from rlhf.engine.engine import TrainingEngine
from rlhf.models.lora import add_adapters
from rlhf.models.shared_base import SharedBase, build_on_base
from rlhf.roles.roles import model_placements
from tests.helpers import llama

IDS = torch.randint(2, 60, (2, 8), generator=torch.Generator().manual_seed(0))


def main(folder: str, *precisions: str) -> None:
    """Leaves, for each rank, {(precision, ZeRO stage): (bases are one at first, and after steps, base unchanged)}."""
    with distributed.start_process_group(accelerators.select("cpu", environ={})) as accelerator:
        found = {
            (precision, zero_stage): _one(accelerator, precision, zero_stage)
            for precision in precisions
            for zero_stage in (0, 1, 2)
        }
        torch.save(found, Path(folder) / f"rank {distributed.world().rank}")


def _one(accelerator: Any, precision: str, zero_stage: int) -> tuple[bool, bool, bool]:
    placement = model_placements(build_config({"engine": {"zero_stage": zero_stage}, "lora": {"rank": 4}}), "sft")[
        "sft"
    ]
    model, engines = llama(60), []
    for _ in range(2):
        add_adapters(model, placement.lora, seed=0)
        base = SharedBase(model)
        engines.append(
            TrainingEngine(
                "test",
                model,
                accelerator=accelerator,
                precision=accelerator.precision(precision),
                placement=placement,
                optimizer=OptimizerConfig(warmup=0),
                total_steps=2,
                micro_batch_size=2,
                accumulation=1,
            )
        )
        model = build_on_base(base, ModelConfig(), attention="sdpa")
    first, second = (_base(engine) for engine in engines)
    before = {name: tensor.clone() for name, tensor in first.items()}
    at_first = _places(first) == _places(second)
    for engine in engines:
        engine.step([IDS], lambda model, ids: (model(input_ids=ids, labels=ids).loss / 2, {}))
    first, second = (_base(engine) for engine in engines)
    unchanged = all(torch.equal(tensor, before[name]) for name, tensor in second.items())
    return at_first, _places(first) == _places(second), unchanged


def _base(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in engine.module.state_dict().items() if ".lora_" not in name}


def _places(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}
