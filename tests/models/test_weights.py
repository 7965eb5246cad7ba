"""Weights arrive one by one, under the model's names, and as the checkpoint has them: what plain transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.config import ModelConfig
from rlhf.models import loading
from rlhf.models.loading import load_causal_lm
from tests.families.table import FAMILIES, build
from tests.helpers import build_tokenizer


def load(path: Path, put: Any = None, attention: str = "eager", **changes: Any) -> Any:
    return load_causal_lm(ModelConfig(path=str(path)), build_tokenizer(), attention=attention, put=put, **changes)


def assert_same_state(found: Any, expected: Any) -> None:
    """Parameters and all buffers, those too that are not saved, bit for bit."""
    theirs = dict(expected.named_parameters(remove_duplicate=False)) | dict(expected.named_buffers())
    mine = dict(found.named_parameters(remove_duplicate=False)) | dict(found.named_buffers())
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    tied = [id(tensor) for tensor in mine.values()]
    assert len(set(tied)) == len({id(tensor) for tensor in theirs.values()})


def streamed(patch: pytest.MonkeyPatch) -> None:
    """From here on a model that transformers would have to load whole fails."""

    def fails(self: Any, model: Any) -> bool:
        assert covers(self, model), "loaded whole"
        return True

    covers = loading.Checkpoint.covers
    patch.setattr(loading.Checkpoint, "covers", fails)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_is_read_as_plain_transformers_reads_it(family, tmp_path, monkeypatch):
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    streamed(monkeypatch)
    torch.manual_seed(1)
    model = build(family.configuration(vocab_size=300), MODEL_FOR_CAUSAL_LM_MAPPING)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()  # biases and norms too
    model.save_pretrained(tmp_path)
    found = load(tmp_path)
    assert_same_state(found, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
