"""The models that stages start from: named in the settings, or trained by an earlier stage of the run.

`base_models` lists the references of a stage, and `resolve_base_model` turns a reference into a folder or hub name.
Plan, preflight, loading, sweeps and profiles all use these functions. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from rlhf.config.schema import EVERY_STAGE, Config, Stage
from rlhf.roles.model_identity import read_adapter_base


class BaseModelRef(NamedTuple):
    """A model that a stage starts from: the model that `key` names, else the one that stage `trained_by` trains.

    Attributes:
        key: the configuration key that names the model, for example `ppo.actor`.
        trained_by: the stage of the run that trains the model if no key names one.
        scalar_head: the model scores texts in place of predicting tokens.
        new_head: a scalar head is initialized if the model has none.
        fallback_key: the key that names the model if `key` is empty.
        substitute: what to set to train without the model; empty if it is always needed.
        takes_adapter: `key` may also name the folder of a LoRA adapter.
    """

    key: str
    trained_by: Stage | None = None
    scalar_head: bool = False
    new_head: bool = False
    fallback_key: str = ""
    substitute: str = ""
    takes_adapter: bool = False

    @property
    def alternatives(self) -> str:
        """What to set if the stage `trained_by` is not to train the model."""
        return f"{self.key}, or {self.substitute}" if self.substitute else self.key

    def named_in(self, config: Config) -> str | None:
        """Return the folder or hub name that the settings give; None if they name no model."""
        for key in filter(None, (self.key, self.fallback_key)):
            section, name = key.split(".")
            if named := getattr(getattr(config, section), name):
                return str(named)
        return None


class ResolvedBaseModel(NamedTuple):
    """The weights that a reference stands for.

    `path` is their folder or hub name, None for the embedded model; `through` are the stages of this run that have yet
    to train them, the earliest first. `adapter` is the folder of a LoRA adapter that is added to the weights.
    """

    ref: BaseModelRef
    path: str | None
    through: tuple[Stage, ...] = ()
    adapter: str | None = None


MODEL = BaseModelRef("model.path")
REWARD = BaseModelRef("reward.model", "sft", scalar_head=True, new_head=True)
DPO = BaseModelRef("dpo.model", "sft")
ACTOR = BaseModelRef("ppo.actor", "sft")
REWARD_MODEL = BaseModelRef(
    "ppo.reward_model",
    "reward",
    scalar_head=True,
    substitute="ppo.reward_weight=0 to use ppo.reward_functions alone",
)
CRITIC = BaseModelRef("ppo.critic", "sft", scalar_head=True, new_head=True, fallback_key="ppo.actor")
"""The critic, if it does not start from the reward model."""
JUDGE = BaseModelRef("ppo.judge", scalar_head=True)
STUDENT = BaseModelRef("distill.model", "sft")
TEACHER = BaseModelRef("distill.teacher", takes_adapter=True)
STUDENTS_JUDGE = BaseModelRef("distill.judge", scalar_head=True)
ALL = (MODEL, REWARD, DPO, ACTOR, REWARD_MODEL, CRITIC, JUDGE, STUDENT, TEACHER, STUDENTS_JUDGE)


def base_models(config: Config, stage: Stage) -> tuple[BaseModelRef, ...]:
    """Return the models that `stage` starts from; the first is the one that it trains and saves.

    PPO has a reward model only if its score has a weight, a separate critic only if the estimator needs one that does
    not start from the reward model, and a judge only if the settings name one.
    """
    if stage == "distill":
        frozen = {TEACHER: not config.distill.teacher_servers, STUDENTS_JUDGE: config.distill.judge}
        return (STUDENT, *(ref for ref, is_used in frozen.items() if is_used))
    if stage != "ppo":
        return ({"sft": MODEL, "reward": REWARD, "dpo": DPO}[stage],)
    has_reward_model = config.ppo.reward_weight != 0
    has_own_critic = config.ppo.method.critic and (config.ppo.critic or not has_reward_model)
    others = {REWARD_MODEL: has_reward_model, CRITIC: has_own_critic, JUDGE: config.ppo.judge}
    return (ACTOR, *(ref for ref, is_used in others.items() if is_used))


def resolve_base_model(
    config: Config,
    ref: BaseModelRef,
    pending: Collection[Stage] = EVERY_STAGE,
    finished_model: Callable[[Stage, str], str] | None = None,
) -> ResolvedBaseModel:
    """Return the weights that a reference stands for.

    `pending` are the stages of the run that have not trained their model yet. `finished_model` returns the model of a
    finished stage, for the settings that would replace it; it is not needed if all stages are pending.

    Raises:
        RunError: from `finished_model`: a stage that is not pending has no model.
        ModelError: an adapter names no model that it was trained on.
    """
    named = ref.named_in(config)
    if named and ref.takes_adapter and (base := read_adapter_base(named)):
        return ResolvedBaseModel(ref, base, adapter=named)
    if named or ref.trained_by is None:
        return ResolvedBaseModel(ref, named)
    if ref.trained_by not in pending and finished_model:
        return ResolvedBaseModel(ref, finished_model(ref.trained_by, ref.alternatives))
    before = resolve_base_model(config, base_models(config, ref.trained_by)[0], pending, finished_model)
    return ResolvedBaseModel(ref, before.path, (*before.through, ref.trained_by))


def resolve_base_models(
    config: Config,
    stage: Stage,
    pending: Collection[Stage] = EVERY_STAGE,
    finished_model: Callable[[Stage, str], str] | None = None,
) -> tuple[ResolvedBaseModel, ...]:
    """Resolve each of the models that `stage` starts from, as `resolve_base_model` does."""
    return tuple(resolve_base_model(config, ref, pending, finished_model) for ref in base_models(config, stage))
