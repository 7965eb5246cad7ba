"""Tokens that sample.c draws, against the distribution in float64; decode_check.c has random shapes and sanitizers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import accelerators
from accelerators.backends.cpu.kernels import sampling
from rlhf.config.schema import SamplingConfig
from rlhf.generation.decode_state import sample
from rlhf.generation.decoder import Decoder
from tests.helpers import llama

dtypes = pytest.mark.parametrize("dtype", sampling.DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def check(drawn: tuple[Tensor, Tensor], logits: Tensor, uniform: Tensor, temperature: float) -> None:
    """Check in float64 that `uniform` lies within the drawn token's part of the cumulative probability.

    A sum in float32 may be off by some 1e-6, and several tokens may share that little.
    """
    tokens, found = drawn[0].unsqueeze(-1), drawn[1].double()
    log_probs = (logits.double() / temperature).log_softmax(-1)
    probs = log_probs.exp()
    ends = probs.cumsum(-1).gather(-1, tokens).squeeze(-1)
    starts = ends - probs.gather(-1, tokens).squeeze(-1)
    assert ((starts - 5e-6 <= uniform) & (uniform <= ends + 5e-6)).all()
    torch.testing.assert_close(found, log_probs.gather(-1, tokens).squeeze(-1), atol=2e-5, rtol=1e-6)


@dtypes
@pytest.mark.parametrize("size", [1, 2, 15, 17, 1024, 1025, 50257])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_tokens_and_log_probs_are_those_of_the_definition(dtype: torch.dtype, size: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = (3 * torch.randn(40, size, generator=generator)).to(dtype)
    uniform = torch.rand(40, generator=generator)
    check(sampling.draw(logits, uniform, temperature), logits, uniform, temperature)
    check(sample(logits, uniform, SamplingConfig(temperature=temperature)), logits, uniform, temperature)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_draws_do_not_depend_on_the_default_dtype(default: torch.dtype) -> None:
    """What is written in C has types of its own."""
    logits = 3 * torch.randn(40, 900, generator=torch.Generator().manual_seed(0))
    uniform = torch.rand(40, generator=torch.Generator().manual_seed(1))
    expected = sampling.draw(logits, uniform, 1.0)
    torch.set_default_dtype(default)
    try:
        drawn = sampling.draw(logits, uniform, 1.0)
        assert sampling.supported.__wrapped__(None), "nor does the check"
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, drawn, expected))


@dtypes
def test_no_token_of_probability_0_is_drawn(dtype: torch.dtype) -> None:
    """Not at the ends of the distribution either, where the sums of parts are rounded."""
    below_1 = 1 - 2**-24  # the largest float32
    uniform = torch.tensor([0.0, 0.5, below_1]).repeat_interleave(2)
    possible = torch.tensor([7, 1030, 2049])
    logits = torch.full((6, 3000), -torch.inf, dtype=dtype)
    logits[:, possible] = torch.tensor([0.0, 0.5, -30.0], dtype=dtype)
    tokens, _ = sampling.draw(logits, uniform, 1.0)
    assert tokens.tolist() == [7, 7, 1030, 1030, 1030, 1030]
    assert sampling.draw(logits[:, :1030], uniform, 1.0)[0].tolist() == [7] * 6
    many = torch.randn(2000, 900, generator=torch.Generator().manual_seed(0)).to(dtype)
    many[:, 850:] = -torch.inf  # after sums that are rounded above those of the numbers before
    assert sampling.draw(many, torch.full((2000,), below_1), 1.0)[0].max() < 850
    assert sampling.draw(logits[:1] * 0, torch.tensor([below_1]), 1.0)[1].isnan().item()


@dtypes
def test_rows_of_a_larger_tensor(dtype: torch.dtype) -> None:
    """Logits of the last position are a view; those of one row may be repeated."""
    whole = torch.randn(5, 3, 700, generator=torch.Generator().manual_seed(0)).to(dtype)
    uniform = torch.linspace(0, 0.99, 5)
    logits = whole[:, -1]
    for given in (logits, logits[:1].expand(5, -1), logits.repeat(2, 1)[:5].T.contiguous().T):
        check(sampling.draw(given, uniform, 1.0), given, uniform, 1.0)


def test_a_row_does_not_depend_on_others() -> None:
    logits = torch.randn(9, 2000, generator=torch.Generator().manual_seed(0)).bfloat16()
    uniform = torch.linspace(0, 0.99, 9)
    tokens, log_probs = sampling.draw(logits, uniform, 1.0)
    for row in range(9):
        alone = sampling.draw(logits[row : row + 1], uniform[row : row + 1], 1.0)
        assert (alone[0].item(), alone[1].item()) == (tokens[row].item(), log_probs[row].item())


def test_decoder_draws_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    plain = sampling.draw
    monkeypatch.setattr(sampling, "draw", lambda *given: calls.append(given[2]) or plain(*given))
    accelerator = accelerators.select("cpu", environ={}).create()
    accelerator.bind(0)
    assert accelerator.kernels.get("sampling")
    calls.clear()  # of its check
    decoder = Decoder(accelerator, eos_ids=[], pad_id=0, max_new_tokens=3)
    model, ids = llama(64).eval(), torch.ones(2, 4, dtype=torch.long)
    for settings in (SamplingConfig(temperature=0.5), SamplingConfig(temperature=0), SamplingConfig(top_k=5)):
        decoder.generate(model, ids, ids, settings)
    assert calls == [0.5] * 3
