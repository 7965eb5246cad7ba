"""The CPU's attention: products of matrices over a few rows of the batch at a time, so that scores stay in its caches.

Heads that share keys are rows of one product, so no key is repeated in memory. Training, scoring and decoding use this
code, except for layers that `kernels/decode.c` computes. Torch's attention is used if it is faster: see `SQUARES`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from accelerators import portable
from accelerators.backends.cpu.kernels import invariant
from accelerators.types import KernelImpl, Support

ATTENTION = "cpu_composed"
"""The name among transformers' attention implementations."""

SQUARES = {torch.bfloat16: 2048, torch.float32: 192}
"""Products of matrices are faster than torch's attention if queries times keys are at most the square of this.
Two cores of an AMD EPYC with avx512_bf16, 9 heads of 64 that share 3, in ms, torch first; forward and backward, bf16:
10.1 and 1.1 for 16 rows of 48, 57 and 21 for 16 of 256, 303 and 171 for 2 of 2,048 (the longest measured); forward
alone, fp32: 1.2 and 0.7 for 16 of 48, 11.1 and 10.1 for 16 of 192, 18.6 and 18.3 for 16 of 256."""

PART = 2**21
"""Scores computed at a time: 4 MB in bf16. An eighth of it takes up to 1.5 times as long, all scores at once up to
twice as long."""

KEPT = 2
"""Probabilities are saved for the backward pass if a row has at most this many keys per dimension of a head. They then
take no more memory than query and output, and computing them again would add a quarter to the time of both passes."""

_LACKING = ("s_aux", "sinks", "indices", "block_indices", "softcap")
"""Features that transformers may pass to an attention implementation and this one lacks."""


def composed(accelerator: object) -> str:
    """Register the implementation with transformers and return its name."""
    return portable.register_attention(ATTENTION, attend, _LACKING, takes_real_tokens=True)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **features: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers calls it.

    Args:
        module: the layer, which may say that it is causal.
        query: [B, H, T, D].
        key: [B, G, S, D]; H / G heads share each of the G.
        value: [B, G, S, E].
        attention_mask: [1 or B, 1 or H, T, S], added to the scores, or True for each key that a query sees. None: all
            keys, or if `is_causal` those up to the query's position. A query that sees nothing gets the mean of all
            values.
        dropout: probability; torch's attention handles it.
        scaling: factor of the scores; None: 1 / sqrt(D).
        is_causal: None: the module's.
        **features: further arguments of the model.

    Returns:
        [B, T, H, E], and no weights.
    """
    queries, keys = query.shape[2], key.shape[2]
    if dropout or features.get("position_bias") is not None or not _pays(query, key, value, attention_mask):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **features}
        output: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0]
        return output, None
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if attention_mask is None and is_causal and queries > 1:
        attention_mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device).tril()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if queries == 1 and not trained:
        return _of_one_token(query, key, value, attention_mask, scale), None
    keep = trained and keys <= KEPT * query.shape[3]
    return _Composed.apply(query, key, value, attention_mask, scale, keep), None


def _pays(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether products of matrices are faster or needed, and give the same result as torch's attention."""
    if (
        not query.dtype == key.dtype == value.dtype
        or len(query) != len(key)
        or (mask is not None and mask.requires_grad)
    ):
        return False
    queries, keys = query.shape[2], key.shape[2]
    if invariant.is_active():
        return True  # torch's attention adds up keys in blocks
    if queries == 1:
        # oneDNN copies keys that are part of a longer buffer before it multiplies them (torch 2.13).
        return key.dtype == torch.float32 or key.is_contiguous()
    return queries * keys <= SQUARES.get(query.dtype, 0) ** 2


def _to_add(mask: Tensor | None, query: Tensor, groups: int) -> Tensor | None:
    """Return the mask to add, [B, G, H / G, T, S] in the queries' dtype; a view if `mask` is of that form already."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    grouped: Tensor = mask.to(query.dtype).expand(*query.shape[:3], -1).unflatten(1, (groups, -1))
    return grouped


def _of_one_token(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return the result of `_Composed` for a decoding step, whose operators are too short to be split into parts."""
    grouped = _grouped(query, key).flatten(0, 1)
    probabilities = query.new_empty(len(grouped), grouped.shape[1], key.shape[2])
    _probabilities(probabilities, grouped, key.flatten(0, 1), _to_add(mask, query, key.shape[1]), scale)
    return torch.bmm(probabilities, value.flatten(0, 1)).view(len(query), 1, query.shape[1], -1)


