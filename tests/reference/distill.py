"""Distillation on the student's own samples (arXiv:2306.13649), and one step: token by token, over all words."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.reference.adamw import AdamW
from tests.reference.network import Network

Drawn = tuple[list[int], list[int]]
"""Token ids of a prompt, and of what the student wrote after it."""


def divergences(student: Network, teacher: Network, drawn: Drawn, *, reverse: bool) -> list[Tensor]:
    """At each token that was drawn."""
    prompt, completion = drawn
    places = range(len(prompt) - 1, len(prompt) + len(completion) - 1)
    of_student = student.logits(prompt + completion).softmax(-1)
    with torch.no_grad():
        of_teacher = teacher.logits(prompt + completion).softmax(-1)
    pairs = [(of_student[place], of_teacher[place]) for place in places]
    return [(p * (p / q).log()).sum() for p, q in (pair if reverse else pair[::-1] for pair in pairs)]


def step(
    student: Network, teacher: Network, optimizer: AdamW, settings: Any, rows: Sequence[Drawn]
) -> dict[str, float]:
    """The updates on a global batch; returns what is recorded of them."""
    reverse = settings.divergence == "reverse"
    numbers: dict[str, float] = {}
    for _ in range(settings.updates):
        tokens = [token for row in rows for token in divergences(student, teacher, row, reverse=reverse)]
        loss = sum(tokens) / len(tokens)
        numbers = numbers or {"learning_rate": optimizer.rate, "loss": loss.item(), "tokens": float(len(tokens))}
        norm = optimizer.step(loss)
    return numbers | {"grad_norm": norm}


def evaluation(
    student: Network, teacher: Network, settings: Any, rows: Sequence[Drawn], ends: Collection[int]
) -> dict[str, float]:
    """Means over tokens, and over rows."""
    reverse = settings.divergence == "reverse"
    with torch.no_grad():
        tokens = [token.item() for row in rows for token in divergences(student, teacher, row, reverse=reverse)]
    return {
        "loss": math.fsum(tokens) / len(tokens),
        "response_length": len(tokens) / len(rows),
        "truncated_share": sum(completion[-1] not in ends for _, completion in rows) / len(rows),
    }
