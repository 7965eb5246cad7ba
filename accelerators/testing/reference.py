"""The reference of the checks: a small model trained by plain PyTorch in fp32 on the CPU, and tolerances."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accelerators.errors import AcceleratorError
from accelerators.types import Precision

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

ROWS, TOKENS, STEPS = 16, 32, 6
LEARNING_RATE = 1e-2
ADAMW: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}

TOLERANCES = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 1e-2}
"""Largest difference from fp32, as a fraction of the largest number."""


def checked_precisions(accelerator: Accelerator) -> list[Precision]:
    """Return the precision of trainers, and fp32 if the device has it: 16 bits hide a small fault."""
    precisions = [accelerator.precision()]
    if precisions[0].name != "fp32":
        with contextlib.suppress(AcceleratorError):  # `precision` may refuse
            precisions.append(accelerator.precision("fp32"))
    return precisions


def model() -> nn.Module:
    """Return a classifier of tokens with the same weights in every process; fp32, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(TOKENS, 32), nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))


def llama(attention: str = "eager", **sizes: int) -> Any:
    """Return a small Llama with the same weights in every process; fp32, on the CPU.

    Weights are large: attention then concentrates on few tokens, so that a padded token among them shows.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**small | heads | sizes, initializer_range=0.1, pad_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def batch() -> tuple[Tensor, Tensor]:
    """Return tokens and their labels, [ROWS]."""
    tokens = torch.arange(ROWS) * 5 % TOKENS
    return tokens, tokens * 3 % 8


@functools.cache
def losses() -> tuple[float, ...]:
    """Return the loss before each step of training on one batch."""
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, **ADAMW)
    tokens, labels = batch()
    results = []
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(network(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        results.append(loss.item())
    return tuple(results)


def difference(result: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a fraction of the largest expected number; NaN if a number is not finite."""
    result, expected = result.detach().float().cpu(), expected.detach().float().cpu()
    return ((result - expected).abs().max() / expected.abs().max().clamp_min(1e-12)).item()


def assert_close(
    what: str, result: Tensor | None, expected: Tensor | None, precision: Precision | str = "fp32"
) -> None:
    """Check that a tensor equals another within the tolerance of a precision."""
    name = precision if isinstance(precision, str) else precision.name
    assert result is not None and expected is not None, f"{what}: there is no tensor"
    assert result.shape == expected.shape, (
        f"{what}: found shape {tuple(result.shape)}, expected {tuple(expected.shape)}"
    )
    off = difference(result, expected)
    limit = TOLERANCES[name]
    assert off <= limit, f"{what}: differs by {off:.2g} of the largest number, expected at most {limit:g} in {name}"
