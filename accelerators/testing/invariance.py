"""Checks of operators that do not depend on the batch (operation `batch_invariant`)."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelerators.invariance import find_batch_dependence
from accelerators.testing.layers import LENGTHS, PROMPT, decode_llama, make_inputs, make_llama
from accelerators.testing.reference import assert_close, checked_precisions, llama

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator
    from accelerators.types import Precision


def check_batch_invariant(accelerator: Accelerator) -> None:
    """Check operators, a Llama that decodes, and gradients in the block, and that other operators follow it."""
    invariant = accelerator.kernels.get("batch_invariant")
    if invariant is None:
        raise unittest.SkipTest(accelerator.kernels.capabilities()["batch_invariant"].reason)
    precisions = checked_precisions(accelerator)
    networks = [make_llama(accelerator, precision) for precision in precisions]
    before = [_scored(accelerator, *pair) for pair in zip(precisions, networks)]
    for precision, network, scored in zip(precisions, networks, before):
        _check_block(accelerator, invariant, precision, network, scored)
    for precision, network, scored in zip(precisions, networks, before):
        again = _scored(accelerator, precision, network)
        assert torch.equal(again, scored), "batch_invariant: numbers after the block differ from those before it"


def _check_block(
    accelerator: Accelerator,
    invariant: Callable[[], AbstractContextManager[None]],
    precision: Precision,
    network: Any,
    before: Tensor,
) -> None:
    """Check numbers in the block; those of the network before it are `before`."""
    plain = llama()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.to(precision.dtype))
    trained = llama(accelerator.kernels.get("attention", required=True))
    trained.load_state_dict(plain.state_dict())
    expected_gradients = _gradients(plain, accelerator, precision)
    with invariant():
        dependence = find_batch_dependence(accelerator, precision.dtype)
        assert not dependence, f"batch_invariant: {dependence}"
        scored = _scored(accelerator, precision, network)
        assert_close("batch_invariant: logits of a Llama", scored, before, precision)
        decoded = decode_llama(accelerator, precision, network)
        for step, logits in enumerate(decoded):
            place = f"token {step} after the prompts" if step else "the prompts' last token"
            expected = scored[:, PROMPT - 1 + step]
            assert torch.equal(logits.float().cpu(), expected), (
                f"batch_invariant: decoded logits of {place} differ from those of whole rows, expected the same bits"
            )
        for row, length in enumerate(LENGTHS):
            alone = _scored(accelerator, precision, network, slice(row, row + 1), PROMPT - length)
            assert torch.equal(alone[0, length - 1 :], scored[row, PROMPT - 1 :]), (
                f"batch_invariant: logits of row {row} alone, without its padding, differ, expected the same bits"
            )
        gradients = _gradients(trained.to(accelerator.device(), precision.dtype), accelerator, precision)
        for name, gradient in gradients.items():
            assert_close(f"batch_invariant: gradient of {name}", gradient, expected_gradients[name], precision)


@torch.no_grad()
def _scored(
    accelerator: Accelerator, precision: Precision, network: Any, rows: slice = slice(None), first: int = 0
) -> Tensor:
    """Return the logits [rows, columns, V] of whole rows, from column `first` on, in float32 on the host."""
    inputs = accelerator.to_device(tuple(tensor[rows, first:] for tensor in make_inputs()))
    with precision.autocast():
        logits: Tensor = network(*inputs, use_cache=False).logits
    accelerator.step_boundary("logits")
    return logits.float().cpu()


def _gradients(network: Any, accelerator: Accelerator, precision: Precision) -> dict[str, Tensor | None]:
    tokens = (torch.arange(3 * 7) * 5 % 64).view(3, 7).to(next(network.parameters()).device)
    with precision.autocast():
        logits = network(tokens).logits
    logits.float().logsumexp(-1).sum().backward()
    accelerator.step_boundary("gradients")
    return {name: weight.grad for name, weight in network.named_parameters()}
