"""What a model writes in padded batches is what plain transformers generates of each prompt alone; so are log-probs."""

from typing import Any

import pytest
import torch

from accelerators import Accelerator, ShapePolicy
from rlhf.config import SamplingConfig
from rlhf.evaluation.writing import Manner, Writer
from tests.helpers import llama

PROMPTS = [[5], [7, 8, 9, 10, 11], [12, 13], [14, 15, 16], [17, 18, 19, 20], [21, 22]]
VOCABULARY, END, PAD = 30, 1, 0


@pytest.fixture(scope="module", params=["llama", "bloom"])
def model(request: pytest.FixtureRequest) -> Any:
    """With weights large enough that completions differ and some end; BLOOM has no positions but slopes."""
    if request.param == "llama":
        made = llama(VOCABULARY, seed=3, tie_word_embeddings=False)
    else:
        from transformers import BloomConfig, BloomForCausalLM

        torch.manual_seed(0)
        made = BloomForCausalLM(
            BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, pad_token_id=PAD)
        )
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return made.eval()


@pytest.fixture(params=["static", "dynamic"])
def shapes(request: pytest.FixtureRequest, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(type(accelerator), "shape_policy", lambda self: ShapePolicy(request.param))
    return str(request.param)


def writer(model: Any, accelerator: Accelerator, temperature: float = 0, batch_size: int = 4) -> Writer:
    manner = Manner(SamplingConfig(temperature=temperature), 10, 6, batch_size, seed=1)
    return Writer(model, accelerator, accelerator.precision("fp32"), manner, end_ids=[END, 4], pad_id=PAD)


def plain_log_prob(model: Any, prompt: list[int], completion: list[int], temperature: float) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0].double() / temperature
    places = range(len(prompt) - 1, len(prompt) + len(completion) - 1)
    return sum(logits[at].log_softmax(-1)[token].item() for at, token in zip(places, completion))


@pytest.mark.usefixtures("shapes")
def test_greedy_completions_are_those_of_plain_transformers_token_for_token(
    model: Any, accelerator: Accelerator
) -> None:
    counted: list[int] = []
    written = writer(model, accelerator).write(PROMPTS, counted.append)
    for prompt, completion in zip(PROMPTS, written, strict=True):
        alone = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=10,
            eos_token_id=[END, 4],
            pad_token_id=PAD,
        )
        assert completion == alone[0, len(prompt) :].tolist()
    assert len({len(completion) for completion in written}) > 1, "none ends before the others"
    assert counted == [4, 2]


@pytest.mark.usefixtures("shapes")
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_log_probabilities_are_those_of_each_row_alone(
    model: Any, accelerator: Accelerator, temperature: float
) -> None:
    completions = [[6, 1], [9], [3, 3, 3, 1], [2, 5, 8, 11, 14, 17, 20, 23, 26, 29], [4], [1]]
    found = writer(model, accelerator, temperature).log_probs(PROMPTS, completions, lambda rows: None)
    for prompt, completion, log_prob in zip(PROMPTS, completions, found, strict=True):
        assert log_prob == pytest.approx(plain_log_prob(model, prompt, completion, temperature or 1), abs=2e-4)


def test_samples_depend_on_the_seed_and_on_nothing_before(model: Any, accelerator: Accelerator) -> None:
    first = writer(model, accelerator, 1.0).write(PROMPTS, lambda rows: None)
    torch.rand(7)
    assert writer(model, accelerator, 1.0).write(PROMPTS, lambda rows: None) == first
    assert writer(model, accelerator).write(PROMPTS, lambda rows: None) != first
