"""The section of the schema about DPO: which loss, how far from the reference, and how that is held."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from rlhf.config.training import OptimizerConfig, PairsConfig
from rlhf.config.types import OptionalPathOrHubId
from rlhf.config.validation_errors import error_at

PreferenceLoss = Literal["sigmoid", "ipo", "robust"]


class DPOOptimizerConfig(OptimizerConfig):
    """AdamW and its learning-rate schedule; DPO wants a tenth of what fine-tuning takes."""

    learning_rate: float = Field(1e-6, gt=0, description="peak learning rate")


class DPOConfig(PairsConfig):
    """DPO: a policy from preferences, without a reward model (arXiv:2305.18290)."""

    better: ClassVar = {"loss": min, "accuracy": max}

    model: OptionalPathOrHubId = Field(
        None, description="folder or hub name of the policy to start from; empty: this run's SFT model"
    )
    beta: float = Field(
        0.1, gt=0, description="how much it costs to leave the reference: the smaller, the further the policy goes"
    )
    loss: PreferenceLoss = Field(
        "sigmoid",
        description="sigmoid: DPO's own; ipo: a margin of 1 / (2 beta), no more (arXiv:2310.12036); robust: unbiased "
        "where labels are flipped (arXiv:2403.00409)",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="share of pairs whose label is taken to be wrong: sigmoid then stays unsure (conservative DPO), "
        "robust corrects for it",
    )
    reference: Literal["precomputed", "beside"] = Field(
        "precomputed",
        description="log-probabilities of the policy as it was: precomputed once, before training; or in every step, "
        "by a model held beside it (with LoRA by itself, adapters off)",
    )
    dropout: float | None = Field(
        0.0,
        ge=0,
        lt=1,
        description="part of each layer's activations dropped in training; the reference is scored without; empty: the "
        "model's own rates",
    )
    optimizer: DPOOptimizerConfig = Field(DPOOptimizerConfig(), description="AdamW and schedule")

    @model_validator(mode="after")
    def _fit_together(self) -> DPOConfig:
        if self.loss == "ipo" and self.label_smoothing:
            raise error_at("label_smoothing", "the ipo loss has none; set 0, or choose dpo.loss=sigmoid or robust")
        if self.loss == "robust" and not self.label_smoothing:
            raise error_at(
                "loss", "robust is the sigmoid loss where dpo.label_smoothing is 0; say there what share is wrong"
            )
        return self
