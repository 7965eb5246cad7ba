"""Writing a trained model in Hugging Face's format, so that plain transformers loads it, or a note says how."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.engine import distributed
from rlhf.files import atomic_directory
from rlhf.models.forward import ScalarHead
from rlhf.models.lora import merged_adapters, plain_state_dict
from rlhf.models.quantized import exported_weights
from rlhf.models.scalar_head import write_note

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf.engine.training import TrainingEngine


def save_model(engine: TrainingEngine, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write the engine's model and the tokenizer to `path`, complete or not at all; every rank calls it.

    LoRA adapters are merged into the weights.
    """
    with engine.whole_weights() as module, distributed.on_main(f"saving {path}") as main:
        if main:
            model = module.model if isinstance(module, ScalarHead) else module
            with atomic_directory(path) as folder, merged_adapters(model):
                # A user of the saved model wants the cache that training does without.
                model.config.use_cache = True
                whole = {name: weight.to(model.dtype) for name, weight in exported_weights(model)}
                model.save_pretrained(folder, state_dict=plain_state_dict(model) | whole)
                model.config.use_cache = False
                tokenizer.save_pretrained(folder)
                write_note(model, folder)
