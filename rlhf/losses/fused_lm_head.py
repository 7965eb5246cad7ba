"""Log-probabilities and entropies of tokens from hidden states, fused with the projection to the vocabulary.

Logits are computed for one part of the vocabulary at a time, in the forward pass and again in the backward pass:
neither the logits of a whole batch nor their gradient ever exist at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.losses.log_probs import RunningSums, gradient_, part_columns, tempered_


class _Projected(torch.autograd.Function):
    """Maps hidden states [N, H], weight [V, H], bias [V] and labels [N] to log p(label) [N] and entropy [N] or None."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        sums = RunningSums(hidden)
        chosen = torch.zeros_like(sums.top)
        for part in _parts(hidden, weight, bias, labels, temperature, second=entropy):
            chosen += torch.where(part.here, part.values.gather(-1, part.column), 0)
            sums.add(part.values, part.second)
        normalizers = sums.normalizers()
        entropies = sums.entropies() if entropy else None
        ctx.save_for_backward(hidden, weight, bias, labels, normalizers, entropies)
        ctx.temperature = temperature
        return (chosen - normalizers).squeeze(-1), None if entropies is None else entropies.squeeze(-1)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, bias, labels, normalizers, entropies = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        of_weight = torch.empty_like(weight) if needs_weight else None
        of_bias = torch.empty_like(bias) if needs_bias else None
        g = torch.zeros_like(normalizers) if grad is None else grad.unsqueeze(-1) / ctx.temperature
        h = None if entropy_grad is None else entropy_grad.unsqueeze(-1) / ctx.temperature
        for part in _parts(hidden, weight, bias, labels, ctx.temperature, second=h is not None):
            gradient_(part.values.sub_(normalizers), g, part.second, entropies, h)
            part.values.scatter_add_(-1, part.column, torch.where(part.here, g, 0))
            logits = part.logits.copy_(part.values)  # to the type of the products; in float32 they are one tensor
            if of_weight is not None:  # each row is computed in one product, without partial sums in low precision
                torch.mm(logits.t(), hidden, out=of_weight[part.columns])
            if of_bias is not None:
                of_bias[part.columns] = part.values.sum(0)
            if of_hidden is not None:
                of_hidden += logits @ weight[part.columns]
        of_hidden = None if of_hidden is None else of_hidden.to(hidden.dtype)
        return of_hidden, of_weight, of_bias, None, None, None


class _Part(NamedTuple):
    """One part of the vocabulary for all N tokens; the next part overwrites its tensors."""

    columns: slice
    logits: Tensor  # [N, v], of the weight's type
    values: Tensor  # [N, v] float32, divided by the temperature; the same tensor if weights are float32
    second: Tensor | None  # a buffer of the same shape
    here: Tensor  # [N, 1] True if the label is one of the columns
    column: Tensor  # [N, 1] its place among the columns; arbitrary if it is not one of them


def _parts(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float, *, second: bool
) -> Iterator[_Part]:
    rows, size = len(hidden), len(weight)
    width = part_columns(rows, size)
    wide = hidden.dtype == torch.float32
    products = torch.empty(rows * width, dtype=hidden.dtype, device=hidden.device)
    floats = products if wide else torch.empty_like(products, dtype=torch.float32)
    buffer = torch.empty_like(floats) if second else None
    labels = labels.unsqueeze(-1)
    for start in range(0, size, width):
        columns = slice(start, min(start + width, size))
        shape = rows, columns.stop - start
        logits, values = (flat[: shape[0] * shape[1]].view(shape) for flat in (products, floats))
        if bias is None:
            torch.mm(hidden, weight[columns].t(), out=logits)
        else:
            torch.addmm(bias[columns], hidden, weight[columns].t(), out=logits)
        if not wide:
            values.copy_(logits)
        yield _Part(
            columns,
            logits,
            tempered_(values, temperature),
            None if buffer is None else buffer[: shape[0] * shape[1]].view(shape),
            (labels >= start) & (labels < columns.stop),
            (labels - start).clamp(0, shape[1] - 1),
        )


def projected_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return `rlhf.losses.log_probs.token_log_probs` of `linear(hidden, weight, bias)` without storing these logits.

    With a gradient the logits are computed twice: 4 matrix products instead of 3.

    Args:
        hidden: [..., H].
        weight: [V, H], of the type of `hidden`.
        bias: [V], or None.
        labels: [...], token ids.
        temperature: above 0.
        entropy: also compute the entropy of each token's distribution, in nats.

    Returns:
        (log-probabilities, entropies or None), [...] float32 each, with gradients.
    """
    hidden = hidden.reshape(-1, hidden.shape[-1])
    kind = torch.nn.functional.linear(hidden[:0], weight[:0]).dtype  # under autocast different from theirs
    bias = None if bias is None else bias.to(kind)
    log_probs, entropies = _Projected.apply(
        hidden.to(kind), weight.to(kind), bias, labels.reshape(-1), temperature, entropy
    )
    return log_probs.view(labels.shape), None if entropies is None else entropies.view(labels.shape)
