"""The policy that DPO ends with is the best one by its loss: in a language whose completions can all be listed.

Preferences are in the exact proportions of Bradley and Terry's model of known rewards, P(y over z) =
exp(r(y)) / (exp(r(y)) + exp(r(z))): exp(r) is a whole number for every completion, so the proportions are too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accelerators import Accelerator
from rlhf.data.examples import Pair
from rlhf.data.stage_dataset import StageData
from rlhf.trainers.dpo import DPOTrainer
from rlhf.trainers.loop import fit
from tests.helpers import llama
from tests.in_process import ROW, one_model, stage_context
from tests.optimum.language import (
    BETA,
    COMPLETIONS,
    LENGTH,
    PROMPT,
    PROMPT_COLUMNS,
    SIZES,
    WORDS,
    Distance,
    log_probabilities,
    optimum,
    tokenizer,
)

STRENGTHS = random.Random(5).choices((1, 2, 4), k=len(COMPLETIONS))
REWARDS = torch.tensor(STRENGTHS).double().log()
# In a ring, each completion against the two after it.
COMPARED = [(place, (place + ahead) % len(COMPLETIONS)) for place in range(len(COMPLETIONS)) for ahead in (1, 2)]


def votes(first: int, second: int, *, flipped: bool = False) -> tuple[int, int]:
    """How often each of two completions is the preferred one; `flipped`: where a third of the labels is."""
    for_first, for_second = STRENGTHS[first], STRENGTHS[second]
    if flipped:
        for_first, for_second = 2 * for_first + for_second, for_first + 2 * for_second
    common = math.gcd(for_first, for_second)
    return for_first // common, for_second // common


def pairs(*, flipped: bool) -> list[Pair]:
    rows = []
    for first, second in COMPARED:
        replies = [[*COMPLETIONS[place]] for place in (first, second)]
        for count, (chosen, rejected) in zip(
            votes(first, second, flipped=flipped), (replies, replies[::-1]), strict=True
        ):
            rows += [Pair(PROMPT.prompt_ids, chosen, rejected, ROW)] * count
    return rows


def least_squares(compared: Sequence[tuple[int, int]], tau: float) -> Tensor:
    """log (best / reference) by the ipo loss, up to a constant: the nearest to (2 P - 1) / (2 tau) for every pair."""
    differences, wanted = torch.zeros(len(compared), len(COMPLETIONS)).double(), torch.zeros(len(compared), 1).double()
    for row, (first, second) in enumerate(compared):
        ayes, noes = votes(first, second)
        weight = math.sqrt(ayes + noes)
        differences[row, first], differences[row, second] = weight, -weight
        wanted[row] = weight * (ayes - noes) / (ayes + noes) / (2 * tau)
    return torch.linalg.lstsq(differences, wanted, driver="gelsd").solution[:, 0]


def trained(accelerator: Accelerator, folder: Path, **changes: Any) -> tuple[Tensor, Tensor]:
    """[completions]: log-probabilities before and after."""
    rows = pairs(flipped="label_smoothing" in changes)
    settings = {
        "beta": BETA,
        "batch_size": len(rows),
        "epochs": 90,
        "eval_rows": 1,
        "checkpoint_every": 0,
        "optimizer": {"learning_rate": 1e-2, "warmup": 0.02, "min_lr_ratio": 0.0},
        **changes,
    }
    data = {"max_prompt_length": PROMPT_COLUMNS, "max_completion_length": LENGTH}
    context = stage_context(accelerator, folder, "dpo", {"data": data, "dpo": settings})
    model = llama(len(WORDS), **SIZES)
    before = log_probabilities(model)
    fit(DPOTrainer(context, one_model(model), tokenizer(), StageData(rows, rows[:1], [])), context)
    return before, log_probabilities(model)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="sigmoid"),
        pytest.param(
            {"loss": "robust", "label_smoothing": 1 / 3},
            id="robust, a third of the labels flipped",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_policy_becomes_the_optimum_of_known_rewards(
    accelerator: Accelerator, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """arXiv:2305.18290, equation 4; arXiv:2403.00409: flipped labels move the noise, not the optimum."""
    before, after = trained(accelerator, tmp_path, **changes)
    best = optimum(before, REWARDS, BETA)
    at_first, at_last = (Distance.between(policy, best, REWARDS) for policy in (before, after))
    assert min(at_first.forward, at_first.backward) > 0.3, "there is nothing to learn"
    assert max(at_last.forward, at_last.backward) < 0.01, (at_first, at_last)


@pytest.mark.slow
def test_with_ipo_the_policy_comes_as_near_to_its_margins_as_any(accelerator: Accelerator, tmp_path: Path) -> None:
    tau = 0.12
    before, after = trained(accelerator, tmp_path, loss="ipo", beta=tau)
    best = (before + least_squares(COMPARED, tau)).log_softmax(-1)
    at_first, at_last = (Distance.between(policy, best, REWARDS) for policy in (before, after))
    assert min(at_first.forward, at_first.backward) > 0.3, "there is nothing to learn"
    assert max(at_last.forward, at_last.backward) < 0.01, (at_first, at_last)


def test_ipo_margins_of_all_pairs_are_those_of_its_paper() -> None:
    """arXiv:2310.12036, equation 10: reference exp(E[P(y over another)] / tau), the other drawn like those compared."""
    everyone = range(len(COMPLETIONS))
    # As often each: the votes of a pair are shares of one.
    shares = torch.tensor([[STRENGTHS[a] / (STRENGTHS[a] + STRENGTHS[b]) for b in everyone] for a in everyone]).double()
    wanted = shares.mean(1) / BETA
    differences = torch.tensor([[(a == c) - (b == c) for c in everyone] for a in everyone for b in everyone]).double()
    nearest = torch.linalg.lstsq(differences, ((2 * shares - 1) / (2 * BETA)).reshape(-1, 1), driver="gelsd").solution
    torch.testing.assert_close(nearest[:, 0], wanted - wanted.mean())
