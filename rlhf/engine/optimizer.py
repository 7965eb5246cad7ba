"""AdamW's parameter groups and the learning rate as a function of the step."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from rlhf.config.schema import LoraConfig, OptimizerConfig

ADAPTERS_FACTOR = 10.0
"""Adapters learn at this multiple of the stage's rate, unless `lora.learning_rate` is set: they start at zero, and must
make alone the change that full fine-tuning spreads over all weights."""


def compute_adapter_factor(optimizer: OptimizerConfig, lora: LoraConfig) -> float:
    """Return the factor on a stage's learning rate for its adapters; they follow the same schedule."""
    return ADAPTERS_FACTOR if lora.learning_rate is None else lora.learning_rate / optimizer.learning_rate


def group_parameters(model: nn.Module, weight_decay: float, factor: float = 1.0) -> list[dict[str, Any]]:
    """Return trainable parameters in groups: matrices with weight decay, vectors (biases, norms) without, adapters.

    The `factor` of a group multiplies the stage's learning rate: `factor` for adapters, 1 for others.
    """
    # A parameter partitioned by ZeRO-3 is flat and empty; `ds_shape` has its shape.
    trainable = [(".lora_" in name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for adapter, p in trainable if not adapter and len(getattr(p, "ds_shape", p.shape)) > 1]
    vectors = [p for adapter, p in trainable if not adapter and len(getattr(p, "ds_shape", p.shape)) <= 1]
    adapters = [p for adapter, p in trainable if adapter]
    groups = [
        {"params": matrices, "weight_decay": weight_decay, "factor": 1.0},
        {"params": vectors, "weight_decay": 0.0, "factor": 1.0},
        {"params": adapters, "weight_decay": weight_decay, "factor": factor},
    ]
    return [group for group in groups if group["params"]]


def compute_learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based) of `total_steps`.

    It rises linearly over the warm-up, then follows the schedule down to `min_lr_ratio` of the peak at the last step.
    """
    warmup = round(config.warmup if config.warmup >= 1 else config.warmup * total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, total_steps - warmup - 1)
    shape = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "wsd": min(1.0, (total_steps - 1 - step) / max(1, round(config.decay * total_steps))),
    }[config.schedule]
    floor = 1.0 if config.schedule == "constant" else config.min_lr_ratio
    return config.learning_rate * (floor + (1.0 - floor) * shape)
