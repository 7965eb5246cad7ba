"""The advantage estimators that a policy can be trained with, and what each brings along. Needs no torch.

An estimator is a pure function in `rlhf.objectives.advantages` and an entry here; the rest of a rollout and its updates
is the same for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

KLPlace = Literal["reward", "loss"]
KLEstimator = Literal["k1", "k2", "k3"]
LossMean = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class Estimator:
    """`function` in `rlhf.objectives.advantages`, whether it needs a critic, and what its paper sets.

    The fields from `completions` on are what the keys of `ppo` with these names come to where they are empty.
    """

    function: str
    critic: bool = False
    completions: int = 1
    least_completions: int = 1
    kl_in: KLPlace = "reward"
    kl_estimator: KLEstimator = "k1"
    loss_mean: LossMean = "token"
    whiten_advantages: bool = False


ESTIMATORS: Mapping[str, Estimator] = {
    "gae": Estimator("gae", critic=True, whiten_advantages=True),
}
