"""Find operators of a device whose numbers for a row depend on the batch: on other rows, padding, or later columns.

Trainers ask before a run that needs the same numbers in every batch (`ppo.generation_exact`), and the conformance kit
asks in the block of an implementation of `batch_invariant`. Operators are run and compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

ROWS, SIZES, COUNTS = 70, (64, 100), (1, 2, 3, 5, 17, 33)
"""Rows of the whole batch, numbers of a row, and rows that are computed apart from the others."""

WIDE = 40_000
"""Numbers of a row that a device may divide among its units if there is only one row."""

LONG = 2_900
"""Numbers of a row of activations: a device may divide all rows among its units, into parts that end anywhere."""

HEADS, GROUPS, SIZE = 4, 2, 32


def find_batch_dependence(accelerator: Accelerator, dtype: torch.dtype) -> str:
    """Return the first operator found to depend on the batch, as "its <name> depends on ..."; "" if none does."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        moved: Tensor = accelerator.to_device(torch.randn(shape, generator=generator).to(dtype))
        return moved

    with torch.no_grad():
        for size in SIZES:
            for name, function in _row_operators(draw, size):
                numbers = draw(ROWS, size)
                if differing := _differing_count(function, numbers):
                    return f"its {name} depends on the number of rows ({differing} of {ROWS} give other numbers)"
        for name, function in _activations():
            if _differing_count(function, draw(ROWS, LONG)):
                return f"its {name} depends on the number of rows, if they are long"
        for name, padded in _padded_operators(accelerator, draw):
            if not _same(padded(0, 0), padded(9, 0)):
                return f"its {name} depends on padding"
            if not _same(padded(0, 0), padded(0, 21)):
                return f"its {name} depends on hidden columns after a row, as a cache has"
    return ""


def _same(result: Tensor, expected: Tensor) -> bool:
    return torch.equal(result.cpu(), expected.cpu())


def _differing_count(function: Callable[[Tensor], Tensor], numbers: Tensor) -> int:
    """Return the number of rows that change the numbers of a function if they are computed alone; 0 if none does."""
    whole = function(numbers)
    for count in COUNTS:
        for start in (0, 1, ROWS - count):
            rows = slice(start, start + count)
            if not _same(function(numbers[rows].clone()), whole[rows]):
                return count
    return 0


def _row_operators(draw: Callable[..., Tensor], size: int) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Yield names and functions of [N, size], of which each row is a function of the same row."""
    weight, bias, square = draw(3 * size, size), draw(3 * size), draw(size, 3 * size)
    wide = draw(8, WIDE // 8)
    yield "matmul", lambda rows: functional.linear(rows, weight)
    yield "matmul with a bias", lambda rows: functional.linear(rows, weight, bias)
    yield "matmul", lambda rows: torch.addmm(bias, rows, square)
    yield "batched matmul", lambda rows: torch.bmm(rows.view(len(rows), 1, -1), square.expand(len(rows), -1, -1))
    yield from _activations()
    yield "exp", lambda rows: (-rows[:, :1].abs()).exp()
    yield "log", lambda rows: rows[:, :1].abs().log()
    yield "cos", lambda rows: torch.cos(rows.float() * 300)
    yield "sin", lambda rows: torch.sin(rows.float() * 300)
    yield "mean", lambda rows: rows.float().pow(2).mean(-1, keepdim=True)
    yield "sum", lambda rows: (rows[:, :8].float() @ wide.float())[:, :4096].exp().sum(-1)
    yield "layer norm", lambda rows: functional.layer_norm(rows, rows.shape[-1:])
    yield "RMS norm", lambda rows: functional.rms_norm(rows, rows.shape[-1:])


def _activations() -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Yield names and functions of single numbers."""
    yield "silu", functional.silu
    yield "gelu", lambda rows: functional.gelu(rows, approximate="tanh")
    yield "gelu", functional.gelu
    yield "tanh", torch.tanh
    yield "sigmoid", torch.sigmoid
    yield "exp", lambda rows: (-rows.abs()).exp()
    yield "rsqrt", lambda rows: rows.abs().rsqrt()


def _padded_operators(
    accelerator: Accelerator, draw: Callable[..., Tensor]
) -> Iterator[tuple[str, Callable[[int, int], Tensor]]]:
    """Yield names and functions of columns of padding before and after 33 columns, with results that do not have it."""
    columns = 33
    scores = draw(5, columns)

    def pad(tensor: Tensor, before: int, after: int, value: float) -> Tensor:
        return functional.pad(tensor, (before, after), value=value)

    def softmax(before: int, after: int) -> Tensor:
        lowest = torch.finfo(scores.dtype).min
        return pad(scores, before, after, lowest).softmax(-1)[:, before : before + columns]

    yield "softmax", softmax
    if (attend := _attention(accelerator)) is None:
        return  # products and a softmax
    query, key, value = draw(2, HEADS, columns, SIZE), draw(2, GROUPS, columns, SIZE), draw(2, GROUPS, columns, SIZE)
    layer: Any = nn.Module()
    layer.is_causal, layer.num_key_value_groups, layer.training = True, HEADS // GROUPS, False

    def attention(before: int, after: int) -> Tensor:
        """Return the outputs of the last query: of all queries at once, or if columns follow, of this one alone."""
        total = before + columns + after
        states = [functional.pad(tensor, (0, 0, before, after)) for tensor in (key, value)]
        queries = query[:, :, -1:] if after else functional.pad(query, (0, 0, before, 0))
        last, count = before + columns - 1, queries.shape[2]
        places = torch.arange(total)
        seen = (places >= before) & (places <= torch.arange(last - count + 1, last + 1).unsqueeze(1))
        hidden = torch.zeros(count, total).masked_fill(~seen, torch.finfo(query.dtype).min)
        hidden[:before] = 0 if not after else hidden[:before]  # queries of padding see all
        mask = accelerator.to_device(hidden.to(query.dtype)).expand(2, 1, -1, -1)
        result: Tensor = attend(layer, queries, *states, mask, scaling=SIZE**-0.5, dropout=0.0)[0]
        return result[:, -1]

    yield "attention", attention


def _attention(accelerator: Accelerator) -> Callable[..., Any] | None:
    """Return the device's attention as transformers calls it; None if it is the code of each architecture."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = accelerator.kernels.get("attention", required=True)
    function: Callable[..., Any] | None = ALL_ATTENTION_FUNCTIONS.get(name, None)
    return function
