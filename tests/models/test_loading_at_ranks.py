"""However a model is split, its weights are the checkpoint's, and its float32 masters are not rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.families.table import BY_NAME, build
from tests.forks import Forks

KINDS = {"OPT": "", "Llama, Llama 2": "trained trained-scalar", "BLOOM": "", "GPT-2": "trained", "Mixtral": "trained"}
"""Families, and what is tried with each: all stages where it is trained, else ZeRO-3 alone."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float32 checkpoints with rows to be added, in two files and in one."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    folder = tmp_path_factory.mktemp("checkpoints")
    for name, kinds in KINDS.items():
        for kind in kinds.split() or ["frozen"]:
            model = build(BY_NAME[name].configuration(vocab_size=299), MODEL_FOR_CAUSAL_LM_MAPPING)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_()
            model.save_pretrained(folder / f"{name.split(',')[0]} {kind}", max_shard_size="40KB")
    return folder


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_and_masters_are_the_checkpoints(forks: Forks, folder: Path, count: int) -> None:
    forks.ranks(count, f"from tests.models import ranks_of_loading as ranks; ranks.main({str(folder)!r})")
    for rank in range(count):
        assert (folder / f"rank {rank}").read_text() == ""
