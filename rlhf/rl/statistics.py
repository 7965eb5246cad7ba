"""Numbers that describe a rollout: reward, drift from the reference, length, variety."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from rlhf.engine.statistics import Numbers
from rlhf.engine.training import Batch
from rlhf.objectives.tokens import masked
from rlhf.rl.rewards import is_part


def rollout_statistics(scored: Batch, mask: Tensor, row_mask: Tensor) -> Batch:
    """Sums over real rows and tokens of a rollout; `means` divides them."""
    rows = row_mask.float()
    log_ratio = masked(scored["log_probs"] - scored["ref_log_probs"], mask)
    return {
        "rows": rows.sum(),
        "tokens": mask.sum(),
        "reward": (scored["scores"] * rows).sum(),
        "reward_squared": (scored["scores"] ** 2 * rows).sum(),
        "kl": log_ratio.sum(),
        "entropy": masked(scored["entropy"], mask).sum(),
        **{name: (part * rows).sum() for name, part in scored.items() if is_part(name)},
    }


def means(sums: Numbers) -> Numbers:
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
        **{name: number / rows for name, number in sums.items() if is_part(name)},
    }


def distinct_2(completions: Sequence[Sequence[int]]) -> float:
    """Different pairs of neighbouring tokens, as a part of all such pairs (arXiv:1510.03055): 0 same, 1 varied."""
    pairs = [pair for ids in completions for pair in itertools.pairwise(ids)]
    return len(set(pairs)) / max(len(pairs), 1)
