"""Tokens that a device draws for uniform numbers all over [0, 1), against the distribution in float64.

Each number determines a token: the first whose cumulative probability exceeds it. So no statistics are needed, and a
device that never draws some part of the vocabulary is found however rare that part is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rlhf.config.schema import SamplingConfig
from rlhf.generation.decode_state import sample

if TYPE_CHECKING:
    from accelerators import Accelerator

SETTINGS = {
    "all tokens": SamplingConfig(),
    "temperature 0.7": SamplingConfig(temperature=0.7),
    "top-k": SamplingConfig(top_k=50),
    "top-p": SamplingConfig(top_p=0.9),
    "top-k and top-p": SamplingConfig(temperature=1.5, top_k=200, top_p=0.5),
}
VOCABULARY = 1003  # not a multiple of the chunks in which `sample` adds up probabilities
DRAWS = 4096
SLACK = 1e-4
"""How far cumulative probabilities and log-probabilities may be from those in float64."""


class Draws(NamedTuple):
    """How far the drawn tokens are from the right ones, as a cumulative probability, and log-probabilities, in nats."""

    distance: float
    log_probs: float


def compare_sampling(accelerator: Accelerator) -> dict[str, Draws]:
    """Return for each setting how far the tokens and log-probabilities of `sample` on the device are from float64's.

    NaN and tokens outside of the vocabulary are infinitely far.
    """
    device, host, draw = accelerator.device(), accelerator.host_device(), accelerator.kernels.get("sampling")
    logits = make_logits()
    uniform = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
    found: dict[str, Draws] = {}
    for name, config in SETTINGS.items():
        rows = logits.expand(DRAWS, -1).float().to(device)
        drawn, log_probs = sample(rows, uniform.float().to(device), config, draw=draw)
        found[name] = measure(logits, uniform, drawn.to(host).long(), log_probs.to(host).double(), config)
    return found


def make_logits() -> Tensor:
    """Return logits, [VOCABULARY] float64, exact in float32, no two of them equal, likely tokens anywhere."""
    order = torch.arange(VOCABULARY) * 389 % VOCABULARY
    return -(order.double() / 128)


def measure(logits: Tensor, uniform: Tensor, drawn: Tensor, log_probs: Tensor, config: SamplingConfig) -> Draws:
    """Return how far drawn tokens and their log-probabilities are from the definition, computed in float64.

    Args:
        logits: [V] float64.
        uniform: [N] float64, the number that determines each token.
        drawn: [N] int64.
        log_probs: [N] float64, of each token before top-k and top-p.
        config: how the tokens were drawn.
    """
    if not bool(((drawn >= 0) & (drawn < len(logits))).all()):
        return Draws(float("inf"), float("inf"))
    scaled = logits / config.temperature
    probabilities, order = scaled.softmax(-1), torch.arange(len(logits))
    if config.top_k or config.top_p < 1:
        order = scaled.argsort(descending=True)
        kept = probabilities[order][: config.top_k or None]
        before = (kept / kept.sum()).cumsum(-1) - kept / kept.sum()
        kept = torch.where(before < config.top_p, kept, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order[: len(kept)], kept)
        probabilities /= probabilities.sum()
    above = torch.empty_like(probabilities)
    above[order] = probabilities[order].cumsum(-1)
    below = above - probabilities
    distance = torch.maximum(below[drawn] - uniform, uniform - above[drawn])
    distance = torch.where(probabilities[drawn] > 0, distance, torch.inf)
    gap = (log_probs - scaled.log_softmax(-1)[drawn]).abs().nan_to_num(nan=torch.inf)
    return Draws(max(float(distance.max()), 0.0), float(gap.max()))
