"""The CPU's attention: products of matrices over a few rows of the batch at a time, so that scores stay in its caches.

Heads that share keys are rows of one product, so no key is repeated in memory. Keys that a mask hides from a block of
queries, such as those of later tokens, are left out. Training, scoring and decoding use this code, except for layers
that `kernels/decode.c` computes. Torch's attention computes the rest (`_pays`): other dtypes, dropout, position biases,
and 16-bit keys that would be copied first.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from accelerators import portable
from accelerators.backends.cpu.kernels import invariant, softmax
from accelerators.types import KernelImpl, Support

ATTENTION = "cpu_composed"
"""The name among transformers' attention implementations."""

DTYPES = (torch.bfloat16, torch.float32)
"""Products of matrices are faster than torch's attention in these. Two cores of an AMD EPYC with avx512_bf16, causal
masks, 9 heads of 64 that share 3, forward and backward, in ms, torch first; bf16: 61 and 25 for 16 rows of 256, 158 and
49 for 4 of 1,024, 664 and 189 for 1 of 4,096; fp32: 4.5 and 3.7 for 16 of 48, 56 and 56 for 16 of 256, 208 and 147 for
4 of 1,024, 861 and 505 for 1 of 4,096. If a mask hides no later key, which causal models do not have, products in fp32
take up to 1.4 times as long as torch's attention."""

PART = 2**21
"""Scores computed at a time: 4 MB in bf16. An eighth of it takes up to 1.5 times as long, all scores at once up to
twice as long."""

BLOCK = 512
"""Rows of queries, of all heads that share a key head, that are multiplied at a time with the keys that a mask shows to
any of them. For 4 rows of 1,024, 256 takes 1.04 times as long, and 1,024 takes 1.09 times."""

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
    needed: Tensor | None = None,
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
        needed: [B, T], True for the queries whose results are used; None: all. Other results mean nothing.
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
    return _Composed.apply(query, key, value, attention_mask, needed, scale, keep), None


