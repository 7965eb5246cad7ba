"""Sections that every stage has: batches, steps, evaluation, checkpoints, the optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf.errors import ConfigError
from rlhf.kinds import Fraction, Section


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    learning_rate: float = Field(1e-5, gt=0, description="peak learning rate")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay; biases and norms are exempt")
    betas: tuple[float, float] = Field((0.9, 0.95), description="decay of the first and second moment")
    eps: float = Field(1e-8, gt=0, description="term added to the denominator")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="shape after the warm-up")
    warmup: Fraction = Field(0.05, description="part of the steps over which the learning rate rises from 0")
    min_lr_ratio: Fraction = Field(0.1, description="rate of the last step, as a part of the peak")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this norm")


class TrainingConfig(Section):
    """What every stage has: batches, steps, evaluation, checkpoints."""

    batch_size: int = Field(32, ge=1, description="rows in one optimizer step, over all ranks")
    micro_batch_size: int | None = Field(
        None, ge=1, description="rows in one forward pass of one rank; empty: batch_size / ranks"
    )
    eval_rows: int = Field(256, ge=1, description="held-out rows used for evaluation, at most")
    log_every: int = Field(1, ge=1, description="steps between records in metrics.jsonl and TensorBoard")
    checkpoint_every: int = Field(
        100, ge=0, description="steps between checkpoints; 0: only when interrupted and after the last"
    )

    def micro_batch(self, world_size: int, *, section: str) -> int:
        """Rows in one forward pass of one rank.

        Raises:
            ConfigError: `batch_size` is not a whole number of micro-batches on `world_size` ranks.
        """
        return divide(self.batch_size, self.micro_batch_size, world_size, f"{section}.batch_size", section)


class EpochConfig(TrainingConfig):
    """Length of a stage that passes over a data set."""

    epochs: int = Field(1, ge=1, description="passes over the stage's rows")
    max_steps: int | None = Field(None, ge=1, description="stop after so many optimizer steps; empty: after `epochs`")
    dropout: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="part of each layer's activations dropped in training; empty: the model's own rates",
    )

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the stage."""
        steps = self.epochs * steps_per_epoch
        return min(steps, self.max_steps) if self.max_steps else steps


def divide(rows: int, micro: int | None, world_size: int, key: str, section: str) -> int:
    """Rows in one forward pass of one rank, for `rows` in all: `micro`, or a rank's share.

    Raises:
        ConfigError: it does not divide.
    """
    if rows % world_size:
        raise ConfigError(f"{key}: {rows} rows cannot be shared among {world_size} ranks; make it a multiple of that")
    micro = micro or rows // world_size
    if rows % (micro * world_size):
        raise ConfigError(
            f"{key}: {rows} is not a multiple of {section}.micro_batch_size {micro} x {world_size} ranks; "
            "change one of them"
        )
    return micro
