"""Families whose layers are split among ranks: the parts together compute what the whole model does.

Ranks are threads here, which wait for one another where processes would call a collective; test_two_ranks
has processes.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from rlhf.generation.tensor_parallel import find_split_obstacle, split_model
from tests.families.table import BY_NAME, FAMILIES, build
from tests.generation.two_ranks import biased

SPLIT = {
    *("BLOOM", "Cohere 2", "GLM-4", "GPT-NeoX, Pythia", "Gemma", "Gemma 2", "Gemma 3", "Granite", "Llama 3"),
    *("Llama, Llama 2", "Mistral", "Nemotron", "OLMo 2", "OLMo 3", "OPT", "Phi, Phi-2", "Phi-3", "Qwen2", "Qwen3"),
    *("Qwen3.5", "SmolLM3", "StarCoder 2"),
}
"""The others have no plan, or experts."""


class Meeting:
    """Where the ranks of a team lay down what they have."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.table: list[Any] = [None] * size
        self.all_here = threading.Barrier(size, timeout=60)

    def all(self, position: int, value: torch.Tensor) -> list[torch.Tensor]:
        self.table[position] = value
        self.all_here.wait()
        actual = list(self.table)
        self.all_here.wait()
        return actual


class Partner:
    def __init__(self, meeting: Meeting, position: int) -> None:
        self.size, self.position, self._meeting = meeting.size, position, meeting

    def all_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._meeting.all(self.position, tensor)).sum(0)

    def all_gather(self, tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        return torch.cat(self._meeting.all(self.position, tensor), dimension)


def assert_parts_compute_the_whole(model: Any, size: int, ids: torch.Tensor) -> None:
    """Compare the logits of each rank of a team of `size` with the whole model's."""
    meeting = Meeting(size)

    def rank(position: int) -> torch.Tensor:
        try:
            with torch.no_grad():
                return split_model(model, Partner(meeting, position))(input_ids=ids).logits
        except BaseException:
            meeting.all_here.abort()  # so that nobody waits
            raise

    with torch.no_grad():
        expected = model(input_ids=ids).logits
    with ThreadPoolExecutor(size) as pool:
        for logits in pool.map(rank, range(size)):
            torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 2) for name in sorted(SPLIT)),
        *((name, 4) for name in ("Llama, Llama 2", "BLOOM", "OPT", "GPT-NeoX, Pythia")),
    ],
)
def test_parts_compute_what_the_whole_does(name: str, size: int) -> None:
    model = biased(build(BY_NAME[name].configuration(), MODEL_FOR_CAUSAL_LM_MAPPING))
    before = {path: tensor.clone() for path, tensor in model.state_dict().items()}
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    assert_parts_compute_the_whole(model, size, ids)
    after = model.state_dict()
    assert all(torch.equal(after[path], tensor) for path, tensor in before.items()), "the model in training changed"


@pytest.mark.parametrize("tied", [True, False])
def test_vocabulary_that_does_not_divide_is_split(tied: bool) -> None:
    config = BY_NAME["Llama 3"].configuration(vocab_size=61, tie_word_embeddings=tied)
    assert_parts_compute_the_whole(build(config, MODEL_FOR_CAUSAL_LM_MAPPING), 2, torch.arange(61).view(1, -1))


def test_obstacles_to_splitting_are_known_beforehand() -> None:
    divisible = set()
    for family in FAMILIES:
        config = family.configuration()
        with torch.device("meta"):
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
        if not find_split_obstacle(model, 2):
            divisible.add(family.name)
    without_plan = {"Nemotron"} if transformers.__version__.startswith("5.17.") else set()
    assert divisible == SPLIT - without_plan
