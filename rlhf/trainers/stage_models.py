"""Load the models of a stage by role, in the form of their placements, and save the one that the stage trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.checkpoint.export import save_adapter, save_model
from rlhf.config.schema import EVERY_STAGE
from rlhf.data.toy_world import build_world_tokenizer
from rlhf.engine.deepspeed_config import build_deepspeed_config
from rlhf.evaluation.models import merge_adapter
from rlhf.models.compatibility import EMBEDDED_MODEL, choose_attention, describe_attention, load_generation_config
from rlhf.models.loading import build_llama, load_causal_lm, load_model_tokenizer, load_scalar_head
from rlhf.models.quantized import quantize_on_load
from rlhf.models.shared_base import build_on_base
from rlhf.models.weight_loading import PlaceParameter, place_in_memory, place_sharded
from rlhf.roles.base_sharing import ADAPTER, Sharing, decide_sharing, decide_teacher_sharing
from rlhf.roles.lineage import (
    ACTOR,
    CRITIC,
    REWARD_MODEL,
    BaseModelRef,
    ResolvedBaseModel,
    base_models,
    resolve_base_model,
    resolve_base_models,
)
from rlhf.roles.roles import ModelPlacement, RoleName
from rlhf.runs.stage_directory import AVERAGE
from rlhf.runs.stage_directory import CRITIC as CRITIC_FOLDER

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from rlhf.engine.engine import TrainingEngine
    from rlhf.trainers.context import StageContext


class ModelFactory:
    """The models of a stage, loaded when asked for, and the tokenizer that they share.

    Attributes:
        tokenizer: the tokenizer of the model that the stage trains.
    """

    def __init__(self, context: StageContext) -> None:
        self.context = context
        bases = resolve_stage_bases(context)
        self._paths: dict[BaseModelRef, Any] = {base.ref: base.path for base in bases}
        self._adapters = {base.ref: base.adapter for base in bases if base.adapter}
        self.path = bases[0].path
        self.tokenizer = self._load_tokenizer()
        self._attention = self._choose_attention()
        self._sharing = Sharing()
        if context.directory.name == "ppo":
            assert self.path
            reward_model = self._paths.get(REWARD_MODEL)
            self._sharing = decide_sharing(context.config, context.placements, self._paths[ACTOR], reward_model)
        elif context.directory.name == "distill":
            self._sharing = decide_teacher_sharing(context.config, context.placements, bases[0])
        if line := self._sharing.describe(context.placements):
            context.say(f"{context.directory.name}: {line}")
        self._lines: set[str] = set()

    @property
    def generation_settings(self) -> GenerationConfig | None:
        """The generation settings of the model that the stage trains; None for the embedded one."""
        return load_generation_config(self.path, self.context.config.model) if self.path else None

    def causal_lm(self, role: RoleName) -> Any:
        """Load a role's causal language model."""
        context, config = self.context, self.context.config
        placement = context.placements[role]
        path, attention = self._paths[placement.role.base], self._attention[placement.role.base]
        if donor := self._sharing.donors.get(role):
            shared = self._sharing.adapter if role == "teacher" else None
            return build_on_base(context.bases[donor], config.model, attention=attention, adapter=shared)
        if path is None:
            return build_llama(
                self.tokenizer,
                attention=attention,
                seed=config.seed,
                max_length=config.data.max_length,
                multiple=config.model.vocabulary_multiple,
            )
        adapter = self._adapters.get(placement.role.base)  # merged into weights in float32, whole on each rank
        put = None if adapter else self._parameter_maker(placement)
        model = load_causal_lm(config.model, self.tokenizer, attention=attention, path=path, put=put)
        return merge_adapter(model, adapter) if adapter else model

    def scalar_head(self, role: RoleName) -> Any:
        """Load a role's model with a scalar head."""
        context, config = self.context, self.context.config
        placement = context.placements[role]
        path, attention = self._paths[placement.role.base], self._attention[placement.role.base]
        if donor := self._sharing.donors.get(role):
            base, adapter = context.bases[donor], self._sharing.adapter
            return build_on_base(base, config.model, attention=attention, scalar_head=True, adapter=adapter)
        assert path
        new_head: dict[str, Any] = {}
        if context.directory.name == "reward":
            new_head = {"seed": config.seed, "reset_norm": config.reward.reset_final_norm}
        elif placement.role.base == CRITIC:
            new_head = {"seed": config.seed, "reset_norm": "auto"}
        return load_scalar_head(
            config.model,
            self.tokenizer,
            attention=attention,
            path=path,
            put=self._parameter_maker(placement),
            say=self._say_once,
            **new_head,
        )

    def _say_once(self, line: str) -> None:
        """Log a line once; critic and reward model may start from the same model and produce the same line."""
        if line not in self._lines:
            self._lines.add(line)
            self.context.say(line)

    def _load_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.path is None:
            return build_world_tokenizer()
        # `model.tokenizer` belongs to the model that fine-tuning starts from; the models of other stages have a
        # tokenizer next to them.
        path = None if self.context.directory.name == "sft" else self.path
        tokenizer, notes = load_model_tokenizer(self.context.config.model, path)
        for line in notes:
            self.context.say(f"note: {line}")
        return tokenizer

    def _choose_attention(self) -> dict[BaseModelRef, str]:
        """Choose transformers' attention for each base model; log a choice that is not the backend's first."""
        context = self.context
        choices = {
            path: choose_attention(context.accelerator, path, context.config.model) for path in self._paths.values()
        }
        if line := describe_attention({_short_name(path): choice for path, choice in choices.items()}):
            context.say(line)
        return {ref: choices[path].name for ref, path in self._paths.items()}

    def _parameter_maker(self, placement: ModelPlacement) -> PlaceParameter:
        """Return the function that creates a role's parameters, in the compute precision and its engine's placement."""
        accelerator, precision = self.context.accelerator, self.context.precision
        sharded = placement.zero_stage == 3
        offloaded = not placement.role.trained and placement.offloads_parameters and not sharded
        place = accelerator.host_device() if offloaded else accelerator.device()
        if sharded:
            put = place_sharded(build_deepspeed_config(placement, accelerator, precision, 1, 1), precision.dtype)
        else:
            put = place_in_memory(precision.dtype, place)
        if kind := placement.quantization:
            packing = accelerator.kernels.get("quantized_weights", required=True)
            put = quantize_on_load(put, kind, packing, place, sharded=sharded)
        return put


