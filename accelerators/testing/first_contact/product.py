"""Matrix products in every precision, read back and compared with float64 on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accelerators.errors import AcceleratorError, PluginError
from accelerators.testing.reference import TOLERANCES, assert_close, difference
from accelerators.types import DTYPES

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator


def compare(accelerator: Accelerator, *, full: bool) -> dict[str, Any]:
    """Compare a product and its sum in each precision that the device grants; return the differences."""
    size = 2048 if full else 64
    generator = torch.Generator().manual_seed(0)
    facts: dict[str, Any] = {}
    for name in DTYPES:
        try:
            dtype = accelerator.precision(name).dtype
        except PluginError:
            raise
        except AcceleratorError as error:
            facts[name] = f"refused: {error}"
            continue
        matrices = [torch.randn(size, size, generator=generator).to(dtype) for _ in range(2)]
        left, right = accelerator.to_device(matrices)
        product = left @ right
        total = product.float().sum().item()
        expected = matrices[0].double() @ matrices[1].double()
        what = f"product of two {size} x {size} matrices in {name}"
        assert_close(what, product, expected, name)
        # The sum of many numbers of both signs is small: its error is compared with the sum of their sizes.
        off = abs(total - expected.sum().item()) / expected.abs().sum().item()
        assert off <= TOLERANCES[name], f"sum of a {what}: read back as {total}, expected {expected.sum().item()}"
        for place, (sent, matrix) in enumerate(zip(matrices, (left, right), strict=True)):
            assert torch.equal(matrix.cpu(), sent), f"{what}: factor {place} was changed on the device"
        facts[name] = difference(product, expected)
    return facts
