"""AdamW's parameter groups and the learning rate as a function of the step."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from rlhf.config import OptimizerConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: matrices with weight decay, vectors (biases, norms) without."""
    # A parameter partitioned by ZeRO-3 is flat and empty; its own shape is in `ds_shape`.
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if len(getattr(p, "ds_shape", p.shape)) > 1]
    vectors = [p for p in trainable if len(getattr(p, "ds_shape", p.shape)) <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (0-based) of `total_steps`.

    It rises linearly over the warm-up, then follows the schedule down to `min_lr_ratio` of the peak at the last step.
    """
    warmup = round(config.warmup * total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, total_steps - warmup - 1)
    shape = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.schedule]
    floor = 1.0 if config.schedule == "constant" else config.min_lr_ratio
    return config.learning_rate * (floor + (1.0 - floor) * shape)
