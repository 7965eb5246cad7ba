"""Completions and log-probabilities of padded batches are those of plain transformers for each prompt alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerators import Accelerator, ShapePolicy
from rlhf.config.schema import SamplingConfig
from rlhf.errors import ModelError, OutOfMemory
from rlhf.evaluation.generate import GenerationSettings, generate_completions, score_completions
from rlhf.evaluation.models import EvaluationDevice, LanguageModel
from tests.helpers import llama

PROMPTS = [[5], [7, 8, 9, 10, 11], [12, 13], [14, 15, 16], [17, 18, 19, 20], [21, 22]]
VOCABULARY, PAD = 30, 0
ENDS = [1, 4]


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
        made.get_output_embeddings().weight[ENDS] *= 2
    return made.eval()


@pytest.fixture(params=["static", "dynamic"])
def writer(request: pytest.FixtureRequest, accelerator: Accelerator, model: Any) -> LanguageModel:
    device = EvaluationDevice(accelerator, accelerator.precision("fp32"), ShapePolicy(request.param))
    return LanguageModel("it", "it", device, model, SimpleNamespace(pad_token_id=PAD), "plain", ENDS, 128)


def manner(temperature: float = 0, batch_size: int = 4) -> GenerationSettings:
    return GenerationSettings(SamplingConfig(temperature=temperature), 10, batch_size, seed=1)


def plain_log_prob(model: Any, prompt: list[int], completion: list[int], temperature: float) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0].double() / temperature
    places = range(len(prompt) - 1, len(prompt) + len(completion) - 1)
    return sum(logits[at].log_softmax(-1)[token].item() for at, token in zip(places, completion))


def test_greedy_completions_are_those_of_transformers(writer: LanguageModel) -> None:
    counted: list[int] = []
    written = generate_completions(writer, PROMPTS, manner(), counted.append)
    for prompt, completion in zip(PROMPTS, written, strict=True):
        alone = writer.module.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=10,
            eos_token_id=ENDS,
            pad_token_id=PAD,
        )
        assert completion == alone[0, len(prompt) :].tolist()
    assert len({len(completion) for completion in written}) > 1, "none ends before the others"
    assert counted == [4, 2]


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_log_probabilities_are_those_of_each_row_alone(writer: LanguageModel, temperature: float) -> None:
    completions = [[6, 1], [9], [3, 3, 3, 1], [2, 5, 8, 11, 14, 17, 20, 23, 26, 29], [4], [1]]
    log_probs = score_completions(writer, PROMPTS, completions, manner(temperature), lambda rows: None)
    for prompt, completion, log_prob in zip(PROMPTS, completions, log_probs, strict=True):
        alone = plain_log_prob(writer.module, prompt, completion, temperature or 1)
        assert log_prob == pytest.approx(alone, abs=2e-4)


def test_samples_depend_on_the_seed_and_on_nothing_before(writer: LanguageModel) -> None:
    first = generate_completions(writer, PROMPTS, manner(1.0), lambda rows: None)
    torch.rand(7)
    assert generate_completions(writer, PROMPTS, manner(1.0), lambda rows: None) == first
    assert generate_completions(writer, PROMPTS, manner(), lambda rows: None) != first


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_numbers_that_are_none_are_an_error(
    writer: LanguageModel, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    head = writer.module.get_output_embeddings()
    monkeypatch.setattr(head, "forward", lambda hidden: hidden @ head.weight.T * torch.nan)
    message = "it: its likelihoods are not finite in fp32; try --precision fp32, or check the model's weights"
    with pytest.raises(ModelError, match=message):
        generate_completions(writer, PROMPTS, manner(temperature), lambda rows: None)
    with pytest.raises(ModelError, match=message):
        score_completions(writer, PROMPTS, PROMPTS, manner(temperature), lambda rows: None)


def test_a_lack_of_memory_names_what_to_lower(writer: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    message = "cpu: too little memory for 4 completions of it at a time; lower --batch-size or --max-tokens"
    monkeypatch.setattr(writer.module.base_model, "forward", forward)
    with pytest.raises(OutOfMemory, match=message):
        generate_completions(writer, PROMPTS, manner(), lambda rows: None)
    with pytest.raises(OutOfMemory, match=message):
        score_completions(writer, PROMPTS, PROMPTS, manner(), lambda rows: None)
