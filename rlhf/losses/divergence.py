"""The divergence of a student's distribution of each token from a teacher's, over the whole vocabulary.

The logits of both are computed for one part of the vocabulary at a time, in the forward pass and again in the backward
pass, as in `rlhf.losses.fused_lm_head`: neither the logits of a batch nor their gradient ever exist at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.losses.log_probs import LOWEST, RunningSums, part_columns


class Logits(NamedTuple):
    """Logits of N tokens as a product that has yet to be computed, or stored.

    hidden: [N, H], the last hidden states; without a weight, the logits [N, V] themselves.
    weight: [V, H] of the output layer, of the type of `hidden`. bias: [V], or None.
    """

    hidden: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None

    @property
    def size(self) -> int:
        """The number of logits of a token, V."""
        return self.hidden.shape[-1] if self.weight is None else len(self.weight)

    def flatten(self) -> Logits:
        """Return them with N rows, in the type in which their product is computed (under autocast another one)."""
        hidden = self.hidden.reshape(-1, self.hidden.shape[-1])
        if self.weight is None:
            return Logits(hidden)
        kind = torch.nn.functional.linear(hidden[:0], self.weight[:0]).dtype
        return Logits(hidden.to(kind), self.weight.to(kind), None if self.bias is None else self.bias.to(kind))


class _Parts:
    """Computes one part of some logits after the other, [N, v] float32 each, in the same memory.

    Attributes:
        products: a buffer of the type of the hidden states, for N rows of `width` columns.
    """

    def __init__(self, logits: Logits, width: int) -> None:
        self._logits = logits
        self.products = logits.hidden.new_empty(len(logits.hidden) * width)
        wide = logits.hidden.dtype == torch.float32
        self._floats = self.products if wide else torch.empty_like(self.products, dtype=torch.float32)

    def compute(self, columns: slice) -> Tensor:
        """Return the logits of `columns`; -inf becomes a finite number, for differences to be finite."""
        (hidden, weight, bias), floats = self._logits, shaped(self._floats, len(self._logits.hidden), columns)
        products = shaped(self.products, len(hidden), columns)
        if weight is None:
            floats.copy_(hidden[:, columns])
        elif bias is None:
            torch.mm(hidden, weight[columns].t(), out=products)
        else:
            torch.addmm(bias[columns], hidden, weight[columns].t(), out=products)
        if weight is not None and products.dtype != torch.float32:
            floats.copy_(products)
        return floats.clamp_min_(LOWEST)


def shaped(buffer: Tensor, rows: int, columns: slice) -> Tensor:
    """Return the start of a flat buffer as a tensor of `rows` rows of these columns."""
    width = columns.stop - columns.start
    return buffer[: rows * width].view(rows, width)


def _slices(size: int, width: int) -> Iterator[slice]:
    return (slice(start, min(start + width, size)) for start in range(0, size, width))


class _Divergence(torch.autograd.Function):
    """Maps a student's logits of N tokens, and a teacher's, to KL(student || teacher) or KL(teacher || student) [N].

    With p the first of the two and q the other, both divided by their sums Z, of logits x and y:
    KL(p || q) = E_p[x - y] - log Z_p + log Z_q, so that one pass over the parts of the vocabulary suffices.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, teacher: Logits, reverse: bool
    ) -> Tensor:
        student = Logits(hidden, weight, bias)
        ctx.size = min(student.size, teacher.size)
        ctx.width = part_columns(len(hidden), ctx.size)
        students, teachers = _Parts(student, ctx.width), _Parts(teacher, ctx.width)
        buffer = torch.empty(len(hidden) * ctx.width, dtype=torch.float32, device=hidden.device)
        sums, teacher_sums = RunningSums(hidden), RunningSums(hidden)
        first, second = (sums, teacher_sums) if reverse else (teacher_sums, sums)
        expected = torch.zeros_like(sums.top)
        for columns in _slices(ctx.size, ctx.width):
            both = students.compute(columns), teachers.compute(columns)
            values, others = both if reverse else both[::-1]
            differences, top = torch.sub(values, others, out=shaped(buffer, len(hidden), columns)), first.top
            first.add(values)  # they are e^(values - first.top) now
            expected = (top - first.top).exp() * expected + differences.mul_(values).sum(-1, keepdim=True)
            second.add(others)
        divergences = expected / first.total - first.normalizers() + second.normalizers()
        ctx.save_for_backward(
            hidden, weight, bias, *teacher, sums.normalizers(), teacher_sums.normalizers(), divergences
        )
        ctx.reverse = reverse
        return divergences.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, *teacher, normalizers, teacher_normalizers, divergences = ctx.saved_tensors
        students, teachers = _Parts(Logits(hidden, weight, bias), ctx.width), _Parts(Logits(*teacher), ctx.width)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        kind = hidden.dtype if weight is None else torch.float32
        of_hidden = torch.zeros_like(hidden, dtype=kind) if needs_hidden else None
        of_weight = torch.zeros_like(weight) if needs_weight else None  # tokens that the teacher lacks have none
        of_bias = torch.zeros_like(bias) if needs_bias else None
        g = grad.unsqueeze(-1)
        for columns in _slices(ctx.size, ctx.width):
            values = students.compute(columns).sub_(normalizers)
            others = teachers.compute(columns).sub_(teacher_normalizers)
            if ctx.reverse:  # p (log p - log q - KL)
                others.sub_(values).add_(divergences).mul_(-g)
                values.exp_().mul_(others)
            else:  # p - q, of the student's p
                values.exp_().sub_(others.exp_()).mul_(g)
            if weight is None:
                if of_hidden is not None:
                    of_hidden[:, columns].copy_(values)
                continue
            products = shaped(students.products, len(hidden), columns).copy_(values)
            if of_weight is not None:  # each row is computed in one product, without partial sums in low precision
                torch.mm(products.t(), hidden, out=of_weight[columns])
            if of_bias is not None:
                of_bias[columns] = values.sum(0)
            if of_hidden is not None:
                of_hidden += products @ weight[columns]
        return None if of_hidden is None else of_hidden.to(hidden.dtype), of_weight, of_bias, None, None


def sampled_divergences(log_probs: Tensor, teacher: Tensor) -> Tensor:
    """Return an estimate of KL(student || teacher) from each token that the student has drawn, [...] float32.

    It is log p - log q of the token, p the student's probability and q the teacher's. Its gradient is that times the
    gradient of log p: over the tokens that p draws, the mean of both is that of `token_divergences`, since
    E_p[grad log p] = 0.

    Args:
        log_probs: the student's log-probabilities of drawn tokens, at temperature 1, with a gradient.
        teacher: the teacher's, of the same tokens.
    """
    differences = (log_probs - teacher).detach()
    return differences + differences * (log_probs - log_probs.detach())


def token_divergences(student: Logits, teacher: Logits, *, reverse: bool) -> Tensor:
    """Return the divergence between the distributions of each token, in nats: [...] float32, with a gradient.

    If one of the two has more logits, the distributions are those over the tokens that both have. The gradient is that
    of the student's logits, as if the tokens had been given: they do not depend on the student (arXiv:2306.13649,
    section 3). It is 0 where the distributions are equal.

    Args:
        student: logits of [...] tokens.
        teacher: of the same tokens; without a gradient.
        reverse: KL(student || teacher), which keeps the student to what the teacher would write; else KL(teacher ||
            student), which makes it cover all of that.
    """
    rows = student.flatten()
    divergences: Tensor = _Divergence.apply(*rows, Logits(*teacher.flatten()), reverse)
    return divergences.view(student.hidden.shape[:-1])
