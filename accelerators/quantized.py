"""Frozen weights in few bits: packed once, then multiplied and unpacked.

`pack` turns a weight [out, in] into named tensors, which the layer keeps and passes to the other methods. Numbers have
equal steps: per output channel for `int8` (no offset), per group of inputs for `int4` (with an offset). Steps and
offsets are exact in bf16, so casting them changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from accelerators.types import KernelImpl, Support

KINDS = ("int8", "int4")
"""The formats: 8 bits and a step for each output channel; 4 bits, a step and an offset for each group."""

GROUP, SMALLEST_GROUP = 64, 16
"""Largest and smallest number of inputs that share a step and an offset in `int4`; else the whole row does."""

PART = 2**20
"""Numbers that are packed at a time."""

Packed = Mapping[str, Tensor]


class QuantizedWeights:
    """Operation `quantized_weights` in plain torch operators, for any device.

    `int8`: `values` [out, in] int8, `steps` [out]; a weight is value * step. `int4`: `codes` [out / 2, in] uint8 (the
    first half of the rows in the low bits), `steps` [groups, out, 2] with step and offset; a weight is
    (code - 8) * step + offset. Subclasses may use a faster `product` and other tensors.
    """

    def pack(self, weight: Tensor, kind: str) -> dict[str, Tensor]:
        """Return the tensors to keep instead of a weight [out, in]; each number is at most half a step off."""
        if kind == "int8":
            values, steps = _in_rows(weight.detach())
            return {"values": values, "steps": steps}
        codes, steps = _in_groups(weight.detach())
        if len(codes) % 2:
            codes = nn.functional.pad(codes, (0, 0, 0, 1))
        low, high = codes.chunk(2)
        return {"codes": low | (high << 4), "steps": steps}

    def unpack(self, packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [out, in] that the tensors of `pack` represent, in `dtype`."""
        steps = packed["steps"]
        if "values" in packed:
            # A number of 7 bits times one of 8 is rounded once in bf16; fp16 might lose small steps.
            wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
            return (packed["values"].to(wide) * steps.to(wide).unsqueeze(1)).to(dtype)
        return _from_groups(torch.cat((packed["codes"] & 15, packed["codes"] >> 4)), steps, dtype)

    def multiply(self, inputs: Tensor, packed: Packed) -> Tensor:
        """Return inputs [..., in] times the transposed weight, with a gradient to the inputs only.

        The dtype is that of the inputs or, under autocast, autocast's.
        """
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind):
            inputs = inputs.to(torch.get_autocast_dtype(kind))
        return cast(Tensor, _Multiply.apply(inputs, self, tuple(packed), *packed.values()))

    def product(self, inputs: Tensor, packed: Packed) -> Tensor:
        """Return the same product without a gradient."""
        return nn.functional.linear(inputs, self.unpack(packed, inputs.dtype))


