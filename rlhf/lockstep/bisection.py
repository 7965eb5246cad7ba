"""Find the step that makes a difference which no single step shows: only held-out metrics after many steps differ.

Both backends take all steps freely, from one state. If their metrics then differ, B starts from A's state after some
steps: with A's first steps the difference is gone or not, and halving finds the first step that brings it back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rlhf.config.schema import Stage
from rlhf.lockstep.reference import PERTURBATIONS, LiveReference
from rlhf.lockstep.rounding import SPREAD

_RELATIVE = 1e-6  # of a metric: below what is displayed


class EndDifference(NamedTuple):
    """A held-out metric that differs after all steps.

    Attributes:
        metric: the one that is farthest beyond its band.
        value_a, value_b, band: its values, and how much it may differ.
        step: the step that makes the difference, from 1; 0: the evaluation of one state differs.
        runs: how often B has run to the end.
    """

    stage: str
    metric: str
    value_a: float
    value_b: float
    band: float
    step: int
    runs: int


def compare_ends(
    reference: LiveReference, other: Any, stage: Stage, steps: int, say: Callable[[str], None]
) -> EndDifference | None:
    """Compare the held-out metrics after `steps` free steps, and find the step that makes them differ.

    A has just taken the steps, and has kept the state before each.
    """
    states = [reference.state(stage, number) for number in range(steps + 1)]
    reference.side.call("save_state", steps, states[steps])
    expected = reference.side.call("evaluate")
    bands = {name: _RELATIVE * abs(value) for name, value in expected.items()}
    for seed in range(PERTURBATIONS):
        say(f"{stage}: A takes its steps with perturbed operators, {seed + 1} of {PERTURBATIONS}")
        for name, value in _run(reference.side, states[0], 0, steps, perturbed=seed).items():
            bands[name] = max(bands[name], SPREAD * abs(value - expected[name]))
    reference.side.call("load_state", states[steps])
    runs = 0

    def find_worst(start: int) -> tuple[float, str, float]:
        """Return the metric that is farthest beyond its band if B starts from A's state after `start` steps."""
        nonlocal runs
        runs += 1
        say(f"{stage}: B takes steps {start + 1} to {steps} by itself")
        numbers = _run(other, states[start], start, steps)
        return max((_excess(numbers[name], expected[name], bands[name]), name, numbers[name]) for name in expected)

    excess, metric, value = find_worst(0)
    if excess <= 1:
        return None
    differs, agrees = 0, steps
    if find_worst(steps)[0] > 1:
        return EndDifference(stage, metric, expected[metric], value, bands[metric], 0, runs)
    while agrees - differs > 1:
        middle = (differs + agrees) // 2
        if find_worst(middle)[0] > 1:
            differs = middle
        else:
            agrees = middle
    return EndDifference(stage, metric, expected[metric], value, bands[metric], agrees, runs)


def _run(side: Any, state: str, first: int, steps: int, **options: Any) -> Mapping[str, float]:
    """Take the steps from `first` on freely, from a state, and return the held-out metrics."""
    side.call("load_state", state)
    for step in range(first, steps):
        side.call("take", step, None, **options)
    metrics: Mapping[str, float] = side.call("evaluate")
    return metrics


def _excess(value: float, expected: float, band: float) -> float:
    """Return a difference in bands; infinite if only one number is finite."""
    gap = abs(value - expected)
    if gap == 0 or (value != value and expected != expected):
        return 0.0
    return gap / band if band and gap == gap else float("inf")
