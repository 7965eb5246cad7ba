"""The check of drawn tokens (operation `sampling`): against the cumulative distribution in float64."""

from __future__ import annotations

import math
import unittest
from typing import TYPE_CHECKING

import torch

from accelerators.testing.reference import checked_precisions

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

VOCABULARY, DRAWS = 5003, 64

BOUND = 1e-4
"""How far cumulative probabilities and log-probabilities may be from those in float64."""


def check_sampling(accelerator: Accelerator) -> None:
    """Check tokens, log-probabilities and a row of NaN, in the precision of trainers and at two temperatures."""
    draw = accelerator.kernels.get("sampling")
    if draw is None:
        raise unittest.SkipTest(accelerator.kernels.capabilities()["sampling"].reason)
    order = torch.arange(VOCABULARY) * 389 % VOCABULARY  # likely tokens are anywhere
    flat = torch.where(order % 3 == 0, -torch.inf, -order / 512)  # a third of the tokens is never drawn
    steep = torch.where(order == 0, 20.0, -order / 64)
    uniform = (torch.arange(DRAWS) + 0.5) / DRAWS
    for precision in checked_precisions(accelerator):
        logits = torch.stack([flat, steep]).to(precision.dtype).repeat_interleave(DRAWS, 0)
        given = accelerator.to_device((logits, uniform.repeat(2)))
        for temperature in (1.0, 0.7):
            what = f"{precision.name}, sampling at temperature {temperature}"
            tokens, log_probs = (result.cpu() for result in draw(*given, temperature))
            probabilities = (logits.double() / temperature).softmax(-1)
            known = ((tokens >= 0) & (tokens < VOCABULARY)).all()
            assert known, f"{what}: draws tokens outside of the vocabulary of {VOCABULARY}"
            places = tokens.unsqueeze(1)
            drawn, above = (
                numbers.gather(1, places).squeeze(1) for numbers in (probabilities, probabilities.cumsum(1))
            )
            assert drawn.min() > 0, f"{what}: draws tokens of probability 0"
            distance = torch.maximum(above - drawn - uniform.repeat(2), uniform.repeat(2) - above).max().item()
            assert distance <= BOUND, f"{what}: draws tokens whose cumulative probability is off by {distance:.2g}"
            gap = (log_probs.double() - drawn.log()).abs().nan_to_num(nan=torch.inf).max().item()
            assert gap <= BOUND, f"{what}: log-probabilities differ by {gap:.2g}"
        of_nan = draw(given[0][:1] * torch.nan, given[1][:1], 1.0)[1].item()
        assert math.isnan(of_nan), f"{precision.name}, sampling: the log-probability of NaN is {of_nan}, expected NaN"
