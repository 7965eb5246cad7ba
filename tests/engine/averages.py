"""Engines whose masters can be read whole, and the moving average of these in a plain loop of float64."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor

from accelerators import Accelerator, Precision
from rlhf.config.schema import OptimizerConfig, build_config
from rlhf.engine.engine import TrainingEngine
from rlhf.models.forward import completion_log_probs
from rlhf.models.lora import add_adapters
from rlhf.roles.roles import model_placements
from tests.helpers import llama

IDS = torch.randint(2, 60, (4, 12), generator=torch.Generator().manual_seed(0))
DECAY = 0.75


def build(
    accelerator: Accelerator, zero_stage: int, precision: str | Precision = "fp32", *, lora: int = 0, **engine: Any
) -> TrainingEngine:
    """An engine for one micro-batch a step on each rank."""
    values = {"engine": {"zero_stage": zero_stage, "zero_persistence_threshold": 0, **engine}, "lora": {"rank": lora}}
    placement = model_placements(build_config(values), "sft")["sft"]
    model = llama(60)
    if lora:
        add_adapters(model, placement.lora, seed=0)
    return TrainingEngine(
        "test",
        model,
        accelerator=accelerator,
        precision=accelerator.precision(precision) if isinstance(precision, str) else precision,
        placement=placement,
        optimizer=OptimizerConfig(learning_rate=1e-2, schedule="linear", warmup=0.3),
        total_steps=20,
        micro_batch_size=len(IDS),
        accumulation=1,
    )


def loss(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    log_probs = completion_log_probs(model, ids, torch.ones_like(ids), 8).log_probs
    return -log_probs.sum() / log_probs.numel(), {}


def step(engine: TrainingEngine) -> None:
    engine.step([IDS], loss)


def masters(engine: TrainingEngine) -> dict[str, Tensor]:
    """The float32 numbers that are trained, whole, by name; every rank calls it."""
    copies = getattr(engine.engine.optimizer, "fp32_groups", None)  # ZeRO 0, with fewer bits
    named = {name: tensor for name, tensor in engine.module.named_parameters() if tensor.requires_grad}
    if copies:
        pairs = [pair for groups in zip(engine.engine.optimizer.fp16_groups, copies) for pair in zip(*groups)]
        places = {id(mine): master for mine, master in pairs}
        return {name: places[id(tensor)].detach().clone() for name, tensor in named.items()}
    if engine.zero_stage == 0:
        return {name: tensor.detach().clone() for name, tensor in named.items()}
    return {name: safe_get_full_fp32_param(tensor).detach().clone() for name, tensor in named.items()}


class Plain:
    """The average, of whole tensors in float64."""

    def __init__(self, engine: TrainingEngine) -> None:
        self.average = {name: tensor.double() for name, tensor in masters(engine).items()}

    def follow(self, engine: TrainingEngine) -> None:
        for name, tensor in masters(engine).items():
            self.average[name] = DECAY * self.average[name] + (1 - DECAY) * tensor.double()

    def assert_is(self, engine: TrainingEngine) -> None:
        """Whether the engine's masters are it: to the last digits, of which each step may round one."""
        for name, tensor in masters(engine).items():
            torch.testing.assert_close(tensor.double(), self.average[name], rtol=3e-7, atol=1e-8)