class _Composed(torch.autograd.Function):
    """softmax(scale * query key' + mask) value, in parts; the mask has a form that `attend` accepts.

    Probabilities that are not saved are computed again in the backward pass, from the mask that all layers share.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, keep: bool
    ) -> Tensor:
        groups = key.shape[1]
        grouped = _grouped(query, key)
        added = _to_add(mask, query, groups)
        output = value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        of_groups = output.transpose(1, 2).unflatten(1, (groups, -1))
        parts = _parts(grouped, key)
        saved = query.new_empty(*grouped.shape[:3], key.shape[2]) if keep else None
        room = _room(parts, grouped, key)
        for part in parts:
            queries, keys, values = _at(part, grouped, key, value)
            probabilities = room[: len(queries)] if saved is None else saved[part].flatten(0, 1)
            _probabilities(probabilities, queries, keys, None if added is None else added[part], scale)
            result = of_groups[part]
            result.copy_(torch.bmm(probabilities, values).view(result.shape))
        ctx.save_for_backward(grouped, key, value, None if keep else mask, saved)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        grouped, key, value, mask, saved = ctx.saved_tensors
        added = _to_add(mask, gradient.transpose(1, 2), key.shape[1])
        of_output = _grouped(gradient.transpose(1, 2), key)
        of_query, of_key, of_value = (torch.empty(t.shape, dtype=t.dtype) for t in (grouped, key, value))
        parts = _parts(grouped, key)
        score_room, probability_room = _room(parts, grouped, key), _room(parts, grouped, key)
        for part in parts:
            queries, keys, values, outputs = _at(part, grouped, key, value, of_output)
            of_queries, of_keys, of_values = _at(part, of_query, of_key, of_value)
            of_scores = score_room[: len(queries)]
            if saved is None:
                probabilities = probability_room[: len(queries)]
                _probabilities(probabilities, queries, keys, None if added is None else added[part], ctx.scale)
            else:
                probabilities = saved[part].flatten(0, 1)
            torch.bmm(probabilities.transpose(1, 2), outputs, out=of_values)
            torch.bmm(outputs, values.transpose(1, 2), out=of_scores)
            # In place: each number depends on itself and on a sum that is computed before.
            torch._softmax_backward_data(of_scores, probabilities, -1, probabilities.dtype, grad_input=of_scores)
            _scaled_product(of_queries, of_scores, keys, ctx.scale)
            _scaled_product(of_keys, of_scores.transpose(1, 2), queries, ctx.scale)
        of_query = of_query.view(len(grouped), gradient.shape[2], gradient.shape[1], -1)
        return of_query, of_key, of_value, None, None, None


def _grouped(heads: Tensor, key: Tensor) -> Tensor:
    """Return [B, H, T, D] as [B, G, H / G * T, D]: queries that share keys are rows of one matrix."""
    return heads.reshape(len(heads), key.shape[1], -1, heads.shape[3])


def _parts(grouped: Tensor, key: Tensor) -> list[tuple[slice, slice]]:
    """Return rows and key heads to compute at a time: at most `PART` scores, or those of one key head."""
    rows, groups, queries = grouped.shape[:3]
    of_head = queries * key.shape[2]
    if at_once := PART // (groups * of_head):
        return [(slice(row, row + at_once), slice(None)) for row in range(0, rows, at_once)]
    at_once = max(1, PART // of_head)
    slices = [slice(group, group + at_once) for group in range(0, groups, at_once)]
    return [(slice(row, row + 1), heads) for row in range(rows) for heads in slices]


def _room(parts: list[tuple[slice, slice]], grouped: Tensor, key: Tensor) -> Tensor:
    """Return memory for the scores of the first part, which is the largest: [N, R, S]."""
    rows, heads, queries = grouped[parts[0]].shape[:3]
    return grouped.new_empty(rows * heads, queries, key.shape[2])


def _at(part: tuple[slice, slice], *tensors: Tensor) -> list[Tensor]:
    """Return a part of [B, G, ...] as a batch of matrices [N, ...]."""
    return [tensor[part].flatten(0, 1) for tensor in tensors]


def _probabilities(out: Tensor, queries: Tensor, keys: Tensor, mask: Tensor | None, scale: float) -> None:
    """Write the softmax of the masked scores, which torch computes in float32, to `out` [N, R, S]."""
    if mask is not None:
        # -inf becomes a number, for rows that consist of it; as fast as a copy, while clamp_min is three times slower.
        lowest = torch.finfo(out.dtype).min
        torch.threshold(mask, lowest, lowest, out=out.view(mask.shape))
    torch.baddbmm(out, queries, keys.transpose(1, 2), beta=float(mask is not None), alpha=scale, out=out)
    torch.softmax(out, -1, out=out)


def _scaled_product(out: Tensor, first: Tensor, second: Tensor, scale: float) -> None:
    torch.baddbmm(out, first, second, beta=0.0, alpha=scale, out=out)


def _faster_than_sdpa(accelerator: object) -> Support:
    limits = " and ".join(f"{limit} tokens in {str(dtype).removeprefix('torch.')}" for dtype, limit in SQUARES.items())
    return Support(
        True,
        f"products of matrices, faster than torch's attention up to {limits}; torch's beyond; "
        "other layers of a model then need not compute padding",
    )


COMPOSED = KernelImpl(
    operation="attention",
    name="composed",
    factory=composed,
    supported=_faster_than_sdpa,
    priority=10,
    refuses=portable.missing_features(_LACKING),
)
