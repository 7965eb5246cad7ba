"""A stage's steps as numbers: the tensors of the first step, and of every step a mean and a size of each tensor.

PPO's steps take completions that are given, so that a difference of rounding cannot draw another token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlhf.certify.fixed_state import STEPS

if TYPE_CHECKING:
    from rlhf.lockstep.observations import Observed
    from rlhf.lockstep.side import Side

PERTURBED_EVERY = 10
"""Steps between those that are perturbed: the roundings of the others are a device's own."""

WEIGHTS = ("gradients", "update")
"""Phases with a tensor for each parameter; the curve has one number of all of a model's."""


class Name(NamedTuple):
    """A tensor of a stage's first step, or a number of its curve; `part` is a measure, or an update and micro-batch."""

    phase: str
    role: str
    name: str
    part: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.phase, self.role, self.name, self.part)))


@dataclass
class Trace:
    """The steps of one stage.

    Attributes:
        first: the tensors of the first step, up to its first update, of which they have the change of each weight.
        curve: numbers by step.
        ids: the completions of each step of PPO, [B, A].
    """

    first: dict[Name, Tensor] = field(default_factory=dict)
    curve: dict[Name, list[float]] = field(default_factory=dict)
    ids: list[Tensor] = field(default_factory=list)


def trace_steps(side: Side, steps: int, ids: Sequence[Tensor] = (), *, perturbed: int | None = None) -> Trace:
    """Take the first steps of the open stage.

    Args:
        side: the stage; its state is that before the first step.
        steps: the number of steps.
        ids: completions of PPO's steps; empty: they are drawn.
        perturbed: perturb each operator of every tenth step by one rounding, with this seed. With an odd one, all
            elements of a result get the same perturbation, as on a device whose function is inexact.
    """
    trace, before = Trace(), side.weights()
    for step in range(steps):
        options: dict[str, Any] = {"completions": ids[step] if ids else None}
        if perturbed is not None and step % PERTURBED_EVERY == 0:
            options |= {"perturbed": STEPS * perturbed + step, "together": perturbed % 2 == 1}
        observed = side.take(step, None, **options)
        changed = [_subtract(item, before) for item in observed]
        trace.ids += [item.tensor for item in observed if item.name == "completion_ids"]
        if not step:
            trace.first = {
                Name(item.phase, item.role, item.name, _describe_part(item)): item.tensor
                for item in changed
                if not item.update
            }
        for name, number in _summarize(changed).items():
            trace.curve.setdefault(name, []).append(number)
    return trace


def _subtract(item: Observed, before: dict[tuple[str, str], Tensor]) -> Observed:
    """Replace weights by their change."""
    if item.phase != "update":
        return item
    return item._replace(tensor=item.tensor.double() - before[item.role, item.name].double())


def _describe_part(item: Observed) -> str:
    return f"micro-batch {item.micro_batch}" if item.micro_batch >= 0 else ""


def _summarize(observed: Sequence[Observed]) -> dict[Name, float]:
    """Return the mean and the root mean square of a step's tensors, those of updates and micro-batches together.

    The mean of the drawn ids shows a generator that prefers some part of the vocabulary.
    """
    groups: dict[Name, list[Tensor]] = defaultdict(list)
    for item in observed:
        if item.tensor.is_floating_point() or item.phase == "rollout":
            which = "of all" if item.phase in WEIGHTS else item.name
            groups[Name(item.phase, item.role, which)].append(item.tensor.double().flatten())
    numbers: dict[Name, float] = {}
    for name, tensors in groups.items():
        values = torch.cat(tensors)
        numbers[name._replace(part="size")] = float(values.square().mean().sqrt())
        if name.phase not in WEIGHTS:
            numbers[name._replace(part="mean")] = float(values.mean())
    return numbers
