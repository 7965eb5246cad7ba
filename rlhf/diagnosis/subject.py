"""A stage as checks see it, and what a check decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from rlhf.config.schema import Config, Stage
from rlhf.diagnosis.records import Curve, RunRecords, StageRecords
from rlhf.reporting.rules import Topic

State = Literal["fine", "look here", "wrong", "cannot tell"]


class Outcome(NamedTuple):
    """The part of a finding that a check's function decides."""

    state: State
    text: str
    step: int | None = None


class Subject(NamedTuple):
    """A stage and its run, as checks see them."""

    stage: StageRecords
    run: RunRecords

    @property
    def config(self) -> Config:
        """The run's settings."""
        return self.run.config

    @property
    def precision(self) -> str:
        """The precision that the stage was trained in; empty if it is not recorded."""
        recorded = self.run.description.get("stages", {}).get(self.stage.name, {})
        return str(recorded.get("precision") or "")

    def heldout(self, name: str) -> Curve:
        """Return the curve of a held-out number, up to the model that the stage saves."""
        steps, values = self.stage.curve(f"heldout_{name}")
        count = sum(step <= self.stage.final_step for step in steps)
        return Curve(steps[:count], values[:count])

    def final(self, name: str) -> float:
        """Return a recorded held-out number of the model that the stage saves."""
        value = self.stage.final(name)
        assert value is not None
        return value


class Check(NamedTuple):
    """A question about the records of a stage.

    Attributes:
        needs: numbers without which the check cannot tell.
        examine: returns the outcome; None if the check does not apply to this run.
        remedy: what to do if it is not fine; keys in braces are shown with their values, `*` is the stage.
        is_invariant: the check is an invariant: if a run lacks its numbers, the report says so.
    """

    name: str
    topic: Topic
    stages: Sequence[Stage]
    needs: Sequence[str]
    examine: Callable[[Subject], Outcome | None]
    remedy: str
    is_invariant: bool = False


def tail(curve: Curve) -> list[float]:
    """Return the last quarter of a curve's values, at least one."""
    return curve.values[-max(len(curve.values) // 4, 1) :]
