"""The check of attention: each implementation, called like transformers' models, against float64 on the CPU.

Rows are padded left, as in training and in rollouts. Outputs of padding are not compared, but must be finite, because
0 times NaN is NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelerators.kernels import CHECK_OF_A_MODEL
from accelerators.testing.reference import assert_close, llama

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator
    from accelerators.types import Precision

HEADS = {"as many heads of keys": (4, 4), "grouped heads": (4, 2), "one head of keys": (4, 1)}
"""Heads of queries, and of keys and values."""

LENGTHS, TOKENS, WIDTH = (64, 39, 3), 64, 16
"""Real tokens of each row, columns of a row, and numbers of a head.

With 64 columns, cuDNN 9.19 on an H200 gives NaN gradients of queries that see nothing; with 12 it does not.
"""

CACHE, STEPS = 72, 3
"""Columns of the static cache, and tokens that are decoded; the other columns stay empty."""


def check_attention(accelerator: Accelerator) -> None:
    """Check every usable implementation, unless it refuses a Llama, in the precision of trainers."""
    from transformers import LlamaConfig

    accelerator.kernels.get("attention", required=True)
    precision = accelerator.precision()
    eager_logits, eager_gradient = _llama(accelerator, precision, "eager")
    for implementation, name in accelerator.kernels.usable("attention"):
        refusal = accelerator.kernels.refusal(implementation, LlamaConfig())
        assert not refusal.startswith(CHECK_OF_A_MODEL), f"attention {name!r}, asked for a Llama: {refusal}"
        if refusal:
            continue
        for which, heads in HEADS.items():
            case = _Case(f"attention {name!r}, {which}", accelerator, precision, name, heads)
            case.check_whole_rows()
            case.check_decoding()
            case.check_dropout()
        logits, gradient = _llama(accelerator, precision, name)
        what = f"attention {name!r} of transformers against 'eager', rows padded left"
        assert_close(f"{what}: logits", logits, eager_logits, precision)
        assert_close(f"{what}: gradient of the embedding", gradient, eager_gradient, precision)


class _Case:
    """One implementation with one number of heads, called like a layer of a Llama."""

    def __init__(
        self, what: str, accelerator: Accelerator, precision: Precision, name: str, heads: tuple[int, int]
    ) -> None:
        from transformers import LlamaConfig
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward

        self.what, self.accelerator, self.precision = what, accelerator, precision
        self.heads, self.groups = heads
        sizes = {"hidden_size": self.heads * WIDTH, "num_hidden_layers": 1}
        self.config = LlamaConfig(**sizes, num_attention_heads=self.heads, num_key_value_heads=self.groups)
        self.config._attn_implementation = name
        self.layer = LlamaAttention(self.config, 0)
        self.attend: Any = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        self.real = torch.arange(TOKENS) >= TOKENS - torch.tensor(LENGTHS).unsqueeze(1)  # [B, T]
        self.generator = torch.Generator().manual_seed(0)

    def check_whole_rows(self) -> None:
        """Check training: outputs of real queries, and gradients of queries, keys and values."""
        inputs = self._drawn(TOKENS)
        query, key, value = (tensor.requires_grad_() for tensor in self.accelerator.to_device(inputs))
        output = self._attended(query, key, value, self._mask(TOKENS, self.real))
        expected, exact = self._exact(inputs, self.real.unsqueeze(1) & torch.ones(TOKENS, TOKENS).tril().bool())
        what = f"{self.what}, whole rows"
        assert torch.isfinite(output).all(), f"{what}: outputs of padding are not finite"
        assert_close(f"{what}: outputs", output.cpu()[self.real], expected[self.real], self.precision)
        output_gradient = torch.randn(output.shape, generator=self.generator) * self.real[..., None, None]
        output.backward(self.accelerator.to_device(output_gradient.to(output.dtype)))
        expected.backward(output_gradient.to(output.dtype).double())
        for name, tensor, reference in zip(("queries", "keys", "values"), (query, key, value), exact):
            assert tensor.grad is not None, f"{what}: {name} have no gradient"
            assert torch.isfinite(tensor.grad).all(), f"{what}: gradients of {name} are not finite"
            assert_close(f"{what}: gradient of {name}", tensor.grad, reference.grad, self.precision)

    def check_dropout(self) -> None:
        """Check that training drops weights: a query with one column to see gets nothing, or its value doubled."""
        inputs = self._drawn(TOKENS)
        query, key, value = (tensor.requires_grad_() for tensor in self.accelerator.to_device(inputs))
        output = self._attended(query, key, value, self._mask(TOKENS, self.real), dropout=0.5).detach()
        rows, first = torch.arange(len(LENGTHS)), TOKENS - torch.tensor(LENGTHS)
        values = inputs[2].repeat_interleave(self.heads // self.groups, 1)[rows, :, first].double()
        factors = (output.cpu()[rows, first].double() * values).sum(-1) / values.pow(2).sum(-1)
        wrong = [factor for factor in factors.flatten().tolist() if min(abs(factor), abs(factor - 2)) > 0.05]
        assert not wrong, f"{self.what}, dropout of 0.5: multiplies a lone value by {wrong[0]:.2f}, expected 0 or 2"

    @torch.no_grad()
    def check_decoding(self) -> None:
        """Check a rollout: prompts into a static cache, then a token at a time while most columns are empty."""
        from transformers import StaticCache

        cache = StaticCache(config=self.config, max_cache_len=CACHE)
        real = torch.cat([self.real, torch.ones(len(LENGTHS), CACHE - TOKENS, dtype=torch.bool)], 1)
        cached = [torch.empty(len(LENGTHS), self.groups, 0, WIDTH, dtype=self.precision.dtype) for _ in range(2)]
        for tokens in (TOKENS, *[1] * STEPS):
            query, *new_tensors = self._drawn(tokens)
            cached = [torch.cat(pair, 2) for pair in zip(cached, new_tensors)]
            columns = cached[0].shape[2]
            mask = self._mask(tokens, real, cache)
            keys, values = cache.update(*self.accelerator.to_device(new_tensors), 0)
            output = self._attended(self.accelerator.to_device(query), keys, values, mask).cpu()
            visible = real[:, None, :columns] & torch.ones(tokens, columns).tril(columns - tokens).bool()
            expected, _ = self._exact((query, *cached), visible)
            what = f"{self.what}, " + ("prompts" if tokens > 1 else f"token {columns - TOKENS} after them")
            what = f"{what}, static cache of {CACHE}"
            assert torch.isfinite(output).all(), f"{what}: outputs are not finite"
            shown = real[:, columns - tokens : columns]
            assert_close(f"{what}: outputs", output[shown], expected[shown], self.precision)

    def _drawn(self, tokens: int) -> tuple[Tensor, ...]:
        """Return queries, keys and values [B, heads, tokens, WIDTH], as views like those of projections."""
        shapes = [(len(LENGTHS), tokens, heads, WIDTH) for heads in (self.heads, self.groups, self.groups)]
        tensors = [torch.randn(shape, generator=self.generator).to(self.precision.dtype) for shape in shapes]
        return tuple(tensor.transpose(1, 2) for tensor in tensors)

    def _mask(self, tokens: int, real: Tensor, cache: Any = None) -> Any:
        """Return the mask in the form that transformers makes for this implementation."""
        from transformers.masking_utils import create_causal_mask

        device = self.accelerator.device()
        like = torch.empty(len(real), tokens, 0, dtype=self.precision.dtype, device=device)
        return create_causal_mask(self.config, like, self.accelerator.to_device(real.long()), cache)

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float = 0.0) -> Tensor:
        """Return the output [B, T, H, WIDTH]."""
        with self.precision.autocast():
            output: Tensor = self.attend(
                self.layer, query, key, value, mask, dropout=dropout, scaling=self.layer.scaling, sliding_window=None
            )[0]
        expected = (len(query), query.shape[2], self.heads, WIDTH)
        assert tuple(output.shape) == expected, f"{self.what}: gives {tuple(output.shape)}, expected {expected}"
        return output

    def _exact(self, inputs: tuple[Tensor, ...], visible: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the output in float64, 0 for a query that sees nothing, and its inputs, for their gradients."""
        exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
        query, key, value = exact
        key, value = (tensor.repeat_interleave(self.heads // self.groups, 1) for tensor in (key, value))
        scores = self.layer.scaling * query @ key.transpose(2, 3)
        weights = scores.masked_fill(~visible.unsqueeze(1), -1e300).softmax(-1) * visible.unsqueeze(1)
        return (weights @ value).transpose(1, 2), exact


def _llama(accelerator: Accelerator, precision: Precision, attention: str) -> tuple[Tensor, Tensor]:
    """Return logits [real tokens, V] of a small Llama, and the gradient of its embedding [V, H]."""
    network = llama(attention).to(accelerator.device(), precision.dtype)
    mask = (torch.arange(TOKENS) >= TOKENS - torch.tensor(LENGTHS).unsqueeze(1)).long()
    ids = (torch.arange(mask.numel()).view_as(mask) * 7 % 63 + 1) * mask
    ids, mask = accelerator.to_device((ids, mask))
    with precision.autocast():
        logits = network(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
    real = logits[mask.bool()]
    real.logsumexp(-1).sum().backward()
    return real.detach(), network.get_input_embeddings().weight.grad
