"""One leg of training for `test_elastic`: some ranks read a checkpoint, take a step and write one; results in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_optimizer_state
from torch import Tensor

import accelerators
from rlhf.checkpoint.training_state import restore_checkpoint, save_checkpoint
from rlhf.engine import distributed
from rlhf.engine.engine import TrainingEngine
from rlhf.engine.fp32_weights import EMA
from rlhf.runs.directory import RunDirectory
from tests.engine.engines import CONSTANT, DECAY, IDS, ROWS, build, loss, masters

MOMENTS = ("exp_avg", "exp_avg_sq")
SMOOTH = CONSTANT | {"eps": 1e-3}  # or AdamW would make as much of rounding as of gradients where these are near 0


def main(folder: str, leg: int, zero_stage: int, precision: str, lora: int) -> None:
    with distributed.start_process_group(accelerators.select("cpu", environ={})) as accelerator:
        world = distributed.world()
        engine = build(
            accelerator, zero_stage, precision, lora=adapters(lora), rows=ROWS // world.size, optimizer=SMOOTH
        )
        engine.ema = EMA(engine.optimizer, DECAY, accelerator)
        stage = RunDirectory(Path(folder)).stage("sft")
        restored = restore_checkpoint(stage, {"model": engine})
        result = {"read": numbers(engine), "ranks": restored and restored.ranks, "steps": engine.steps}
        engine.step([IDS.chunk(world.size)[world.rank]], loss)
        result["written"] = numbers(engine)
        save_checkpoint(stage, leg + 1, {"model": engine}, {"leg": leg})
        if world.is_main:
            torch.save(result, Path(folder) / f"leg {leg}")


def adapters(rank: int) -> dict[str, Any]:
    """LoRA at the rate of the other weights, at which rounding does not grow."""
    return {"rank": rank, "learning_rate": SMOOTH["learning_rate"]} if rank else {}


def numbers(engine: TrainingEngine) -> dict[str, Tensor]:
    """All that is trained, whole, as DeepSpeed's functions collect it; every rank calls it."""
    found = {f"weight of {name}": tensor for name, tensor in masters(engine).items()}
    with engine.ema.in_place():  # type: ignore[union-attr]
        found |= {f"average of {name}": tensor for name, tensor in masters(engine).items()}
    if engine.zero_stage in (1, 2) and engine.steps:  # DeepSpeed links them before groups but the first have any
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and engine.steps:
            found |= {f"{moment} of {name}": _moment(engine, parameter, moment) for moment in MOMENTS}
    return found


def _moment(engine: TrainingEngine, parameter: Any, name: str) -> Tensor:
    if engine.zero_stage:
        return safe_get_full_optimizer_state(parameter, name).clone()
    groups, copies = (getattr(engine.optimizer, f"fp{bits}_groups", [[parameter]]) for bits in (16, 32))
    pairs = [pair for group, copy in zip(groups, copies) for pair in zip(group, copy)]
    (master,) = (master for mine, master in pairs if mine is parameter)
    return getattr(engine.optimizer, "optimizer", engine.optimizer).state[master][name].clone()
