"""Attention as training uses it: forward and backward of a Llama whose rows are padded left, at several lengths.

If the backend fuses or compiles layers, some lengths are compared with these layers too.

The lengths are those at which kernels have failed, 64 mod 128 (pytorch #196678) and 1 mod 32 (pytorch #191937), and
whole blocks. The reference is transformers' own attention in float32 on the CPU, with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelerators.testing.reference import TOLERANCES, difference

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator
    from accelerators.types import Precision

VOCABULARY = 64
FUSED_LENGTHS = 2
"""Lengths that are compared with fused layers: each is compiled for minutes by some devices."""
SMALL = {"lengths": (64, 97, 128, 192), "hidden_size": 64, "heads": ((4, 2), (4, 1))}
LARGE = {
    "lengths": (64, 97, 128, 192, 257, 320, 512),
    "hidden_size": 1024,
    "heads": ((16, 16), (16, 4), (8, 8), (16, 1)),
}
"""Columns, width, and heads of queries and of keys: heads of 64 and of 128 numbers, grouped and not."""

GRADIENT_SLACK = 2.0
"""Gradients pass two roundings for each of the forward pass."""


def compare(accelerator: Accelerator, *, full: bool) -> dict[str, Any]:
    """Compare logits of real tokens, and gradients of all weights; return the largest differences by length."""
    from transformers import LlamaConfig

    sizes: dict[str, Any] = LARGE if full else SMALL
    precision = accelerator.precision()
    kernels = accelerator.kernels
    attention = next(
        (
            name
            for implementation, name in kernels.usable("attention")
            if not kernels.refusal(implementation, LlamaConfig())
        ),
        "eager",
    )
    facts: dict[str, Any] = {"attention": attention, "precision": precision.name, "differences": {}}
    plain = [
        ("", lambda network: None, heads, length)
        for heads in sizes["heads"]
        for length in sizes["lengths"]
        if heads[1] > 1 or length % 32 == 1  # kernels fail with one head of keys at these lengths alone
    ]
    fuse = kernels.get("fused_layers")
    fused = [("fused, ", fuse, sizes["heads"][0], length) for length in sizes["lengths"][:FUSED_LENGTHS] if fuse]
    for prefix, change, (heads, groups), length in plain + fused:
        name = f"{prefix}{heads}/{groups} heads, {length} columns"
        what = f"attention {attention!r} in {precision.name}, {name}"
        case = _Case(sizes["hidden_size"], heads, groups, length)
        facts["differences"][name] = case.compare(what, accelerator, precision, attention, change)
    assert not accelerator.fallbacks, f"fused layers: {', '.join(accelerator.fallbacks)} ran without them"
    return facts


class _Case:
    """A Llama with two layers, and rows of which one is whole, one half and one nearly empty."""

    def __init__(self, hidden_size: int, heads: int, groups: int, length: int) -> None:
        from transformers import LlamaConfig

        self.config = LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=hidden_size,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            vocab_size=VOCABULARY,
            pad_token_id=0,
        )
        real = torch.tensor([length, length // 2 + 1, 3]).unsqueeze(1)
        self.mask = (torch.arange(length) >= length - real).long()
        self.ids = (torch.arange(self.mask.numel()).view_as(self.mask) * 7 % (VOCABULARY - 1) + 1) * self.mask

    def compare(
        self,
        what: str,
        accelerator: Accelerator,
        precision: Precision,
        attention: str,
        change: Callable[[Any], Any],
    ) -> float:
        """Return the largest difference from the CPU, as a fraction of the largest number of its tensor."""
        logits, gradients = self._run(attention, precision, accelerator.device(), change)
        expected_logits, expected_gradients = self._run("eager", precision, torch.device("cpu"), exact=True)
        limit = TOLERANCES[precision.name]
        largest = 0.0
        for name, result, expected, slack in (
            ("logits", logits, expected_logits, 1.0),
            *(
                (f"gradient of {name}", gradients[name], expected, GRADIENT_SLACK)
                for name, expected in expected_gradients.items()
            ),
        ):
            finite = torch.isfinite(result).float().mean().item()
            assert finite == 1, f"{what}: {name}: {1 - finite:.1%} of the numbers are not finite"
            off = difference(result, expected)
            assert off <= slack * limit, (
                f"{what}: {name} differ by {off:.2g} of the largest number from the CPU's, expected at most "
                f"{slack * limit:g}"
            )
            largest = max(largest, off)
        return largest

    def _run(
        self,
        attention: str,
        precision: Precision,
        device: torch.device,
        change: Callable[[Any], Any] = lambda network: None,
        *,
        exact: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits of real tokens, and gradients by weight; if `exact`, in float32 with the rounded weights."""
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = AutoModelForCausalLM.from_config(self.config, attn_implementation=attention)
        network = network.to(precision.dtype).to(torch.float32 if exact else precision.dtype).to(device)
        change(network)
        ids, mask = self.ids.to(device), self.mask.to(device)
        logits = network(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
        real = logits[mask.bool()]
        real.logsumexp(-1).sum().backward()
        return real.detach().cpu(), {name: weight.grad.cpu() for name, weight in network.named_parameters()}
