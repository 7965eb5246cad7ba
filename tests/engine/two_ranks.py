"""Functions that two processes run for `test_two_ranks`: averages, overflows and gradients on each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import accelerators
from accelerators import Accelerator
from rlhf.checkpoint.export import save_model
from rlhf.engine import distributed
from rlhf.engine.engine import synchronized_step
from rlhf.engine.fp32_weights import EMA
from tests.engine.engines import DECAY, IDS, PlainAverage, accepted_fp16, build, loss, masters, scaled
from tests.helpers import build_tokenizer

AVERAGES: dict[str, dict[str, Any]] = {
    **{f"ZeRO {stage}": {"zero_stage": stage} for stage in range(4)},
    "ZeRO 1, bf16": {"zero_stage": 1, "precision": "bf16"},
    "ZeRO 3, bf16": {"zero_stage": 3, "precision": "bf16"},
    "ZeRO 3, small parameters whole": {"zero_stage": 3, "zero_persistence_threshold": 1500},
    "ZeRO 2, offloaded": {"zero_stage": 2, "offload": "optimizer"},
    "ZeRO 3, offloaded": {"zero_stage": 3, "offload": "all"},
    "ZeRO 2, LoRA": {"zero_stage": 2, "lora": 4},
    "ZeRO 3, LoRA": {"zero_stage": 3, "lora": 4},
}


def main(folder: str) -> None:
    with distributed.start_process_group(accelerators.select("cpu", environ={})) as accelerator:
        rank = distributed.world().rank
        averages = {name: averaged(accelerator, Path(folder) / name, **how) for name, how in AVERAGES.items()}
        torch.save(averages, Path(folder) / f"averages, rank {rank}")
        with accepted_fp16() as precision:
            skipped = {stage: overflowed(accelerator, stage, precision) for stage in range(4)}
        torch.save(skipped, Path(folder) / f"overflows, rank {rank}")


def observe(folder: str) -> None:
    with distributed.start_process_group(accelerators.select("cpu", environ={})) as accelerator:
        gradients = {stage: observed(build(accelerator, stage)) for stage in range(4)}
        torch.save(gradients, Path(folder) / f"gradients, rank {distributed.world().rank}")


def rows() -> Any:
    """Other rows on each rank."""
    return IDS if distributed.world().rank == 0 else IDS.flip(1)


def averaged(accelerator: Accelerator, folder: Path, *, precision: str = "fp32", **how: Any) -> dict[str, Any]:
    """Three steps, and the average in the weights' place; it is saved to `folder`."""
    engine = build(accelerator, how.pop("zero_stage"), precision, **how)
    plain, engine.ema = PlainAverage(engine), EMA(engine.optimizer, DECAY, engine.accelerator)
    for _ in range(3):
        engine.step([rows()], loss)
        plain.follow(engine)
    before = masters(engine)
    with engine.ema.in_place():
        average = masters(engine)
        save_model(engine, build_tokenizer(), folder)
    return {
        "expected": plain.average,
        "average": average,
        "before": before,
        "after": masters(engine),
        "held": sum(tensor.numel() for tensor in engine.ema.tensors),
        "trained": engine.parameter_counts["trainable"],
    }


def observed(engine: Any) -> dict[str, torch.Tensor]:
    """The gradients of one step that an observer sees."""
    seen = {}

    def observe(place: Any, name: str, tensor: torch.Tensor) -> None:
        if place.phase == "gradients":
            seen[name] = tensor.clone()

    engine.observation.observer = observe
    with engine.observation.during("sft", 1):
        engine.step([rows()], loss)
    return seen


def overflowed(accelerator: Accelerator, zero_stage: int, precision: Any) -> dict[str, Any]:
    """One step of two engines; then one in which the second's gradients overflow, by what the second rank has."""
    huge = scaled(1e6 if distributed.world().rank else 1)
    engines = [build(accelerator, zero_stage, precision) for _ in range(2)]
    synchronized_step([(engine, [rows()], loss) for engine in engines])
    before = [masters(engine) for engine in engines]
    synchronized_step([(engines[0], [rows()], loss), (engines[1], [rows()], huge)])
    return {
        "before": before,
        "after": [masters(engine) for engine in engines],
        "scales": [engine.loss_scale() for engine in engines],
        "skipped": [engine.skipped for engine in engines],
    }
