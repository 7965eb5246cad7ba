"""Statistics that may show over-optimization while it happens, ours and those that others publish.

Each is a function of a run up to one evaluation that returns a number, higher if the run looks worse; none of them sees
the rule of the embedded world.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from rlhf.diagnosis.checks import PRICE_FALL, find_kl_price
from rlhf.diagnosis.records import Curve
from rlhf.utils.statistics import SIGNIFICANT


@dataclass(frozen=True)
class Prefix:
    """A run up to one evaluation: the values of its held-out numbers and of its training numbers so far."""

    heldout: dict[str, list[float]]
    training: dict[str, list[float]]


def cut(result: dict[str, Any], evaluations: int) -> Prefix:
    """Return the first `evaluations` evaluations of a run, and the steps before them."""
    steps = result["steps"][evaluations - 1]
    return Prefix(
        {name.removeprefix("heldout_"): values[:evaluations] for name, values in result["heldout"].items()},
        {name: values[:steps] for name, values in result["training"].items()},
    )


def _price_of_kl(run: Prefix) -> float:
    """Return how many times less reward a late nat of KL buys than the best early one did; 0 while KL has settled."""
    steps = list(range(len(run.heldout["kl"])))
    kl, reward = (Curve(steps, run.heldout[name]) for name in ("kl", "reward"))
    price = find_kl_price(kl, reward, run.heldout["response_length"][-1])
    return price.fall if price else 0.0


def _kl_per_token(run: Prefix) -> float:
    return run.heldout["kl"][-1] / max(run.heldout["response_length"][-1], 1)


def _entropy_fall(run: Prefix) -> float:
    return 1 - run.training["entropy"][-1] / run.training["entropy"][0]


def _low_entropy(run: Prefix) -> float:
    return -fmean(run.training["entropy"][-50:])


def _distance_of_length(run: Prefix) -> float:
    lengths = run.training["response_length"]
    start = lengths[: max(len(lengths) // 5, 10)]
    return abs(fmean(lengths[-10:]) - fmean(start)) / max(pstdev(start), 1e-6)


def _fall_of_deviation(run: Prefix) -> float:
    deviations = run.training["reward_std"]
    return fmean(deviations[:10]) / max(fmean(deviations[-10:]), 1e-6)


def _kl_over_rolling_mean(run: Prefix) -> float:
    values = run.training["kl"]
    if len(values) < 20:
        return 0.0
    earlier = values[-30:-1]
    return (values[-1] - fmean(earlier)) / max(pstdev(earlier), 1e-6)


def _alike(run: Prefix) -> float:
    return run.heldout["distinct_2"][0] / max(run.heldout["distinct_2"][-1], 1e-6)


def _unexplained(run: Prefix) -> float:
    values = run.training.get("explained_variance")
    return -fmean(values[-10:]) if values else 0.0


def judge_fall(run: Prefix) -> float:
    """Return the fall of the judge's score since its best after training began; 0 if the reward fell, too.

    It is in standard errors. `ppo.stop: over_optimized` ends a run if it is above 3.
    """
    judged, reward = run.heldout["judge_reward"][1:], run.heldout["reward"][1:]
    rises = reward[-1] > reward[judged.index(max(judged))]
    return run.heldout["judge_fall"][-1] if rises else 0.0


SIGNALS: dict[str, tuple[str, Callable[[Prefix], float]]] = {
    "judge": ("rlhf", judge_fall),
    "price of KL": ("rlhf", _price_of_kl),
    "KL per token": ("rlhf", _kl_per_token),
    "entropy, relative to its start": ("post-training-toolkit", _entropy_fall),
    "entropy, absolute": ("rlwatch", _low_entropy),
    "length": ("rewardspy", _distance_of_length),
    "reward deviation": ("rewardspy", _fall_of_deviation),
    "KL over its rolling mean": ("rlwatch", _kl_over_rolling_mean),
    "KL, absolute": ("post-training-toolkit", lambda run: run.heldout["kl"][-1]),
    "distinct pairs": ("rlhf", _alike),
    "truncation": ("post-training-toolkit", lambda run: run.heldout["truncated_share"][-1]),
    "clip share": ("post-training-toolkit", lambda run: fmean(run.training["clip_fraction"][-10:])),
    "explained variance": ("post-training-toolkit", _unexplained),
}
"""Each signal's source and statistic."""

PUBLISHED = {
    "entropy, relative to its start": 0.5,
    "entropy, absolute": -1.0,
    "length": 3.0,
    "reward deviation": 5.0,
    "KL over its rolling mean": 3.0,
    "KL, absolute": 0.3,
    "truncation": 0.3,
    "clip share": 0.3,
    "explained variance": 0.0,
    "price of KL": PRICE_FALL,
    "judge": SIGNIFICANT,
}
"""The limits that their sources state, and ours."""


def area_under_curve(bad: Sequence[float], good: Sequence[float]) -> float:
    """Return the probability that a bad run has a higher statistic than a good one; ties count half."""
    return fmean((one > other) + (one == other) / 2 for one in bad for other in good)


def limit_at(good: Sequence[float], false_alarms: float) -> float:
    """Return the lowest limit that at most this share of good runs exceeds."""
    ordered = sorted(good)
    return ordered[min(math.ceil((1 - false_alarms) * len(ordered)), len(ordered)) - 1]
