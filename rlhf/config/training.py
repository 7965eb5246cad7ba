"""Sections that every stage has: batches, steps, evaluation, checkpoints, the optimizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from rlhf.config.types import ConfigModel, Fraction
from rlhf.config.validation_errors import error_at, short_repr
from rlhf.errors import ConfigError


class OptimizerConfig(ConfigModel):
    """AdamW and its learning-rate schedule."""

    learning_rate: float = Field(1e-5, gt=0, description="peak learning rate")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay; biases and norms are exempt")
    betas: tuple[float, float] = Field((0.9, 0.95), description="decay of the first and second moment")
    eps: float = Field(1e-8, gt=0, description="term added to the denominator")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine",
        description="shape after the warm-up; wsd: stable, then a linear fall over the last part (arXiv:2404.06395)",
    )
    warmup: float = Field(
        0.05, ge=0, description="steps over which the learning rate rises from 0: a part of all, or from 1 on a number"
    )
    decay: Fraction = Field(0.1, description="wsd: part of the steps over which the learning rate falls at the end")
    min_lr_ratio: Fraction = Field(0.1, description="rate of the last step, as a part of the peak")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this norm")


def _every(value: Any) -> Any:
    """Steps or a word, so that the error is not that of one of them alone."""
    if value != "epoch" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ValueError(f"expected a number of steps, at least 0, or epoch, got {short_repr(value)}")
    return value


EvalEvery = Annotated[int | Literal["epoch"], BeforeValidator(_every)]


class TrainingConfig(ConfigModel):
    """What every stage has: batches, steps, evaluation, checkpoints."""

    batch_size: int = Field(32, ge=1, description="rows in one optimizer step, over all ranks")
    micro_batch_size: int | None = Field(
        None, ge=1, description="rows in one forward pass of one rank; empty: batch_size / ranks"
    )
    eval_rows: int = Field(256, ge=1, description="held-out rows used for evaluation, at most")
    eval_every: EvalEvery = Field(
        0,
        description="steps between evaluations on held-out rows, or `epoch`: after each; 0: before training and after "
        "it only",
    )
    keep: str = Field(
        "last", description="the model that the stage leaves: last, or best(MEASURE) of the evaluations after a step"
    )
    log_every: int = Field(1, ge=1, description="steps between records in metrics.jsonl and TensorBoard")
    checkpoint_every: int = Field(
        100, ge=0, description="steps between checkpoints; 0: only when interrupted and after the last"
    )

    better: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    """Of the measures that `keep` may name: whether the least or the most is best."""

    @property
    def selection_metric(self) -> str | None:
        """The measure whose best evaluation says which model is kept; None: the last is."""
        return None if self.keep == "last" else self.keep.removeprefix("best(").removesuffix(")")

    @model_validator(mode="after")
    def _keeps(self) -> TrainingConfig:
        if self.keep != "last" and not re.fullmatch(r"best\(\w+\)", self.keep):
            raise error_at("keep", f"expected last or best(MEASURE), got {short_repr(self.keep)}")
        if self.selection_metric and self.selection_metric not in self.better:
            raise error_at(
                "keep",
                f"no model is best by {self.selection_metric!r}; use {' or '.join(_calls(self.better))}, or last",
            )
        if self.selection_metric and not self.eval_every:
            raise error_at("keep", f"{self.keep} compares evaluations during training; set eval_every, or keep last")
        return self

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


class PairsConfig(EpochConfig):
    """A stage whose rows are pairs of replies."""

    batch_size: int = Field(32, ge=1, description="pairs in one optimizer step, over all ranks")
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        description="pairs in one forward pass of one rank, which has twice as many rows; empty: batch_size / ranks",
    )
    eval_rows: int = Field(256, ge=1, description="held-out pairs used for evaluation, at most")


def _calls(measures: Iterable[str]) -> list[str]:
    return [f"best({measure})" for measure in measures]


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
