"""The models that each stage starts from, as the settings say: named, or what an earlier stage of the run left.

A dumped configuration flows in, this version's or one that a run recorded; `Start`s flow out. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rlhf.config.estimators import ESTIMATORS
from rlhf.config.schema import Stage


class Start(NamedTuple):
    """A model that a stage starts from: the one that `key` names, else what the `earlier` stage of the run left.

    `otherwise` is the key that names it where `key` is empty. `new_head`: a scalar head is drawn where it has none.
    """

    key: str
    earlier: Stage | None = None
    scalar_head: bool = False
    new_head: bool = False
    otherwise: str = ""

    def named(self, config: Mapping[str, Any]) -> str | None:
        """The folder or hub name in a dumped configuration; None where it names none."""
        for key in filter(None, (self.key, self.otherwise)):
            section, name = key.split(".")
            if named := config.get(section, {}).get(name):
                return str(named)
        return None


MODEL = Start("model.path")
REWARD = Start("reward.model", "sft", scalar_head=True, new_head=True)
DPO = Start("dpo.model", "sft")
ACTOR = Start("ppo.actor", "sft")
REWARD_MODEL = Start("ppo.reward_model", "reward", scalar_head=True)
CRITIC = Start("ppo.critic", "sft", scalar_head=True, new_head=True, otherwise="ppo.actor")
"""The critic where it does not begin as the reward model."""
ALL = (MODEL, REWARD, DPO, ACTOR, REWARD_MODEL, CRITIC)


def starts(config: Mapping[str, Any], stage: Stage) -> tuple[Start, ...]:
    """What `stage` starts from by a dumped configuration; the first is the model that it leaves trained."""
    if stage == "sft":
        return (MODEL,)
    if stage == "reward":
        return (REWARD,)
    if stage == "dpo":
        return (DPO,)
    return _of_ppo(config.get("ppo", {}))


def _of_ppo(values: Mapping[str, Any]) -> tuple[Start, ...]:
    """The reward model is among them where its score weighs anything.

    The critic is where the estimator has one, and it does not begin as the reward model.
    """
    scored = values.get("reward_weight", 1.0) != 0
    estimator = ESTIMATORS[values.get("estimator", "gae")]
    apart = estimator.critic and (values.get("critic") or not scored)
    return (ACTOR, *([REWARD_MODEL] if scored else []), *([CRITIC] if apart else []))
