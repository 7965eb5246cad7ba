"""The sections of the supervised stages, and what all stages have: batches, steps, evaluation, checkpoints, AdamW."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from rlhf.config.rollout import ServerUrls
from rlhf.config.types import ConfigModel, Fraction, OptionalPathOrHubId, error_at, short_repr
from rlhf.errors import ConfigError

PreferenceLoss = Literal["sigmoid", "ipo", "robust"]


class OptimizerConfig(ConfigModel):
    """AdamW and its learning-rate schedule."""

    learning_rate: float = Field(1e-5, gt=0, description="peak learning rate")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay; not applied to biases and norms")
    betas: tuple[float, float] = Field((0.9, 0.95), description="decay rates of the first and second moment")
    eps: float = Field(1e-8, gt=0, description="term added to the denominator")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine",
        description="shape after the warm-up; wsd: constant, then a linear decay at the end (arXiv:2404.06395)",
    )
    warmup: float = Field(
        0.05,
        ge=0,
        description="steps over which the learning rate rises from 0: below 1 a fraction of all steps, else a number",
    )
    decay: Fraction = Field(0.1, description="wsd: fraction of the steps in the final decay")
    min_lr_ratio: Fraction = Field(0.1, description="learning rate of the last step, as a fraction of the peak")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")


def _validate_eval_every(value: Any) -> Any:
    """Return the steps between evaluations, or `epoch`; one error message covers both forms.

    Raises:
        ValueError: it is neither.
    """
    if value != "epoch" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ValueError(f"expected a number of steps, at least 0, or epoch, got {short_repr(value)}")
    return value


EvalEvery = Annotated[int | Literal["epoch"], BeforeValidator(_validate_eval_every)]


class TrainingConfig(ConfigModel):
    """Batches, steps, evaluation and checkpoints of any stage."""

    batch_size: int = Field(32, ge=1, description="rows per optimizer step, over all ranks")
    micro_batch_size: int | None = Field(
        None, ge=1, description="rows per forward pass on one rank; empty: batch_size / ranks"
    )
    eval_rows: int = Field(256, ge=1, description="maximum number of held-out rows used for evaluation")
    eval_every: EvalEvery = Field(
        0,
        description="steps between evaluations on held-out rows, or `epoch`: after each epoch; 0: only before and "
        "after training",
    )
    keep: str = Field(
        "last",
        description="model to save: last, or best(METRIC), the one with the best evaluation during training. Ruined "
        "models do not count, such as those with a KL above 1 nat per token (docs/reading-a-run.md)",
    )
    log_every: int = Field(
        1, ge=1, description="steps between records in metrics.jsonl and TensorBoard, after that of the first step"
    )
    checkpoint_every: int = Field(
        100, ge=0, description="steps between checkpoints; 0: only when interrupted and after the last step"
    )

    better: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    """The metrics that `keep` may name, each with `min` or `max`, which picks the better of two values."""

    @property
    def ends_early(self) -> bool:
        """True if training ends at the first evaluation at which the model is over-optimized."""
        return False

    @property
    def selection_metric(self) -> str | None:
        """The metric whose best evaluation selects the saved model; None if the last model is saved."""
        return None if self.keep == "last" else self.keep.removeprefix("best(").removesuffix(")")

    @model_validator(mode="after")
    def _check_keep(self) -> TrainingConfig:
        if self.keep != "last" and not re.fullmatch(r"best\(\w+\)", self.keep):
            raise error_at("keep", f"expected last or best(METRIC), got {short_repr(self.keep)}")
        if self.selection_metric and self.selection_metric not in self.better:
            choices = " or ".join(f"best({metric})" for metric in self.better)
            raise error_at(
                "keep", f"models cannot be selected by {self.selection_metric!r} in this stage; use {choices}, or last"
            )
        if self.selection_metric and not self.eval_every:
            raise error_at(
                "keep", f"{self.keep} needs evaluations during training; set eval_every, or set keep to last"
            )
        return self

    def micro_batch(self, world_size: int, *, section: str) -> int:
        """Return the rows per forward pass of one rank; `section` is this section's key.

        Raises:
            ConfigError: `batch_size` is not a whole number of micro-batches on `world_size` ranks.
        """
        return divide_batch(self.batch_size, self.micro_batch_size, world_size, f"{section}.batch_size", section)


class EpochConfig(TrainingConfig):
    """Length of a stage that passes over a data set."""

    epochs: int = Field(1, ge=1, description="passes over the stage's rows")
    max_steps: int | None = Field(
        None, ge=1, description="stop after this number of optimizer steps; empty: after `epochs`"
    )
    dropout: float | None = Field(
        None, ge=0, lt=1, description="dropout rate in training; empty: the model's own rates"
    )

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the optimizer steps of the stage."""
        steps = self.epochs * steps_per_epoch
        return min(steps, self.max_steps) if self.max_steps else steps


