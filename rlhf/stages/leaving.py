"""What a stage leaves when it has trained: its model, its adapter, or both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.models.adapters import save_adapter
from rlhf.models.export import save_model
from rlhf.settings import STARTS
from rlhf.sharing import ADAPTER, adapter_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf.engine.training import TrainingEngine
    from rlhf.stages.context import StageContext


def leave(context: StageContext, engine: TrainingEngine, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write what `lora.save` asks for; every rank calls it.

    A model that other stages start from is left whatever it says, and so is the reward model's adapter: with it PPO's
    models can stand on one base.
    """
    save, stage = context.config.lora.save, context.directory.name
    _leave(context, engine, tokenizer, context.directory.model, adapter_of(str(context.directory.model)))
    if engine.holding.lora.rank and save == "adapter" and stage != "ppo":
        context.say(f"{stage}: its model is left beside its adapter: later stages start from it")


def leave_average(context: StageContext, engine: TrainingEngine, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the same of a model whose moving average is in its place; every rank calls it."""
    model = context.directory.average
    adapter = model.with_name(f"{ADAPTER}-ema")
    left = _leave(context, engine, tokenizer, model, adapter)
    context.say(f"{context.directory.name}: the average of its weights is left in {left}")


def _leave(
    context: StageContext, engine: TrainingEngine, tokenizer: PreTrainedTokenizerBase, model: Path, adapter: Path
) -> Path:
    """Write the weights as they are now to `model`, `adapter` or both, and give one of these, `model` if it is."""
    save, stage = context.config.lora.save, context.directory.name
    adapted = engine.holding.lora.rank > 0
    merged = None if adapted and save == "adapter" and stage == "ppo" else str(model)
    if merged:
        save_model(engine, tokenizer, model)
    if adapted and (save != "merged" or stage == "reward"):
        save_adapter(engine, adapter, _start(context), merged)
    return model if merged else adapter


def _start(context: StageContext) -> str | None:
    """The folder or hub name of the model that the stage trained; None: it was made for this run."""
    first = STARTS[context.directory.name][0]
    if named := first.named(context.config.model_dump()):
        return named
    earlier = context.run.stage(first.earlier) if first.earlier else None
    return str(earlier.model) if earlier and earlier.done else None
