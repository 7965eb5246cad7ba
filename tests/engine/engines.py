"""Engines of a tiny Llama, a step of them, their float32 weights with a plain average, and fp16 on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
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

ROWS, PROMPT, COMPLETION = 4, 4, 8
IDS = torch.randint(2, 60, (ROWS, PROMPT + COMPLETION), generator=torch.Generator().manual_seed(0))
DECAY = 0.75
CONSTANT = {"learning_rate": 1e-2, "schedule": "constant", "warmup": 0, "weight_decay": 0.1}
FALLING = {"learning_rate": 1e-2, "schedule": "linear", "warmup": 0.3}


def build(
    accelerator: Accelerator,
    zero_stage: int,
    precision: str | Precision = "fp32",
    accumulation: int = 1,
    *,
    model: Any = None,
    lora: int | dict[str, Any] = 0,
    rows: int = ROWS,
    optimizer: dict[str, Any] = CONSTANT,
    **engine: Any,
) -> TrainingEngine:
    """An engine for `rows` rows a step on each rank, with all parameters sharded at ZeRO-3."""
    lora = lora if isinstance(lora, dict) else {"rank": lora}
    values = {"engine": {"zero_stage": zero_stage, "zero_persistence_threshold": 0, **engine}, "lora": lora}
    placement = model_placements(build_config(values), "sft")["sft"]
    model = model or llama(60)
    if placement.lora.rank:
        add_adapters(model, placement.lora, seed=0)
    return TrainingEngine(
        "test",
        model,
        accelerator=accelerator,
        precision=accelerator.precision(precision) if isinstance(precision, str) else precision,
        placement=placement,
        optimizer=OptimizerConfig(**optimizer),
        total_steps=20,
        micro_batch_size=rows // accumulation,
        accumulation=accumulation,
    )


def loss(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    log_probs = completion_log_probs(model, ids, torch.ones_like(ids), COMPLETION).log_probs
    return -log_probs.sum() / (ROWS * COMPLETION), {"rows": torch.tensor(float(len(ids)))}


def scaled(factor: float) -> Any:
    """A loss whose gradients are `factor` times as large."""

    def scaled_loss(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value, statistics = loss(model, ids)
        return value * factor, statistics

    return scaled_loss


def step(engine: TrainingEngine) -> None:
    engine.step([IDS], loss)


def train(engine: TrainingEngine, steps: int = 4, accumulation: int = 1) -> list[dict[str, float]]:
    return [engine.step(IDS.split(ROWS // accumulation), loss).read() for _ in range(steps)]


def weights_of(engine: TrainingEngine) -> dict[str, Tensor]:
    """The weights that the model computes with, whole."""
    with engine.whole_weights() as module:
        return {name: tensor.detach().clone() for name, tensor in module.named_parameters()}


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


class PlainAverage:
    """The moving average of an engine's masters, of whole tensors in float64."""

    def __init__(self, engine: TrainingEngine) -> None:
        self.average = {name: tensor.double() for name, tensor in masters(engine).items()}

    def follow(self, engine: TrainingEngine) -> None:
        for name, tensor in masters(engine).items():
            self.average[name] = DECAY * self.average[name] + (1 - DECAY) * tensor.double()

    def assert_is(self, engine: TrainingEngine) -> None:
        """The engine's masters are it: to the last digits, of which each step may round one."""
        for name, tensor in masters(engine).items():
            torch.testing.assert_close(tensor.double(), self.average[name], rtol=3e-7, atol=1e-8)


class FP16(Precision):
    """Its loss scale begins at 2^10, with which the tiny models here do not overflow, and is halved at once."""

    def deepspeed_config(self) -> dict[str, Any]:
        return {"fp16": super().deepspeed_config()["fp16"] | {"initial_scale_power": 10, "hysteresis": 1}}


@contextmanager
def accepted_fp16() -> Iterator[Precision]:
    """In this block DeepSpeed accepts fp16 on a CPU: its CPU accelerator refuses it, and computes it."""
    from deepspeed.accelerator import get_accelerator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
        yield FP16(torch.float16, "fp16", "a test's", loss_scaling=True)
