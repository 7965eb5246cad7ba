"""An export is complete or not there; what it holds, at every stage of ZeRO, is in tests/memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.checkpoint.export import save_model
from rlhf.checkpoint.safetensors_writer import SafetensorsWriter
from rlhf.config.schema import LoraConfig, OptimizerConfig
from rlhf.engine.engine import TrainingEngine
from rlhf.models.lora import add_adapters
from tests.helpers import build_tokenizer, llama
from tests.in_process import make_placement


def engine(accelerator: Any, stage: int) -> TrainingEngine:
    model = llama(300)
    add_adapters(model, LoraConfig(rank=2), seed=0)
    return TrainingEngine(
        "test",
        model,
        accelerator=accelerator,
        precision=accelerator.precision("fp32"),
        placement=make_placement(stage),
        optimizer=OptimizerConfig(),
        total_steps=1,
        micro_batch_size=1,
        accumulation=1,
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_full_disk_leaves_the_previous_model(accelerator, tmp_path, monkeypatch, stage):
    tokenizer, trained = build_tokenizer(), engine(accelerator, stage)
    save_model(trained, tokenizer, tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    write = SafetensorsWriter.write

    def fails(self: SafetensorsWriter, name: str, tensor: torch.Tensor) -> None:
        if "norm" in name:
            raise OSError(28, "No space left on device")
        write(self, name, tensor)

    monkeypatch.setattr(SafetensorsWriter, "write", fails)
    with pytest.raises(OSError, match="No space"):
        save_model(trained, tokenizer, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


def test_export_keeps_the_weights_and_turns_on_the_cache(accelerator, tmp_path):
    from transformers import AutoModelForCausalLM

    trained = engine(accelerator, 0)
    before = {name: tensor.clone() for name, tensor in trained.module.state_dict().items()}
    trained.module.config.use_cache = False
    save_model(trained, build_tokenizer(), tmp_path / "model")
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained.module.state_dict().items())
    assert AutoModelForCausalLM.from_pretrained(Path(tmp_path / "model")).config.use_cache is True
    assert trained.module.config.use_cache is False
