"""One decision about fp16 overflow for several engines: if the gradients of one overflow, none takes its step.

A policy that moves while its critic stands still, or the reverse, is an update that no algorithm has; so
DeepSpeed-Chat skips both (its `--align_overflow`). Each engine lowers only its own loss scale: that of an engine whose
gradients fitted cost no step, and halving it would round away gradients for the thousand steps until it rises again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf.engine.deepspeed_patches import gradients_overflow, override_overflow
from rlhf.engine.engine import Loss, TrainingEngine
from rlhf.engine.metric_sums import MetricSums

EngineStep = tuple[TrainingEngine, Sequence[Any], Loss]
"""(engine, micro-batches, loss): the inputs of `TrainingEngine.step`."""


def synchronized_step(steps: Sequence[EngineStep]) -> list[MetricSums]:
    """Take one optimizer step of each engine, or of none if the gradients of one overflow.

    For engines with loss scaling only: the gradients of all models are in memory at one time.

    Returns:
        The result of `TrainingEngine.step` for each engine.
    """
    sums = [engine.step(micro_batches, loss, apply=False) for engine, micro_batches, loss in steps]
    overflowed = [gradients_overflow(engine.optimizer) for engine, *_ in steps]
    for (engine, *_), lower in zip(steps, overflowed):
        with override_overflow(engine.optimizer, skip=any(overflowed), lower=lower):
            engine.apply()
    return sums
