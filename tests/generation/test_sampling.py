"""Tokens follow the distribution that was asked for, and one uniform number decides each."""

import pytest
import torch

from rlhf.config.schema import SamplingConfig
from rlhf.generation.decode_state import sample

LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.0, -torch.inf])


def frequencies(config, draws=40_000):
    uniform = torch.rand(draws, generator=torch.Generator().manual_seed(0))
    tokens, _ = sample(LOGITS.expand(draws, -1), uniform, config)
    return torch.bincount(tokens, minlength=5) / draws


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_tokens_come_with_their_probability(temperature):
    expected = (LOGITS / temperature).softmax(-1)
    torch.testing.assert_close(frequencies(SamplingConfig(temperature=temperature)), expected, atol=0.01, rtol=0)


def test_temperature_zero_takes_the_most_likely_token():
    assert frequencies(SamplingConfig(temperature=0))[0] == 1


def test_top_k_draws_from_the_k_most_likely():
    expected = LOGITS[[0, 3]].softmax(-1)
    drawn = frequencies(SamplingConfig(top_k=2))
    torch.testing.assert_close(drawn[[0, 3]], expected, atol=0.01, rtol=0)
    assert drawn[[1, 2, 4]].sum() == 0


def test_top_p_draws_from_the_smallest_set_that_reaches_p():
    # probabilities 0.63, 0.23, 0.14, 0.03: the first alone reaches 0.6, the first two 0.8
    assert frequencies(SamplingConfig(top_p=0.6))[0] == 1
    drawn = frequencies(SamplingConfig(top_p=0.8))
    assert drawn[[1, 2, 4]].sum() == 0 and drawn[3] > 0.2


@pytest.mark.parametrize("vocabulary", [3, 256, 1000, 4096])
def test_token_is_where_summed_probabilities_pass_the_number(vocabulary):
    """In float64; numbers within rounding of such a place may fall to either side."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(1, vocabulary, generator=generator)
    logits[:, ::3] = -torch.inf
    uniform = torch.rand(5_000, generator=generator)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-24])
    sums = logits.double().softmax(-1).cumsum(-1)[0]
    far = (sums.unsqueeze(0) - uniform.double().unsqueeze(1)).abs().amin(-1) > 1e-6
    far[:1] = True
    drawn, _ = sample(logits.expand(len(uniform), -1), uniform, SamplingConfig())
    assert torch.equal(drawn[far], torch.searchsorted(sums, uniform.double(), right=True)[far])
    assert far.float().mean() > 0.98 and logits[0, drawn].isfinite().all()


def test_logits_stay_as_they_are():
    logits = LOGITS.expand(4, -1).clone()
    sample(logits, torch.rand(4), SamplingConfig(temperature=0.5))
    assert torch.equal(logits, LOGITS.expand(4, -1))


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.9}])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_logits_that_are_nan_or_inf_draw_a_valid_token(settings, wrong):
    """So that the loss, which is none either, ends the run and says why."""
    logits = torch.zeros(2, 300)
    logits[1, 7] = wrong
    drawn, _ = sample(logits, torch.tensor([0.5, 0.5]), SamplingConfig(**settings))
    assert drawn.min() >= 0 and drawn.max() < 300


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"top_k": 2}, {"top_p": 0.8, "temperature": 2.0}])
def test_log_probability_is_that_among_all_tokens(settings):
    """As training scores it: at the temperature, but before top-k and top-p."""
    config = SamplingConfig(**settings)
    tokens, log_probs = sample(LOGITS.expand(500, -1), torch.rand(500), config)
    expected = (LOGITS.double() / config.temperature).log_softmax(-1)[tokens]
    torch.testing.assert_close(log_probs.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0, 30.0], ids=["flat", "wide", "narrow", "one token"])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
def test_eager_top_p_draws_the_same_tokens_without_sorting_all(
    spread: float, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest set is that of the definition, in float64. Rows need different numbers of tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = spread * torch.linspace(0.2, 2, 8).unsqueeze(1) * torch.randn(8, 5000, generator=generator)
    uniform, config = torch.rand(8, generator=generator), SamplingConfig(top_p=top_p)
    everything = sample(logits, uniform, config)
    counts, topk = [], torch.Tensor.topk
    monkeypatch.setattr(
        torch.Tensor, "topk", lambda self, k, **options: (counts.append(k), topk(self, k, **options))[1]
    )
    drawn, log_probs = sample(logits, uniform, config, eager=True)
    assert torch.equal(drawn, everything[0]) and torch.equal(log_probs, everything[1])
    probabilities = logits.double().softmax(-1)
    larger = (probabilities * (probabilities > probabilities.gather(-1, drawn[:, None]))).sum(-1)
    assert (larger < top_p + 1e-6).all(), "a token outside of the set"
    needed = int(((probabilities.sort(descending=True).values.cumsum(-1) < top_p).sum(-1) + 1).max())
    assert counts[-1] >= min(needed, 5000) and all(count < 16 * max(needed, 256) for count in counts)