class _Multiply(torch.autograd.Function):
    """Saves no dense weight for the backward pass, which unpacks it again."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weights: QuantizedWeights, names: tuple[str, ...], *tensors: Tensor
    ) -> Tensor:
        ctx.weights, ctx.names = weights, names
        ctx.save_for_backward(*tensors)
        return weights.product(inputs, dict(zip(names, tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        weight = ctx.weights.unpack(dict(zip(ctx.names, ctx.saved_tensors)), gradient.dtype)
        return gradient @ weight, None, None, *[None] * len(ctx.names)


class CPUKernels(QuantizedWeights):
    """torch's products of packed weights on a CPU, for the few rows of a decoding step.

    They are faster only in bf16 and for few rows: a bf16 layer of 2,048 x 2,048 on one core takes 0.1 ms for 1 row,
    1.4 (int8) and 2.4 (int4) with unpacking first; 0.8, 1.5 and 2.9 for 16 rows; 26, 11 and 15 for 512. In fp32 and
    fp16 they are 10 times slower at 16 rows. Codes of `int4` are in torch's order, in `tiles` instead of `codes`:
    [blocks, in, rows of a block / 2], the first half of the rows in the low bits.
    """

    MOST_ROWS: ClassVar[Mapping[str, int]] = {"int8": 32, "int4": 64}
    GROUPS = (32, 64, 128, 256)
    WIDTH = 32
    """torch 2.13 reads past the end of int8 rows whose length is no multiple of 16 (`_weight_int8pack_mm`)."""

    def __init__(self, block: int) -> None:
        self._block = block

    def pack(self, weight: Tensor, kind: str) -> dict[str, Tensor]:
        """Return the tensors to keep, in torch's order if its products support the shape."""
        rows, width = weight.shape
        if kind == "int8" or rows % self._block or _group(width) not in self.GROUPS:
            return super().pack(weight, kind)
        codes, steps = _in_groups(weight.detach())
        tiles = torch.empty(rows, width // 2, dtype=torch.uint8)
        for place in _parts(codes, self._block):
            tiles[place] = torch._convert_weight_to_int4pack_for_cpu(codes[place].to(torch.int32), 1)
        return {"tiles": tiles, "steps": steps}

    def unpack(self, packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [out, in] in `dtype`."""
        if "tiles" not in packed:
            return super().unpack(packed, dtype)
        tiles = packed["tiles"]
        rows, width = len(tiles), 2 * tiles.shape[1]
        tiles = tiles.view(rows // self._block, width, self._block // 2)
        codes = torch.stack((tiles & 15, tiles >> 4), dim=1).transpose(2, 3).reshape(rows, width)
        return _from_groups(codes, packed["steps"], dtype)

    def product(self, inputs: Tensor, packed: Packed) -> Tensor:
        """Return the product, by torch's kernel for few rows in bf16."""
        flat, steps = inputs.reshape(-1, inputs.shape[-1]).contiguous(), packed["steps"]
        few = {kind: inputs.dtype == torch.bfloat16 and len(flat) <= most for kind, most in self.MOST_ROWS.items()}
        if few["int8"] and "values" in packed and inputs.shape[-1] % self.WIDTH == 0:
            result = torch._weight_int8pack_mm(flat, packed["values"], steps)
        elif few["int4"] and "tiles" in packed:
            group = inputs.shape[-1] // len(steps)
            result = torch._weight_int4pack_mm_for_cpu(flat, packed["tiles"], group, steps)
        else:
            return super().product(inputs, packed)
        return result.view(*inputs.shape[:-1], -1)


def cpu_kernels(accelerator: object) -> QuantizedWeights:
    """Return torch's products for this processor."""
    return CPUKernels(_block())


def cpu_kernels_supported(accelerator: object) -> Support:
    """Test that the order of codes on this processor is the expected one, and that products are right."""
    if not _block():
        return Support(False, f"torch has them for AVX2 and AVX512, this is {torch.backends.cpu.get_cpu_capability()}")
    kernels, plain = CPUKernels(_block()), QuantizedWeights()
    weight = torch.linspace(-1, 1, _block() * 64).sin().view(_block(), 64)
    inputs = torch.linspace(1, -1, 64).cos().bfloat16().unsqueeze(0)
    for kind in KINDS:
        packed, expected = kernels.pack(weight, kind), plain.unpack(plain.pack(weight, kind))
        if not torch.equal(kernels.unpack(packed), expected):
            return Support(False, f"torch {torch.__version__} orders {kind} codes in an unknown way")
        exact = inputs.float() @ expected.T
        limit = 0.02 * exact.abs().max().item()
        if not torch.allclose(kernels.product(inputs, packed).float(), exact, rtol=0, atol=limit):
            return Support(False, f"torch {torch.__version__} multiplies {kind} weights wrongly on this processor")
    return Support(
        True, "torch's own products for the few rows of a decoding step in bf16; more rows are unpacked first"
    )


def _block() -> int:
    """Return the rows of one block of torch's codes on this processor; 0 if unknown."""
    return {"AVX512": 64, "AVX2": 32}.get(torch.backends.cpu.get_cpu_capability(), 0)


def _group(width: int) -> int:
    """Return the largest allowed group that divides the row; the whole row if there is none."""
    return next((size for size in range(GROUP, SMALLEST_GROUP - 1, -1) if width % size == 0), width)


def _in_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values [out, in] int8 of a weight, and steps [out]."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    steps = torch.empty(len(weight), dtype=torch.bfloat16, device=weight.device)
    for place in _parts(weight):
        part = weight[place].float()
        step = steps[place] = (part.abs().amax(dim=1) / 127).bfloat16()
        values[place] = (part / _divisor(step).unsqueeze(1)).round_().clamp_(-127, 127)
    return values, steps


def _in_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [out, in] uint8 of a weight, and steps [groups, out, 2]."""
    rows, width = weight.shape
    size = _group(width)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    steps = torch.empty(width // size, rows, 2, dtype=torch.bfloat16, device=weight.device)
    for place in _parts(weight):
        grouped = weight[place].float().reshape(-1, width // size, size)
        least, most = grouped.amin(dim=2), grouped.amax(dim=2)
        offset = (least + 8 * (most - least) / 15).bfloat16()
        # Rounding moved the offset: the step grows until codes 0 to 15 reach both ends again.
        step = torch.maximum((most - offset) / 7, (offset - least) / 8).bfloat16()
        scaled = (grouped - offset.unsqueeze(2)).div_(_divisor(step).unsqueeze(2))
        codes[place] = scaled.round_().add_(8).clamp_(0, 15).view(-1, width)
        steps[:, place] = torch.stack((step, offset), dim=2).transpose(0, 1)
    return codes, steps


def _parts(weight: Tensor, block: int = 1) -> Iterator[slice]:
    """Yield rows to pack at a time, in whole blocks, so that temporary tensors are small compared with a layer."""
    size = max(1, PART // (block * weight.shape[1])) * block
    for first in range(0, len(weight), size):
        yield slice(first, first + size)


def _from_groups(codes: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
    groups, rows, _ = steps.shape
    step, offset = steps.float().transpose(0, 1).unsqueeze(2).unbind(3)
    weight = codes[:rows].to(torch.float32).view(rows, groups, -1)
    return weight.sub_(8).mul_(step).add_(offset).view(rows, -1).to(dtype)


def _divisor(step: Tensor) -> Tensor:
    """Return steps as divisors; 1 for the step 0 of equal weights."""
    return torch.where(step == 0, 1, step.float())


CPU_KERNELS = KernelImpl(
    operation="quantized_weights",
    name="torch-cpu",
    factory=cpu_kernels,
    supported=cpu_kernels_supported,
    priority=10,
)
