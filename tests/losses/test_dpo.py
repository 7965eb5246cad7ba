"""DPO's losses, by what their papers say of them, of single pairs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from accelerators import ShapePolicy
from rlhf.data.batches import collate_dpo
from rlhf.data.examples import NumberedPair
from rlhf.losses.dpo import preference_losses, sequence_log_probs
from tests.in_process import ROW

MARGINS = torch.tensor([-3.0, -0.5, 0.0, 0.5, 3.0], dtype=torch.float64)


def losses(margins: torch.Tensor = MARGINS, **settings: Any) -> torch.Tensor:
    return preference_losses(margins, **{"loss": "sigmoid", "beta": 0.5, **settings})


def test_sigmoid_loss_is_the_negative_log_likelihood() -> None:
    """arXiv:2305.18290, equations 6 and 7: P(chosen over rejected) = 1 / (1 + exp(beta rejected - beta chosen))."""
    for margin, actual in zip(MARGINS.tolist(), losses(beta=0.3).tolist(), strict=True):
        assert actual == pytest.approx(math.log(1 + math.exp(-0.3 * margin)), rel=1e-12)
    assert losses(torch.zeros(1), beta=7.0).item() == pytest.approx(math.log(2))


def test_sigmoid_gradient_weighs_pairs_by_implicit_reward() -> None:
    """arXiv:2305.18290, section 4: - beta sigmoid(reward of the rejected - reward of the chosen)."""
    margins = MARGINS.clone().requires_grad_()
    losses(margins, beta=0.3).sum().backward()
    assert margins.grad is not None
    torch.testing.assert_close(margins.grad, -0.3 * torch.sigmoid(-0.3 * MARGINS))


def test_a_doubted_label_is_the_other_one_as_often() -> None:
    """Conservative DPO: the best margin is where P(chosen over rejected) is 1 less the doubt, and no further."""
    actual = losses(label_smoothing=0.2)
    torch.testing.assert_close(actual, 0.8 * losses() + 0.2 * losses(-MARGINS))
    best = torch.tensor([math.log(0.8 / 0.2) / 0.5], dtype=torch.float64, requires_grad=True)
    losses(best, label_smoothing=0.2).sum().backward()
    assert best.grad is not None and abs(best.grad.item()) < 1e-12


def test_robust_loss_is_unbiased_for_noisy_labels() -> None:
    """arXiv:2403.00409, lemma 3.1."""
    noisy = 0.7 * losses(loss="robust", label_smoothing=0.3) + 0.3 * losses(
        -MARGINS, loss="robust", label_smoothing=0.3
    )
    torch.testing.assert_close(noisy, losses())


def test_ipo_wants_a_margin_of_half_one_over_tau_and_no_more() -> None:
    """arXiv:2310.12036, equation 17."""
    assert losses(torch.tensor([2.0]), loss="ipo", beta=0.25).item() == 0
    torch.testing.assert_close(losses(loss="ipo", beta=0.25), (MARGINS - 2) ** 2)


@pytest.mark.parametrize("loss", ["sigmoid", "robust"])
def test_extreme_margins_are_finite(loss: str) -> None:
    margins = torch.tensor([-1e4, 1e4], requires_grad=True)
    actual = losses(margins, loss=loss, label_smoothing=0.1)
    actual.sum().backward()
    assert actual.isfinite().all() and margins.grad is not None and margins.grad.isfinite().all()


def test_a_reply_s_log_probability_is_the_sum_of_its_own_tokens() -> None:
    log_probs = torch.tensor([[-1.0, -2.0, -4.0], [-8.0, -torch.inf, torch.nan]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert sequence_log_probs(log_probs, mask).tolist() == [-7, -8]


def test_pairs_are_padded_so_that_replies_begin_in_one_column() -> None:
    pairs = [
        NumberedPair([1, 2], [3], [4, 5, 6], ROW, number=7),
        NumberedPair([9], [8, 7], [6], ROW, number=3),
    ]
    batch = collate_dpo(pairs, 1, policy=ShapePolicy("dynamic"), prompt=4, completion=4, pad_token_id=0)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0, 0], [0, 9, 8, 7, 0], [1, 2, 4, 5, 6], [0, 9, 6, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [1, 1, 1, 1, 1], [0, 1, 1, 0, 0]]
    wanted = [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert batch["completion_mask"].int().tolist() == wanted
    assert batch["number"].tolist() == [7, 3] and batch["pair_mask"].tolist() == [True, False]
    static = collate_dpo(pairs, policy=ShapePolicy("static"), prompt=4, completion=5, pad_token_id=0)
    assert static["input_ids"].shape == (4, 9) and static["completion_mask"].shape == (4, 5)
