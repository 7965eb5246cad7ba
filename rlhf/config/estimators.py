"""The advantage estimators that a policy can be trained with, and what each brings along. Needs no torch.

An estimator is a pure function in `rlhf.losses.advantages` and an entry here; the rest of a rollout and its updates
is the same for all. Which to take (`--set ppo.estimator=grpo`):

| name | an advantage is | it costs | take it where |
|---|---|---|---|
| gae | what follows a token beyond the critic's guess, token by token | a critic: memory and updates of a second model | rewards come late in long completions, prompts are many and completions of each few; PPO as in the papers on RLHF |
| rloo | a completion's reward, KL penalty included, less the mean of the prompt's other completions | 2 or more completions a prompt, no critic | a reward model scores whole completions: unbiased, the fewest settings |
| grpo | the same less the mean of all, in deviations of the group; KL in the loss | several completions a prompt, no critic | rewards are checked rather than learned (right or wrong); `ppo.group_std=false` with `ppo.loss_mean=constant` is Dr. GRPO, which favours neither short completions nor prompts on which all do alike |
| reinforce++ | rewards from a token on, in deviations of the whole batch | nothing: no critic, one completion a prompt | memory is short, prompts are many and alike in how hard they are |
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
    """`function` in `rlhf.losses.advantages`, whether it needs a critic, and what its paper sets.

    `keys` are those of `ppo` that are for this one and not for every other; not `critic_optimizer`, which recipes have
    for whoever changes nothing but the estimator. The fields from `group_size` on are
    the defaults of the keys of `ppo` with these names; `group_size` is the default of `completions_per_prompt`.
    """

    function: str
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
        "gae", critic=True, keys=("critic", "critic_dropout", "value_clip", "gamma", "lam"), whiten_advantages=True
    ),
    # The gradient of the paper is that of a sum over a completion's tokens, so a constant divides it.
    "rloo": Estimator("rloo", min_group_size=2, group_size=4, loss_mean="constant"),
    "grpo": Estimator(
        "grpo",
        keys=("group_std",),
        min_group_size=2,
        group_size=8,
        kl_in="loss",
        kl_estimator="k3",
        loss_mean="sequence",
    ),
    "reinforce++": Estimator("reinforce_plus_plus", keys=("gamma",), whiten_advantages=True),
}
