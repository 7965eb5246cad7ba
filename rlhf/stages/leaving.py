"""What a stage leaves when it has trained: its model, its adapter, or both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.models.adapters import save_adapter
from rlhf.models.export import save_model
from rlhf.sharing import adapter_of
from rlhf.starts import starts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf.engine.training import TrainingEngine
    from rlhf.stages.context import StageContext

_LAST = ("dpo", "ppo")  # stages from which no other starts by itself


def leave(context: StageContext, engine: TrainingEngine, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write what `lora.save` asks for into `folder`, each part complete or not at all; every rank calls it.

    A model that other stages start from is left whatever it says, and so is the reward model's adapter: with it PPO's
    models can stand on one base.
    """
    save, stage, model = context.config.lora.save, context.directory.name, folder / context.directory.model.name
    adapted = engine.holding.lora.rank > 0
    merged = None if adapted and save == "adapter" and stage in _LAST else str(model)
    if merged:
        save_model(engine, tokenizer, model)
    if adapted and (save != "merged" or stage == "reward"):
        save_adapter(engine, adapter_of(str(model)), _start(context), merged)


def say_what_is_left(context: StageContext, engine: TrainingEngine) -> None:
    """Say where `leave` writes more than `lora.save` asks for."""
    stage = context.directory.name
    if engine.holding.lora.rank > 0 and context.config.lora.save == "adapter" and stage not in _LAST:
        context.say(f"{stage}: its model is left beside its adapter: later stages start from it")


def _start(context: StageContext) -> str | None:
    """The folder or hub name of the model that the stage trained; None: it was made for this run."""
    values = context.config.model_dump()
    first = starts(values, context.directory.name)[0]
    if named := first.named(values):
        return named
    earlier = context.run.stage(first.earlier) if first.earlier else None
    return str(earlier.model) if earlier and earlier.done else None