def resolve_stage_bases(context: StageContext) -> tuple[ResolvedBaseModel, ...]:
    """Return the models that a stage starts from, first the one that it trains; earlier stages must be complete."""
    return resolve_base_models(context.config, context.directory.name, (), context.run.finished_model)


def _short_name(path: str | None) -> str:
    """Return the end of a model's path for messages, with the stage's name if a stage saved it."""
    return "/".join(Path(path).parts[-2 if path.endswith("/model") else -1 :]) if path else EMBEDDED_MODEL


_LAST = ("dpo", "ppo", "distill")  # stages from which no other stage starts by default


def save_outputs(
    context: StageContext,
    engine: TrainingEngine,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    critic: TrainingEngine | None = None,
) -> None:
    """Write model, adapter or both (`lora.save`) into `folder`, each complete or not at all; every rank calls it.

    Models that other stages start from are always saved, and so is the reward model's adapter, with which PPO's models
    can share one base. A moving average of the weights is saved in the same forms, and the critic if `ppo.save_critic`
    is set.
    """
    with context.phases.running("saving"):
        if critic and context.config.ppo.save_critic:
            save_model(critic, tokenizer, folder / CRITIC_FOLDER)
        _write(context, engine, tokenizer, folder, "")
        if engine.ema:
            with engine.ema.in_place():
                _write(context, engine, tokenizer, folder, AVERAGE)


def _write(
    context: StageContext, engine: TrainingEngine, tokenizer: PreTrainedTokenizerBase, folder: Path, suffix: str
) -> None:
    save, stage, model = context.config.lora.save, context.directory.name, folder / f"model{suffix}"
    adapted = engine.placement.lora.rank > 0
    merged = None if adapted and save == "adapter" and stage in _LAST else str(model)
    if merged:
        save_model(engine, tokenizer, model)
    if adapted and (save != "merged" or stage == "reward"):
        save_adapter(engine, folder / f"{ADAPTER}{suffix}", _base_model(context), merged)


def log_outputs(context: StageContext, engine: TrainingEngine) -> None:
    """Log the outputs that `save_outputs` wrote in addition to those of `lora.save`."""
    stage = context.directory.name
    if engine.ema:
        folders = " and ".join(f"{context.directory.path / name}" for name in context.directory.averages)
        context.say(f"{stage}: the moving average of its weights is saved in {folders}")
    if engine.placement.lora.rank > 0 and context.config.lora.save == "adapter" and stage not in _LAST:
        context.say(f"{stage}: its model is saved next to its adapter: later stages start from it")


def _base_model(context: StageContext) -> str | None:
    """Return the folder or hub id of the model that the stage trained; None if this run created it."""
    config, run = context.config, context.run
    pending = [stage for stage in EVERY_STAGE if not run.stage(stage).done]
    base = resolve_base_model(config, base_models(config, context.directory.name)[0], pending, run.finished_model)
    return None if base.through else base.path