class SamplingConfig(ConfigModel):
    """How tokens are sampled from the policy."""

    temperature: float = Field(1.0, ge=0, description="0: always the most likely token")
    top_k: int = Field(0, ge=0, description="sample from the k most likely tokens; 0: from all")
    top_p: float = Field(
        1.0, gt=0, le=1, description="sample from the smallest set of tokens with this probability; 1: from all"
    )


class PairsConfig(EpochConfig):
    """A stage whose rows are pairs of replies."""

    batch_size: int = Field(32, ge=1, description="pairs per optimizer step, over all ranks")
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        description="pairs per forward pass on one rank, which has twice as many rows; empty: batch_size / ranks",
    )
    eval_rows: int = Field(256, ge=1, description="maximum number of held-out pairs used for evaluation")


class SFTConfig(EpochConfig):
    """Stage 1: supervised fine-tuning on demonstrations."""

    better: ClassVar = {"perplexity": min}

    loss_on: Literal["completion", "all"] = Field("completion", description="tokens that count in the loss")
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="AdamW and schedule")


class RewardConfig(PairsConfig):
    """Stage 2: a reward model from preferences."""

    better: ClassVar = {"accuracy": max, "loss": min}

    model: OptionalPathOrHubId = Field(
        None, description="folder or hub name of the model to start from; empty: this run's SFT model"
    )
    loss: Literal["token", "last"] = Field(
        "token",
        description="scores to compare: those of all tokens from the first difference of the two replies (token, as in "
        "DeepSpeed-Chat), or only that of each reply's last token (last, as in InstructGPT)",
    )
    margin: float = Field(
        0.0,
        ge=0,
        description="how much higher chosen replies should score: -log sigmoid(chosen - rejected - margin); added to "
        "the pair's own margin (data.datasets.*.columns.margin)",
    )
    center: float = Field(
        0.0,
        ge=0,
        description="weight of (chosen + rejected)^2 at the last tokens, which keeps scores near 0; e.g. 0.01",
    )
    reset_final_norm: Literal["auto", True, False] = Field(
        "auto",
        description="reset the norm below a new head: true, false; auto: if its unequal gains would cost accuracy in "
        "bf16",
    )
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="AdamW and schedule")


class DPOOptimizerConfig(OptimizerConfig):
    """AdamW and its learning-rate schedule; DPO needs a tenth of the rate of fine-tuning."""

    learning_rate: float = Field(1e-6, gt=0, description="peak learning rate")


class DPOConfig(PairsConfig):
    """DPO: a policy from preferences, without a reward model (arXiv:2305.18290)."""

    better: ClassVar = {"loss": min, "accuracy": max}

    model: OptionalPathOrHubId = Field(
        None, description="folder or hub name of the policy to start from; empty: this run's SFT model"
    )
    beta: float = Field(
        0.1, gt=0, description="strength of the pull towards the reference; the policy moves further for smaller values"
    )
    loss: PreferenceLoss = Field(
        "sigmoid",
        description="sigmoid: DPO's own; ipo: stops at a margin of 1 / (2 beta) (arXiv:2310.12036); robust: unbiased "
        "if labels are flipped at random (arXiv:2403.00409)",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="assumed fraction of pairs with a wrong label: sigmoid becomes less certain (conservative DPO), "
        "robust corrects for it",
    )
    reference: Literal["precomputed", "beside"] = Field(
        "precomputed",
        description="log-probabilities of the initial policy: precomputed once before training, or computed in every "
        "step by a model next to the policy (beside; with LoRA by the policy itself, without its adapters)",
    )
    dropout: float | None = Field(
        0.0,
        ge=0,
        lt=1,
        description="dropout rate in training; the reference uses none; empty: the model's own rates",
    )
    optimizer: DPOOptimizerConfig = Field(DPOOptimizerConfig(), description="AdamW and schedule")

    @model_validator(mode="after")
    def _check_label_smoothing(self) -> DPOConfig:
        if self.loss == "ipo" and self.label_smoothing:
            raise error_at("label_smoothing", "not used by the ipo loss; set 0, or choose dpo.loss=sigmoid or robust")
        if self.loss == "robust" and not self.label_smoothing:
            raise error_at("loss", "robust equals sigmoid if dpo.label_smoothing is 0; set dpo.label_smoothing")
        return self