def _pays(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether products of matrices are faster or needed, and give the same result as torch's attention."""
    if (
        not query.dtype == key.dtype == value.dtype
        or len(query) != len(key)
        or (mask is not None and mask.requires_grad)
    ):
        return False
    if invariant.is_active():
        return True  # torch's attention adds up keys in blocks
    # oneDNN copies 16-bit keys that are part of a longer buffer before it multiplies them (torch 2.13).
    copied = query.shape[2] == 1 and key.dtype != torch.float32 and not key.is_contiguous()
    return query.dtype in DTYPES and not copied


def _to_add(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the mask to add to scores of `dtype`; `mask` itself if it is that already."""
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def _of_one_token(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return the result of `_Composed` for a decoding step, whose operators are too short to be split into parts."""
    added = _spread(_to_add(mask, query.dtype), query, key.shape[1])
    queries = _grouped(query, key.shape[1]).flatten(0, 1).flatten(1, 2)
    probabilities = query.new_empty(*queries.shape[:2], key.shape[2])
    _probabilities(probabilities, queries, key.flatten(0, 1), added, scale)
    return torch.bmm(probabilities, value.flatten(0, 1)).view(len(query), 1, query.shape[1], -1)


class _Composed(torch.autograd.Function):
    """softmax(scale * query key' + mask) value, in parts; the mask has a form that `attend` accepts.

    Probabilities that are not saved are computed again in the backward pass, from the mask that all layers share.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        needed: Tensor | None,
        scale: float,
        keep: bool,
    ) -> Tensor:
        grouped, added = _grouped(query, key.shape[1]).contiguous(), _to_add(mask, query.dtype)
        grouped_mask = _spread(added, query, key.shape[1])
        output = value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        of_groups = _grouped(output.transpose(1, 2), key.shape[1])
        parts = _parts(grouped, key, added, needed, whole=keep)
        saved = query.new_empty(*grouped.shape[:4], key.shape[2]) if keep else None
        room = _room(parts, grouped)
        for part in parts:
            queries, keys, values = part.queries_of(grouped), part.keys_of(key), part.keys_of(value)
            probabilities = part.scores(room, queries) if saved is None else part.queries_of(saved)
            _probabilities(probabilities, queries, keys, part.mask_of(grouped_mask), scale)
            part.write_queries(of_groups, torch.bmm(probabilities, values))
        ctx.save_for_backward(grouped, key, value, None if keep else mask, saved)
        ctx.scale, ctx.parts, ctx.complete = scale, parts, needed is None
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        grouped, key, value, mask, saved = ctx.saved_tensors
        groups, parts, (rows, queries, heads, _) = key.shape[1], ctx.parts, gradient.shape
        of_output = _grouped(gradient.transpose(1, 2), groups)
        grouped_mask = _spread(_to_add(mask, key.dtype), gradient.transpose(1, 2), groups)
        fill = torch.empty if ctx.complete else torch.zeros  # what no part computes has no gradient
        of_query = fill(rows, queries, heads, key.shape[3], dtype=key.dtype).transpose(1, 2)
        of_groups = _grouped(of_query, groups)
        # Several blocks of queries see the same keys: the sums of their shares are float32.
        shared = any(part.queries != parts[0].queries for part in parts)
        start = partial(torch.zeros, dtype=torch.float32) if shared else partial(fill, dtype=key.dtype)
        of_key, of_value = start(key.shape), start(value.shape)
        score_room, probability_room = _room(parts, grouped), _room(parts, grouped)
        for part in parts:
            queries, outputs = part.queries_of(grouped), part.queries_of(of_output)
            keys, values = part.keys_of(key), part.keys_of(value)
            of_scores = part.scores(score_room, queries)
            if saved is None:
                probabilities = part.scores(probability_room, queries)
                _probabilities(probabilities, queries, keys, part.mask_of(grouped_mask), ctx.scale)
            else:
                probabilities = part.queries_of(saved)
            part.write_keys(of_value, probabilities.transpose(1, 2), outputs, 1.0, add=shared)
            torch.bmm(outputs, values.transpose(1, 2), out=of_scores)
            # In place: each number depends on itself and on a sum that is computed before.
            torch._softmax_backward_data(of_scores, probabilities, -1, probabilities.dtype, grad_input=of_scores)
            part.write_queries(of_groups, _scaled_product(of_scores, keys, ctx.scale))
            part.write_keys(of_key, of_scores.transpose(1, 2), queries, ctx.scale, add=shared)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None, None, None


class _Part(NamedTuple):
    """Rows, key heads and queries that are computed at a time, and the number of keys that these queries see at most.

    Queries of all heads that share a key head are rows of one matrix.
    """

    rows: slice
    groups: slice
    queries: slice
    keys: int

    def queries_of(self, grouped: Tensor) -> Tensor:
        """Return this part of [B, G, H / G, T, D] as matrices [N, R, D]."""
        return self._select(grouped).flatten(0, 1).flatten(1, 2)

    def keys_of(self, keys: Tensor) -> Tensor:
        """Return this part of [B, G, S, D] as matrices [N, S, D]."""
        return keys[self.rows, self.groups, : self.keys].flatten(0, 1)

    def mask_of(self, added: Tensor | None) -> Tensor | None:
        return None if added is None else self._select(added)[..., : self.keys]

    def scores(self, room: Tensor, queries: Tensor) -> Tensor:
        """Return memory for the scores of `queries` [N, R, D]: [N, R, S]."""
        shape = (*queries.shape[:2], self.keys)
        return room[: math.prod(shape)].view(shape)

    def write_queries(self, grouped: Tensor, part: Tensor) -> None:
        """Write matrices [N, R, D] to this part of [B, G, H / G, T, D]."""
        selected = self._select(grouped)
        selected.copy_(part.view(selected.shape))

    def write_keys(self, keys: Tensor, first: Tensor, second: Tensor, scale: float, *, add: bool) -> None:
        """Write `scale * first second` [N, S, D] to this part of [B, G, S, D], or add it to what is there."""
        selected = self.keys_of(keys)
        if add:
            selected.add_(torch.bmm(first, second), alpha=scale)
        else:
            _scaled_product(first, second, scale, out=selected)

    def _select(self, grouped: Tensor) -> Tensor:
        return grouped[self.rows, self.groups, :, self.queries]


def _grouped(heads: Tensor, groups: int) -> Tensor:
    """Return a view of [B, H, T, D] as [B, G, H / G, T, D]."""
    grouped: Tensor = heads.unflatten(1, (groups, -1))
    return grouped


def _spread(added: Tensor | None, heads: Tensor, groups: int) -> Tensor | None:
    """Return a view of a mask for [B, H, T, ...] as [B, G, H / G, T, S]."""
    return None if added is None else _grouped(added.expand(*heads.shape[:3], -1), groups)


def _parts(grouped: Tensor, key: Tensor, added: Tensor | None, needed: Tensor | None, whole: bool) -> list[_Part]:
    """Return all parts: of at most `PART` scores each, or those of one block of one row's key head.

    Blocks without a needed query are left out.

    Args:
        grouped: the queries, [B, G, H / G, T, D].
        key: [B, G, S, D].
        added: the mask to add, [1 or B, 1 or H, T, S].
        needed: [B, T], the queries whose results are used; None: all.
        whole: do not divide the queries of a row.
    """
    rows, groups, heads, queries = grouped.shape[:4]
    parts = []
    length = queries if whole else max(64, BLOCK // heads // 64 * 64)  # products of a multiple of 64 are fast
    blocks = _blocks(added, queries, key.shape[2], length)
    for block, keys in blocks:
        of_head = (block.stop - block.start) * heads * keys
        heads_at_once = min(groups, max(1, PART // of_head))
        rows_at_once = max(1, PART // (groups * of_head))
        for used in [range(rows)] if needed is None else _runs(needed[:, block].any(1).tolist()):
            for row in used[::rows_at_once]:
                for group in range(0, groups, heads_at_once):
                    at_once = slice(row, min(row + rows_at_once, used.stop)), slice(group, group + heads_at_once)
                    parts.append(_Part(*at_once, block, keys))
    return parts


def _runs(flags: list[bool]) -> list[range]:
    """Return the ranges of consecutive true flags."""
    runs = (list(run) for flag, run in groupby(range(len(flags)), flags.__getitem__) if flag)
    return [range(run[0], run[-1] + 1) for run in runs]


def _blocks(added: Tensor | None, queries: int, keys: int, length: int) -> list[tuple[slice, int]]:
    """Return blocks of `length` queries, each with the number of keys to compute: all but the last if those are hidden.

    Hidden keys have probability 0, except for a query that sees nothing: its block computes all keys.
    """
    blocks = [slice(first, min(first + length, queries)) for first in range(0, queries, length)]
    if added is None or len(blocks) == 1:
        return [(block, keys) for block in blocks]
    lowest, seen = torch.finfo(added.dtype).min, []
    for block in blocks:
        causal = min(block.stop + max(keys - queries, 0), keys)
        visible, hidden = added.expand(-1, -1, queries, keys)[:, :, block].tensor_split([causal], dim=3)
        suffices = (causal == keys or hidden.amax() <= lowest) and visible.amax(-1).amin() > lowest
        seen.append(causal if suffices else keys)
    return list(zip(blocks, seen))


def _room(parts: list[_Part], grouped: Tensor) -> Tensor:
    """Return memory for the scores of the largest part."""
    return grouped.new_empty(max(math.prod(part._select(grouped).shape[:4]) * part.keys for part in parts))


def _probabilities(out: Tensor, queries: Tensor, keys: Tensor, mask: Tensor | None, scale: float) -> None:
    """Write the softmax of the masked scores, which is computed in float32, to `out` [N, R, S]."""
    if out.dtype in DTYPES and not (softmax.why_not() or invariant.is_active()):
        torch.bmm(queries, keys.transpose(1, 2), out=out)
        softmax.softmax_(out, mask, scale)
        return
    if mask is not None:
        # -inf becomes a number, for rows that consist of it; as fast as a copy, while clamp_min is three times slower.
        lowest = torch.finfo(out.dtype).min
        torch.threshold(mask, lowest, lowest, out=out.view(mask.shape))
    torch.baddbmm(out, queries, keys.transpose(1, 2), beta=float(mask is not None), alpha=scale, out=out)
    torch.softmax(out, -1, out=out)


def _scaled_product(first: Tensor, second: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    out = first.new_empty(*first.shape[:2], second.shape[2]) if out is None else out
    return torch.baddbmm(out, first, second, beta=0.0, alpha=scale, out=out)


def _faster_than_sdpa(accelerator: object) -> Support:
    dtypes = " and ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    slower = f"; softmax by torch's operators: {reason}" if (reason := softmax.why_not()) else ""
    return Support(
        True,
        f"products of matrices without keys that a mask hides, faster than torch's attention in {dtypes}; torch's in "
        f"other dtypes; other layers of a model then need not compute padding{slower}",
    )


COMPOSED = KernelImpl(
    operation="attention",
    name="composed",
    factory=composed,
    supported=_faster_than_sdpa,
    priority=10,
    refuses=portable.missing_features(_LACKING),
)
