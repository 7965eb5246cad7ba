"""The check of weights in few bits: close after unpacking, small, and with the product of the unpacked weight."""

from __future__ import annotations

import unittest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelerators.quantized import KINDS
from accelerators.testing.reference import assert_close, checked_precisions

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator
    from accelerators.types import Precision

SHAPES = ((192, 128), (128, 96), (48, 40), (7, 33))
"""Shapes of weights, [out, in]: sizes of models, and sizes that no group and no block divides."""

ROWS = (1, 16, 100)
"""Rows of inputs, of a decoding step and larger."""

BYTES = {"int8": 1.1, "int4": 0.7}
"""Limit of bytes per number of a large weight."""

LEVELS, LARGEST_GROUP = {"int8": 127, "int4": 7}, 128


def check_quantized_weights(accelerator: Accelerator) -> None:
    """Check round trip, size, product and gradient of every implementation and format against float64 on the CPU."""
    offers = list(accelerator.kernels.usable("quantized_weights"))
    if not offers:
        raise unittest.SkipTest(accelerator.kernels.capabilities()["quantized_weights"].reason)
    for implementation, weights in offers:
        for kind in KINDS:
            for shape in SHAPES:
                what = f"{kind} weights of {implementation.name!r}, {shape[0]} x {shape[1]}"
                weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) / 10
                weight[-1] = 0  # added rows of a vocabulary, pruned channels
                packed = weights.pack(weight.to(accelerator.device()), kind)
                whole = _check_round_trip(what, weights, packed, weight, kind)
                for precision in checked_precisions(accelerator):
                    for rows in ROWS:
                        _check_product(f"{what}, {rows} rows", accelerator, precision, weights, packed, whole, rows)


def _check_round_trip(what: str, weights: Any, packed: dict[str, Tensor], weight: Tensor, kind: str) -> Tensor:
    """Check the unpacked weight, and return it in float64 on the CPU."""
    size = sum(tensor.nbytes for tensor in packed.values())
    limit = BYTES[kind] * weight.numel()
    assert size <= limit or weight.numel() < 2**13, f"{what} take {size} bytes, expected at most {limit:.0f}"
    unpacked = weights.unpack(packed)
    assert unpacked.dtype == torch.float32, f"{what}: unpacked as {unpacked.dtype}, expected torch.float32"
    assert unpacked.shape == weight.shape, (
        f"{what}: unpacked as {tuple(unpacked.shape)}, expected {tuple(weight.shape)}"
    )
    whole: Tensor = unpacked.double().cpu()
    group = LARGEST_GROUP if kind == "int4" and weight.shape[1] % LARGEST_GROUP == 0 else weight.shape[1]
    step = (weight.view(len(weight), -1, group).abs().amax(2, keepdim=True) / LEVELS[kind]).expand(-1, -1, group)
    off = (whole - weight).abs() - 0.51 * step.reshape(weight.shape)  # steps may be rounded
    assert (off <= 1e-9).all(), f"{what}: a number comes back more than half a step off, by {off.max():.2g} more"
    return whole


def _check_product(
    what: str,
    accelerator: Accelerator,
    precision: Precision,
    weights: Any,
    packed: dict[str, Tensor],
    whole: Tensor,
    rows: int,
) -> None:
    generator = torch.Generator().manual_seed(rows)
    inputs, gradient = (torch.randn(rows, size, generator=generator) for size in (whole.shape[1], whole.shape[0]))
    inputs, gradient = (tensor.to(accelerator.device(), precision.dtype) for tensor in (inputs, gradient))
    inputs.requires_grad_()
    product = weights.multiply(inputs, packed)
    assert product.dtype == precision.dtype, f"{what}: the product is {product.dtype}, expected {precision.dtype}"
    product.backward(gradient)
    assert inputs.grad is not None, f"{what}: the product has no gradient to its inputs"
    exact = inputs.detach().double().cpu() @ whole.T
    assert_close(f"{what}: the product", product, exact, precision)
    assert_close(f"{what}: the inputs' gradient", inputs.grad, gradient.double().cpu() @ whole, precision)
    with torch.no_grad():
        assert_close(f"{what}: the product without a gradient", weights.multiply(inputs, packed), exact, precision)