class DistillConfig(EpochConfig):
    """Distillation: a student learns a teacher's distribution of each token that it draws itself (arXiv:2306.13649)."""

    better: ClassVar = {"loss": min, "judge_reward": max, "approved_share": max}

    model: OptionalPathOrHubId = Field(
        None, description="folder or hub name of the student to start from; empty: this run's SFT model"
    )
    teacher: OptionalPathOrHubId = Field(
        None,
        description="folder or hub name of the model to learn from, which has the student's tokenizer; or the folder "
        "of a LoRA adapter, which is added to the model that it was trained on",
    )
    teacher_servers: ServerUrls = Field(
        (),
        description="addresses of rollout servers (rlhf serve TEACHER --rollouts) that have the model to learn from, "
        "in place of distill.teacher: they return the log-probabilities of drawn tokens, not whole distributions",
    )
    teacher_timeout: float = Field(600.0, gt=0, description="seconds that such a server may take for a micro-batch")
    judge: OptionalPathOrHubId = Field(
        None,
        description="folder or hub name of a reward model that scores held-out completions; it never trains the "
        "student; empty: none",
    )
    divergence: Literal["reverse", "forward"] = Field(
        "reverse",
        description="what is reduced at each token: reverse, KL(student || teacher), by which a small student leaves "
        "out what it cannot learn; forward, KL(teacher || student), by which it covers all that the teacher may write",
    )
    batch_size: int = Field(32, ge=1, description="prompts per step, each completed once, over all ranks")
    updates: int = Field(
        1,
        ge=1,
        description="updates on the completions of a step: more learn more from each completion, but from text that "
        "the student would no longer write",
    )
    eval_rows: int = Field(256, ge=1, description="maximum number of held-out prompts used for evaluation")
    generation_batch_size: int | None = Field(
        None,
        ge=1,
        description="maximum number of rows that a rank generates at a time, which changes samples by rounding "
        "only; empty: its share of batch_size",
    )
    dropout: float | None = Field(
        0.0,
        ge=0,
        lt=1,
        description="dropout rate in training; completions are drawn without; empty: the model's own rates",
    )
    sampling: SamplingConfig = Field(
        SamplingConfig(), description="how the student draws; the divergence is that at temperature 1 in any case"
    )
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="AdamW and schedule")

    @model_validator(mode="after")
    def _check_judge(self) -> DistillConfig:
        if self.selection_metric == "judge_reward" and not self.judge:
            raise error_at("keep", f"{self.keep} needs distill.judge, a reward model; set that too")
        return self

    @model_validator(mode="after")
    def _check_servers(self) -> DistillConfig:
        if not self.teacher_servers:
            if self.teacher_timeout != DistillConfig.model_fields["teacher_timeout"].default:
                raise error_at("teacher_timeout", "has no effect without distill.teacher_servers; remove it")
            return self
        why = "with distill.teacher_servers, which know the probabilities of drawn tokens only"
        if self.teacher:
            raise error_at("teacher", "has no effect with distill.teacher_servers; remove one of the two")
        if self.divergence == "forward":
            raise error_at("divergence", f"forward is not possible {why}; set reverse, or name a folder in teacher")
        if self.sampling != SamplingConfig():
            raise error_at("sampling", f"temperature 1 and all tokens are needed {why}; remove this key")
        if self.updates > 1:
            raise error_at("updates", f"must be 1 {why}: later ones would be on text of an older student")
        return self

    def generation_rows(self, world_size: int) -> int:
        """Return the most rows that a rank generates at a time."""
        share = self.batch_size // world_size
        return min(self.generation_batch_size or share, share)


def divide_batch(rows: int, micro: int | None, world_size: int, key: str, section: str) -> int:
    """Return the rows per forward pass of one rank: `micro`, or the rank's share of the batch.

    Args:
        rows: rows of the batch over all ranks.
        micro: the setting `micro_batch_size` of `section`.
        world_size: number of ranks.
        key: the key that sets `rows`, for errors.
        section: key of the section.

    Raises:
        ConfigError: `rows` is not a multiple of the rows that the ranks process in one pass.
    """
    if rows % world_size:
        raise ConfigError(f"{key}: {rows} rows cannot be divided among {world_size} ranks; make it a multiple of that")
    micro = micro or rows // world_size
    if rows % (micro * world_size):
        raise ConfigError(
            f"{key}: {rows} is not a multiple of {section}.micro_batch_size {micro} x {world_size} ranks; "
            "change one of them"
        )
    return micro
