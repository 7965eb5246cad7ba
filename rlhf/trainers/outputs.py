"""Saves the result of a stage: its model, its adapter, or both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.checkpoint.adapters import save_adapter
from rlhf.checkpoint.export import save_model
from rlhf.config.schema import EVERY_STAGE
from rlhf.roles.base_sharing import ADAPTER
from rlhf.roles.lineage import base_models, resolve_base_model
from rlhf.runs.stage_directory import AVERAGE, CRITIC

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf.engine.engine import TrainingEngine
    from rlhf.trainers.context import StageContext

_LAST = ("dpo", "ppo")  # stages from which no other starts by default


def save_outputs(
    context: StageContext,
    engine: TrainingEngine,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    critic: TrainingEngine | None = None,
) -> None:
    """Write what `lora.save` asks for into `folder`, each part complete or not at all; every rank calls it.

    A model that other stages start from is always saved, and so is the reward model's adapter: with it PPO's models
    can share one base. The moving average of the weights, if there is one, is saved in the same forms, and the critic
    if `ppo.save_critic` is set.
    """
    with context.phases.running("saving"):
        if critic and context.config.ppo.save_critic:
            save_model(critic, tokenizer, folder / CRITIC)
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
    """Log what `save_outputs` wrote in addition to what `lora.save` asks for."""
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
