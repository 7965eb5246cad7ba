"""The advantage estimators, and the defaults of each. Needs no torch.

An estimator is a pure function in `rlhf.losses.advantages` and an entry here; rollouts and updates are the same for
all. How to choose (`--set ppo.estimator=grpo`):

| name | advantage | cost | use it if |
|---|---|---|---|
| gae | rewards beyond the critic's prediction, token by token | a critic: memory and updates of a second model | rewards come late in long completions; many prompts with few completions each; PPO as in the papers on RLHF |
| rloo | a completion's reward, KL penalty included, minus the mean of the prompt's other completions | 2 or more completions per prompt, no critic | a reward model scores whole completions: unbiased, the fewest settings |
| grpo | the same minus the mean of all, divided by the group's standard deviation; KL in the loss | several completions per prompt, no critic | rewards are checked rather than learned (right or wrong); `ppo.group_std=false` with `ppo.loss_mean=constant` is Dr. GRPO, which favors neither short completions nor prompts on which all completions do equally well |
| reinforce++ | the rewards from a token on, scaled by mean and standard deviation of the whole batch | nothing: no critic, one completion per prompt | memory is short; many prompts of similar difficulty |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

KLPlace = Literal["reward", "loss"]
KLEstimator = Literal["k1", "k2", "k3"]
LossMean = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator and the defaults of its paper.

    Attributes:
        function: its name in `rlhf.losses.advantages`.
        title: the algorithm's name for people.
        critic: the estimator needs a critic.
        keys: keys of `ppo` that not every estimator uses. `critic_optimizer` is not among them, so that a recipe stays
            valid if only its estimator changes.
        min_group_size: the fewest completions per prompt that the estimator can compare.
        group_size: default of `ppo.completions_per_prompt`.
        kl_in: default of the key of `ppo` with this name, as are the fields below.
    """

    function: str
    title: str
    critic: bool = False
    keys: tuple[str, ...] = ()
    min_group_size: int = 1
    group_size: int = 1
    kl_in: KLPlace = "reward"
    kl_estimator: KLEstimator = "k1"
    loss_mean: LossMean = "token"
    whiten_advantages: bool = False


ESTIMATORS: Mapping[str, Estimator] = {
    "gae": Estimator(
        "gae",
        "PPO",
        critic=True,
        keys=("critic", "critic_dropout", "value_clip", "gamma", "lam"),
        whiten_advantages=True,
    ),
    # The paper's gradient is that of a sum over a completion's tokens, so a constant divides it.
    "rloo": Estimator("rloo", "RLOO", min_group_size=2, group_size=4, loss_mean="constant"),
    "grpo": Estimator(
        "grpo",
        "GRPO",
        keys=("group_std",),
        min_group_size=2,
        group_size=8,
        kl_in="loss",
        kl_estimator="k3",
        loss_mean="sequence",
    ),
    "reinforce++": Estimator("reinforce_plus_plus", "REINFORCE++", keys=("gamma",), whiten_advantages=True),
}
