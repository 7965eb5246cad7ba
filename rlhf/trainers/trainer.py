"""What a stage is to the loop: a `Trainer`, whose evaluations return an `EvalResult`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rlhf.config.schema import TrainingConfig
from rlhf.data.stage_dataset import StageData
from rlhf.engine.engine import Metrics, TrainingEngine
from rlhf.reporting.step_records import RankStep


class EvalResult(NamedTuple):
    """Metrics of a model on held-out rows, and samples as `{"prompt", "completion"}`.

    `judged` are the judge's scores of the rows, in the same order at each evaluation. `rows` are numbers and texts of
    each row, written to `heldout.jsonl` only.
    """

    numbers: Metrics
    samples: Sequence[dict[str, str]] = ()
    judged: Sequence[float] = ()
    rows: Sequence[dict[str, Any]] = ()


class Trainer(Protocol):
    """A stage's models, data and algorithm, as `rlhf.trainers.loop.fit` drives them; every rank calls each method."""

    unit: str
    """The metric that counts a step's tokens or pairs; the recorded rate is this number per second."""

    data: StageData
    """The stage's examples."""

    @property
    def displayed(self) -> tuple[str, ...]:
        """Metrics that the progress display and the lines about evaluations show."""

    @property
    def settings(self) -> TrainingConfig:
        """The stage's section of the settings."""

    @property
    def total_steps(self) -> int:
        """Steps of the whole stage."""

    @property
    def epoch_steps(self) -> int | None:
        """Steps of an epoch; None if the stage has no epochs."""

    @property
    def engines(self) -> dict[str, TrainingEngine]:
        """The models that are trained, by the names that checkpoints use."""

    def step(self, index: int) -> Metrics:
        """Take step `index`, from 0, and return its metrics: the same on all ranks, `unit` among them."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the stage's models."""

    def repeat_scoring(self) -> Iterator[tuple[Any, Callable[[], object]]]:
        """Yield the micro-batches that the last step scored before its update, each with a function that does it again.

        A micro-batch has `input_ids` and `attention_mask`, as keys or attributes.
        """

    def describe_step(self) -> RankStep:
        """Return what the last step read and drew on this rank, for the stage's `steps.bin`."""

    def evaluate(self, when: str) -> EvalResult:
        """Measure the model on held-out rows; `when`, "before" or "after step 20", is for display."""

    def save(self, folder: Path) -> None:
        """Write the model into `folder`, complete or not at all."""

    def summarize(self) -> dict[str, Any]:
        """Log what was saved, once training is done, and return the summary's entries about models and data."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs in addition to the engines'."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
