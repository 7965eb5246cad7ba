"""The check of fused layers: logits and gradients of a Llama equal float32's, names and copies stay."""

from __future__ import annotations

import copy
import unittest
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerators.testing.reference import assert_close

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

WORDS = 64


def check_fused_layers(accelerator: Accelerator) -> None:
    """Check a fused Llama and a copy of it, with and without gradients, in the precision of trainers."""
    fuse = accelerator.kernels.get("fused_layers")
    if fuse is None:
        raise unittest.SkipTest(accelerator.kernels.capabilities()["fused_layers"].reason)
    precision = accelerator.precision()
    exact = _llama(precision.dtype)
    fused = copy.deepcopy(exact).to(accelerator.device(), precision.dtype)
    names = [name for name, _ in fused.named_parameters()]
    fuse(fused)
    assert [name for name, _ in fused.named_parameters()] == names, "fused_layers: it changes names of parameters"
    tokens = (torch.arange(3 * 7) * 5 % WORDS).view(3, 7)
    expected = exact(tokens).logits
    expected.logsumexp(-1).sum().backward()
    for what, network in {"a fused model": fused, "a copy of it": copy.deepcopy(fused)}.items():
        with torch.no_grad():
            for parameter in fused.parameters():  # a copy has separate weights
                parameter.mul_(1.0 if network is fused else 2.0)
        with precision.autocast():
            logits = network(accelerator.to_device(tokens)).logits
        logits.float().logsumexp(-1).sum().backward()
        accelerator.step_boundary("gradients")
        assert_close(f"{what}: logits", logits, expected, precision)
        for (name, weight), reference in zip(network.named_parameters(), exact.parameters()):
            assert weight.grad is not None, f"{what}: {name} has no gradient"
            assert_close(f"{what}: gradient of {name}", weight.grad, reference.grad, precision)
        with torch.no_grad(), precision.autocast():
            again = network(accelerator.to_device(tokens)).logits
        assert_close(f"{what}: logits without gradients", again, expected, precision)


def _llama(dtype: torch.dtype) -> Any:
    """Return a small Llama on the CPU in float32, whose weights are exact in `dtype`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": WORDS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(**sizes, **heads, attn_implementation="eager")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        network = LlamaForCausalLM(config)
        for parameter in network.parameters():
            if parameter.dim() == 1:
                nn.init.uniform_(parameter, 0.5, 1.5)
            else:
                parameter.mul_(5)
            parameter.copy_(parameter.to(dtype))
    return network.train()
