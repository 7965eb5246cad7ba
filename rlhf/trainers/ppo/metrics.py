"""Numbers that describe a rollout: reward, drift from the reference, length, variety; and means over many."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.engine import distributed
from rlhf.engine.engine import Batch
from rlhf.engine.metric_sums import Metrics
from rlhf.losses.log_probs import masked
from rlhf.trainers.ppo.scores import is_part


def rollout_statistics(scored: Batch, sequences: Batch, row_mask: Tensor) -> Batch:
    """Sums over real rows and tokens of what `PPO.score` and `PPO.generate` gave of a rollout; `means` divides them."""
    rows, mask = row_mask.float(), sequences["action_mask"]
    log_ratio = masked(scored["log_probs"] - scored["ref_log_probs"], mask)
    return {
        "rows": rows.sum(),
        "tokens": mask.sum(),
        "reward": (scored["scores"] * rows).sum(),
        "reward_squared": (scored["scores"] ** 2 * rows).sum(),
        "kl": log_ratio.sum(),
        "entropy": masked(scored["entropy"], mask).sum(),
        "ended": (sequences["ended"] * rows).sum(),
        **lengths(sequences, rows),
        **{name: (part * rows).sum() for name, part in scored.items() if is_part(name)},
    }


def lengths(sequences: Batch, rows: Tensor) -> Batch:
    """Sums over real rows of the lengths of prompts and of whole texts, and of their squares."""
    whole = sequences["attention_mask"].sum(1) * rows
    prompts = whole - sequences["action_mask"].sum(1)
    return {
        "prompt_tokens": prompts.sum(),
        "prompt_pairs": (prompts**2).sum(),
        "text_tokens": whole.sum(),
        "text_pairs": (whole**2).sum(),
    }


def means(sums: Metrics) -> Metrics:
    """Means of what `rollout_statistics` summed: per sequence, but entropy per token."""
    rows = max(sums["rows"], 1)
    mean = sums["reward"] / rows
    return {
        "tokens": sums["tokens"],
        "reward": mean,
        "reward_std": max(sums["reward_squared"] / rows - mean**2, 0.0) ** 0.5,
        "kl": sums["kl"] / rows,
        "entropy": sums["entropy"] / max(sums["tokens"], 1),
        "response_length": sums["tokens"] / rows,
        "truncated_share": 1 - sums["ended"] / rows,
        **{name: number / rows for name, number in sums.items() if is_part(name)},
    }


def critic_statistics(values: Tensor, returns: Tensor, mask: Tensor) -> Batch:
    """Sums of squares about their means over all ranks, [B, A] each; `explained_variance` divides them.

    The means are taken off first: of returns that lie close together, sums of squares have no digits left.
    """
    both = torch.stack([returns, returns - values])
    *totals, count = distributed.all_sum(torch.stack([*(both * mask).sum((1, 2)), mask.sum()]))
    mean = torch.stack(totals) / count.clamp_min(1)
    spread, error = (((both - mean[:, None, None]) * mask) ** 2).sum((1, 2))
    return {"spread": spread, "error": error}


def explained_variance(sums: Metrics) -> float:
    """1 - Var(returns - values) / Var(returns): of a perfect critic 1, of a constant one 0, as where returns agree."""
    return 1 - sums["error"] / sums["spread"] if sums["spread"] else 0.0


class Moments:
    """Mean and variance of all values so far, on all ranks; `state`: their count, mean and variance, on the device."""

    def __init__(self) -> None:
        self.state = torch.zeros(3)

    def scale(self, values: Tensor, mask: Tensor) -> Tensor:
        """Take in the values [B] where `mask` [B] is 1, then scale them to mean 0 and deviation 1 of all so far.

        What two sets of values have together follows from each one's count, mean and variance (T. Chan, G. Golub and
        R. LeVeque, 1979), so that no digits are lost however many there are.
        """
        count, mean, variance = self.state.to(values.device)
        here, total = distributed.all_sum(torch.stack([mask.sum(), (values * mask).sum()]))
        own_mean = total / here.clamp_min(1)
        own_variance = distributed.all_sum((((values - own_mean) * mask) ** 2).sum()) / here.clamp_min(1)
        share, apart = here / (count + here).clamp_min(1), own_mean - mean
        mean = mean + share * apart
        variance = variance + share * (own_variance - variance) + share * (1 - share) * apart**2
        self.state = torch.stack([count + here, mean, variance])
        return (values - mean) * torch.rsqrt(variance + 1e-8)


class MovingMean:
    """Mean of a number over steps, each weighted 0.9 times the one after it; `state`: weighted sum, and the weights'.

    Divided by the sum of the weights, as Adam's moments are (arXiv:1412.6980, section 3), the first steps count as
    later ones do.
    """

    def __init__(self) -> None:
        self.state = (0.0, 0.0)

    def add(self, number: float) -> float:
        """The mean up to and with `number`."""
        total, weights = (0.9 * part + 0.1 * new for part, new in zip(self.state, (number, 1.0)))
        self.state = total, weights
        return total / weights
