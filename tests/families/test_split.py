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

from rlhf.generation.tensor_parallel import find_split_obstacle, split_model
from tests.families.table import BY_NAME, FAMILIES, build
from tests.generation.two_ranks import biased

SPLIT = {
    "OPT",
    "GPT-NeoX, Pythia",
    "BLOOM",
    "Llama, Llama 2",
    "Llama 3",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Gemma",
    "Gemma 2",
    "Gemma 3",
    "Phi-3",
    "Cohere 2",
    "GLM-4",
    "Granite",
    "Nemotron",
    "OLMo 2",
    "OLMo 3",
    "Phi, Phi-2",
    "Qwen3.5",
    "SmolLM3",
    "StarCoder 2",
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
        found = list(self.table)
        self.all_here.wait()
        return found


class Partner:
    def __init__(self, meeting: Meeting, position: int) -> None:
        self.size, self.position, self._meeting = meeting.size, position, meeting

    def all_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._meeting.all(self.position, tensor)).sum(0)

    def all_gather(self, tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        return torch.cat(self._meeting.all(self.position, tensor), dimension)


def together(model: Any, size: int, ids: torch.Tensor) -> list[torch.Tensor]:
    """The logits that each rank of a team comes to."""
    meeting = Meeting(size)

    def rank(position: int) -> torch.Tensor:
        try:
            with torch.no_grad():
                return split_model(model, Partner(meeting, position))(input_ids=ids).logits
        except BaseException:
            meeting.all_here.abort()  # so that nobody waits
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


@pytest.mark.parametrize("name", sorted(SPLIT))
def test_parts_compute_what_the_whole_does(name: str) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model = biased(build(BY_NAME[name].configuration(), MODEL_FOR_CAUSAL_LM_MAPPING))
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    before = {path: tensor.clone() for path, tensor in model.state_dict().items()}
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    for found in together(model, 2, ids):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    after = model.state_dict()
    assert all(torch.equal(after[path], tensor) for path, tensor in before.items()), "the model in training changed"


@pytest.mark.parametrize("name", ["Llama, Llama 2", "BLOOM", "OPT", "GPT-NeoX, Pythia"])
def test_four_ranks_have_a_head_each(name: str) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model = biased(build(BY_NAME[name].configuration(), MODEL_FOR_CAUSAL_LM_MAPPING))
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    for found in together(model, 4, ids):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_does_not_divide_is_split_all_the_same(tied: bool) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = BY_NAME["Llama 3"].configuration(vocab_size=61, tie_word_embeddings=tied)
    model = build(config, MODEL_FOR_CAUSAL_LM_MAPPING)
    ids = torch.arange(61).view(1, -1)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    for found in together(model, 2, ids):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_it_is_known_beforehand_which_can_be_split() -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found = set()
    for family in FAMILIES:
        config = family.configuration()
        with torch.device("meta"):
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
        if not find_split_obstacle(model, 2):
            found.add(family.name)
    assert found == SPLIT
