"""Halving finds the step that makes a difference at the end, on sides whose state is one number."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlhf.lockstep.bisection import compare_ends
from rlhf.lockstep.reference import LiveReference

STEPS = 16


class Numbers:
    """A side whose step adds 1 to its state; step `wrong` adds a little more, and rounding does so when perturbed."""

    states: ClassVar[dict[str, float]] = {}

    def __init__(self, wrong: int | None = None, *, evaluation: float = 0.0) -> None:
        self.wrong, self.evaluation, self.number = wrong, evaluation, 0.0
        self.facts: dict[str, Any] = {}

    def call(self, method: str, *args: Any, perturbed: int | None = None, **options: Any) -> Any:
        if method == "save_state":
            self.states[args[1]] = self.number
        elif method == "load_state":
            self.number = self.states[args[0]]
        elif method == "evaluate":
            return {"loss": self.number + self.evaluation, "tokens": 5.0}
        elif method == "take":
            self.number += 1 + 0.1 * (args[0] == self.wrong) + (0 if perturbed is None else 1e-5)
        return None


@pytest.fixture
def reference(tmp_path: Path) -> LiveReference:
    """Return A after its steps."""
    side = Numbers()
    reference = LiveReference(side, tmp_path)
    for number in range(STEPS):
        side.call("save_state", number, reference.state("sft", number))
        side.call("take", number, None)
    return reference


@pytest.mark.parametrize("wrong", [0, 1, 6, STEPS - 1])
def test_bisection_finds_the_wrong_step(reference: LiveReference, wrong: int) -> None:
    found = compare_ends(reference, Numbers(wrong), "sft", STEPS, lambda line: None)
    assert found is not None
    assert (found.metric, found.step) == ("loss", wrong + 1)
    assert found.value_b - found.value_a == pytest.approx(0.1)
    assert found.runs == 6  # the whole, the last state alone, and 4 halvings of 16


def test_bisection_of_equal_sides_finds_nothing(reference: LiveReference) -> None:
    assert compare_ends(reference, Numbers(), "sft", STEPS, lambda line: None) is None
    assert reference.side.number == STEPS  # A is where it was


def test_bisection_names_the_evaluation_if_one_state_is_evaluated_differently(reference: LiveReference) -> None:
    found = compare_ends(reference, Numbers(evaluation=1.0), "sft", STEPS, lambda line: None)
    assert found is not None and found.step == 0
