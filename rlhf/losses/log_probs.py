"""Log-probabilities and entropies of tokens, and masked means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlhf.config.estimators import LossMean

CHUNK_ELEMENTS = 1 << 22
"""Elements of a float32 working copy of logits. `use_chunks` sets them to `Accelerator.chunk_elements` of this process.

All chunks share one copy: with a new one for each, the passes over 512 rows of 49,152 took twice as long (two cores of
an AMD EPYC)."""

_FEWEST_COLUMNS = 256  # per part of the vocabulary, because smaller matrix products are slow

LOWEST = -1e30
"""A finite stand-in for the logarithm of 0."""

PART_COLUMNS = 4096
"""Logits of a row that are summed at a time if results must not depend on the batch (`exact_sums`): few enough that no
backend divides the sum of one row among its threads."""

_exact = False


@contextmanager
def exact_sums() -> Iterator[None]:
    """Sum the logits of a row in parts of `PART_COLUMNS` in this block, whatever the number of rows.

    Stored and projected logits, of any number of rows, then have log-probabilities that are equal bit for bit, if the
    device's operators do not depend on the batch either (operation `batch_invariant`).
    """
    global _exact
    before, _exact = _exact, True
    try:
        yield
    finally:
        _exact = before


def part_columns(rows: int, most: int) -> int:
    """Return how many of a vocabulary's `most` logits are summed at a time, for this number of rows."""
    return min(most, PART_COLUMNS if _exact else max(_FEWEST_COLUMNS, CHUNK_ELEMENTS // max(rows, 1)))


def use_chunks(elements: int) -> None:
    """Set the size of working copies in this process, for its accelerator; results differ by rounding alone."""
    global CHUNK_ELEMENTS
    CHUNK_ELEMENTS = elements


class RunningSums:
    """Sums over the parts of a vocabulary so far, x being a logit minus the highest one: [N, 1] float32 each.

    Attributes:
        top: the highest logit.
        total: the sum of e^x.
        mean: the sum of x e^x.
    """

    def __init__(self, rows: Tensor) -> None:
        """Start with no logits, for N `rows` [N, ...]."""
        self.top = rows.new_full((len(rows), 1), torch.finfo(torch.float32).min, dtype=torch.float32)
        self.total, self.mean = torch.zeros_like(self.top), torch.zeros_like(self.top)

    def add(self, values: Tensor, second: Tensor | None = None) -> None:
        """Add a part of the logits, [N, v] float32, which is overwritten, as is the buffer `second` for the mean.

        Without that, the part becomes e^x.
        """
        highest = torch.maximum(self.top, values.amax(-1, keepdim=True))
        part_total, part_mean = exponentials_(values.sub_(highest), second)
        lower = self.top - highest
        if part_mean is not None:
            self.mean = lower.exp() * (self.mean + lower * self.total) + part_mean
        self.total = lower.exp() * self.total + part_total
        self.top = highest

    def normalizers(self) -> Tensor:
        """Return the logarithm of the sum of e^logit."""
        return self.top + self.total.log()

    def entropies(self) -> Tensor:
        """Return log Z - E[logit], both minus the highest logit."""
        return self.total.log() - self.mean / self.total


class _TokenLogProbs(torch.autograd.Function):
    """log p(label) and optionally the entropy of p = softmax(logits / temperature), a few rows at a time.

    There is no float32 copy of all logits, and one gradient tensor for both results.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)  # an entropy that no loss uses costs nothing in the backward pass
        normalizers = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
        entropies = torch.empty_like(normalizers) if entropy else None
        work, second = _working_copies(logits, 2 if entropy else 1)
        for part in _chunks(logits):
            sums, width = RunningSums(logits[part]), PART_COLUMNS if _exact else logits.shape[-1]
            for columns in logits[part].split(width, -1):
                shape = columns.shape
                copies = (work, second) if entropy else (work,)
                values, *buffer = (copy.flatten()[: columns.numel()].view(shape) for copy in copies)
                sums.add(tempered_(values.copy_(columns), temperature), *buffer)
            normalizers[part] = sums.normalizers().squeeze(-1)
            if entropies is not None:
                entropies[part] = sums.entropies().squeeze(-1)
        ctx.save_for_backward(logits, labels, normalizers, entropies)
        ctx.temperature = temperature
        chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return tempered_(chosen.to(torch.float32, copy=True), temperature) - normalizers, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits, labels, normalizers, entropies = ctx.saved_tensors
        grad = torch.zeros_like(normalizers) if grad is None else grad
        result = torch.empty_like(logits)
        work, second = _working_copies(logits, 1 if entropy_grad is None else 2)
        for part in _chunks(logits):
            values = tempered_(work[: len(logits[part])].copy_(logits[part]), ctx.temperature)
            g = grad[part].unsqueeze(-1) / ctx.temperature
            values.sub_(normalizers[part].unsqueeze(-1))
            if entropy_grad is None:
                gradient_(values, g)
            else:
                h = entropy_grad[part].unsqueeze(-1) / ctx.temperature
                gradient_(values, g, second[: len(values)], entropies[part].unsqueeze(-1), h)
            result[part].copy_(values.scatter_add_(-1, labels[part].unsqueeze(-1), g))
        return result, None, None, None


def token_log_probs(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-probability of each label under softmax(logits / temperature).

    Args:
        logits: [B, T, V], of any floating type.
        labels: [B, T], token ids.
        temperature: above 0.

    Returns:
        [B, T] float32. Neither the forward nor the backward pass stores a [B, T, V] float32 copy.
    """
    log_probs: Tensor = _TokenLogProbs.apply(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), temperature, False
    )[0]
    return log_probs.view(labels.shape)


def token_log_probs_and_entropy(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return `token_log_probs` and the entropy of each token's distribution, in nats: [B, T] float32 each.

    Both have gradients, and neither stores a [B, T, V] float32 copy.
    """
    log_probs, entropy = _TokenLogProbs.apply(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), temperature, True
    )
    return log_probs.view(labels.shape), entropy.view(labels.shape)


def ends_with(ids: Tensor, mask: Tensor, ends: Tensor) -> Tensor:
    """Return 1 for each row whose last token in `mask` [B, A] is one of `ends` [N]: `ids` [B, A] -> [B] float32."""
    last = (torch.arange(mask.shape[1], device=mask.device) * mask).argmax(-1, keepdim=True)
    return ((ids.int().gather(-1, last) == ends).any(-1) & mask.bool().any(-1)).float()


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` where `mask` is 1, else 0; log-probabilities of padding may be infinite, so not a product."""
    return torch.where(mask > 0, values, torch.zeros_like(values))


def masked_mean(values: Tensor, mask: Tensor, total: Tensor | None = None) -> Tensor:
    """Return the sum of `values` where `mask` is 1, divided by `total` (default: the sum of the mask, at least 1)."""
    total = mask.sum() if total is None else total
    return (values * mask).sum() / total.clamp_min(1)


def token_weights(mask: Tensor, loss_mean: LossMean, *, tokens: Tensor, sequences: Tensor, longest: int) -> Tensor:
    """Return weights that replace `mask` in `masked_mean(..., total=tokens)` for the mean `loss_mean`.

    Args:
        mask: [B, A], a part of a batch.
        loss_mean: token: a mean over tokens; sequence: over sequences, of each one's mean (arXiv:2402.03300, equation
            3); constant: over sequences, of each one's sum divided by `longest` (arXiv:2503.20783, section 3.2).
        tokens: number of tokens in the global batch.
        sequences: number of sequences in the global batch.
        longest: the most tokens that a completion may have.

    Returns:
        [B, A], 0 where the mask is 0.
    """
    if loss_mean == "token":
        return mask
    length = mask.sum(1, keepdim=True).clamp_min(1) if loss_mean == "sequence" else longest
    return mask * (tokens / sequences / length)


def masked_row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each row where `mask` is 1: [B, T] -> [B]; 0 for an empty row."""
    mask = mask.to(values.dtype)
    return (values * mask).sum(-1) / mask.sum(-1).clamp_min(1)


def tempered_(logits: Tensor, temperature: float) -> Tensor:
    """Divide float32 logits by the temperature, in place; in bf16 the quotient would be rounded to 8 bits."""
    return logits if temperature == 1 else logits.div_(temperature)


def exponentials_(values: Tensor, second: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return (sum of e^x, sum of x e^x) over each row's values x, [N, 1] each; the values are overwritten.

    Args:
        values: [N, V] float32, none above 0; -inf adds nothing.
        second: a buffer like `values`; None skips the second sum.
    """
    if second is None:
        return values.exp_().sum(-1, keepdim=True), None
    torch.exp(values, out=second)
    total = second.sum(-1, keepdim=True)
    return total, values.clamp_min_(LOWEST).mul_(second).sum(-1, keepdim=True)


def gradient_(
    values: Tensor, g: Tensor, second: Tensor | None = None, entropy: Tensor | None = None, h: Tensor | None = None
) -> Tensor:
    """Turn log p of all tokens into the gradient of their logits, in place; the label's still lacks + g.

    Args:
        values: [N, V] float32, log p.
        g: [N, 1], the gradient of the loss with respect to log p(label), divided by the temperature.
        second: a buffer like `values`, if the entropy has a gradient.
        entropy: [N, 1], with `second`.
        h: [N, 1], the gradient of the loss with respect to the entropy, divided by the temperature, with `second`.
    """
    if second is None:
        return values.exp_().mul_(-g)
    assert entropy is not None and h is not None
    torch.exp(values, out=second)
    # dH / dz = -p (log p + H); finite where p is 0, for the product to be 0 there.
    return values.clamp_min_(LOWEST).add_(entropy).mul_(-h).sub_(g).mul_(second)


def _working_copies(logits: Tensor, count: int) -> list[Tensor]:
    """Return two float32 tensors with the rows of a chunk; the second is empty if `count` is 1."""
    rows = min(len(logits), _rows(logits))
    sizes = [rows, rows if count == 2 else 0]
    return [torch.empty(size, logits.shape[-1], dtype=torch.float32, device=logits.device) for size in sizes]


def _rows(logits: Tensor) -> int:
    return max(1, CHUNK_ELEMENTS // logits.shape[-1])


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Return slices of the rows of [N, V] logits, each as large as a working copy."""
    rows = _rows(logits)
    return (slice(start, start + rows) for start in range(0, len(logits), rows))
