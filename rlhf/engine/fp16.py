"""One decision about fp16's overflow for several engines: where the gradients of one overflow, none takes its step.

A policy that moves while its critic stands still, or the other way round, is an update that no algorithm has; so
DeepSpeed-Chat skips both (its `--align_overflow`). Engines with gradients flow in; either all of them step or none
does. Each lowers its own loss scale only: that of an engine whose gradients fitted cost no step, and halving it would
round away gradients for the thousand steps until it rises again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf.engine.deepspeed_patches import gradients_overflow, override_overflow
from rlhf.engine.engine import Loss, TrainingEngine
from rlhf.engine.metric_sums import MetricSums

Work = tuple[TrainingEngine, Loss, Sequence[Any]]
"""(engine, loss, micro-batches): what one optimizer step is made of."""


def step_together(work: Sequence[Work]) -> list[MetricSums]:
    """One optimizer step of each engine over its micro-batches, or with loss scaling perhaps of none.

    Without it each engine steps before the next one's gradients are there: those of one model are in memory at a time.

    Returns:
        For each engine what `TrainingEngine.step` returns.
    """
    if len(work) == 1 or not any(engine.precision.loss_scaling for engine, *_ in work):
        return [engine.step(parts, loss) for engine, loss, parts in work]
    sums = [engine.backward(parts, loss) for engine, loss, parts in work]
    overflowed = [gradients_overflow(engine.optimizer) for engine, *_ in work]
    for (engine, *_), own in zip(work, overflowed):
        with override_overflow(engine.optimizer, skip=any(overflowed), lower=own):
            engine.apply()
    return sums
