"""Weights in few bits: the layouts, whose products torch computes itself, and what is refused."""

from __future__ import annotations

import pytest
import torch

from accelerators import Support
from accelerators.quantized import KINDS, CPUKernels, QuantizedWeights, cpu_kernels_supported

PLAIN = QuantizedWeights()


def weight(rows: int = 128, width: int = 96) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0)) / 50


@pytest.mark.parametrize(("kind", "width", "bits"), [("int8", 4096, 8.01), ("int4", 4096, 4.5), ("int4", 48, 4.7)])
def test_packed_number_takes_the_bits_of_its_kind(kind, width, bits):
    packed = PLAIN.pack(weight(128, width), kind)
    assert 8 * sum(tensor.nbytes for tensor in packed.values()) / (128 * width) == pytest.approx(bits, abs=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_exact_in_bf16(kind):
    packed = PLAIN.pack(weight(), kind)
    assert packed["steps"].dtype == torch.bfloat16
    cast = packed | {"steps": packed["steps"].double().float()}
    assert torch.equal(PLAIN.unpack(packed), PLAIN.unpack(cast))


@pytest.mark.parametrize("offset", [0.0, 3.0, -1000.0])
def test_groups_of_4_bits_may_lie_anywhere(offset):
    values = weight() + offset
    packed = PLAIN.pack(values, "int4")
    step = packed["steps"][..., 0].float().T.repeat_interleave(96 // len(packed["steps"]), dim=1)
    off = (PLAIN.unpack(packed) - values).abs()
    assert (off <= 0.5001 * step + 1e-6 * abs(offset)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_packing_in_parts_gives_the_same_tensors(kind, monkeypatch):
    for implementation in (PLAIN, kernels()):
        before = weight(192)
        expected = implementation.pack(before, kind)
        assert torch.equal(before, weight(192))
        monkeypatch.setattr("accelerators.quantized.PART", 50 * 96)
        packed = implementation.pack(before, kind)
        monkeypatch.undo()
        assert all(torch.equal(packed[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_may_be_transposed(kind):
    packed = kernels().pack(weight(128, 128), kind)
    inputs = weight(128, 4).bfloat16().T
    assert torch.equal(kernels().product(inputs, packed), kernels().product(inputs.contiguous(), packed))


def test_weights_that_are_all_alike_come_back_as_they_are():
    for kind in KINDS:
        assert torch.equal(PLAIN.unpack(PLAIN.pack(torch.zeros(3, 32), kind)), torch.zeros(3, 32))
    alike = torch.full((3, 32), 0.5)
    assert torch.equal(PLAIN.unpack(PLAIN.pack(alike, "int4")), alike)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_so_and_is_not_hidden(kind):
    spoilt = weight()
    spoilt[5, 7] = torch.nan
    unpacked = PLAIN.unpack(PLAIN.pack(spoilt, kind))
    assert unpacked[5].isnan().any() and unpacked[4].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_small_numbers_survive_fp16(kind):
    packed = PLAIN.pack(weight() / 100, kind)  # whose steps are no normal numbers of fp16
    assert torch.equal(PLAIN.unpack(packed, torch.float16), PLAIN.unpack(packed).half())


@pytest.mark.parametrize("kind", KINDS)
def test_no_dense_weight_is_kept_for_the_way_back(kind):
    saved = []
    packed = PLAIN.pack(weight(), kind)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        PLAIN.multiply(torch.randn(4, 96, requires_grad=True), packed)
    assert {tensor.data_ptr() for tensor in saved} == {tensor.data_ptr() for tensor in packed.values()}


# torch's own products


def kernels() -> CPUKernels:
    block = {"AVX512": 64, "AVX2": 32}.get(torch.backends.cpu.get_cpu_capability())
    if block is None:
        pytest.skip("torch has no products of packed weights for this processor")
    return CPUKernels(block)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(128, 96), (128, 48), (33, 96), (7, 33)])
def test_torchs_order_of_codes_stands_for_the_same_weight(kind, shape):
    own = kernels()
    assert torch.equal(own.unpack(own.pack(weight(*shape), kind)), PLAIN.unpack(PLAIN.pack(weight(*shape), kind)))


@pytest.mark.parametrize(
    ("kind", "shape", "rows", "dtype", "torchs"),
    [
        ("int8", (128, 96), 32, torch.bfloat16, True),
        ("int8", (128, 96), 33, torch.bfloat16, False),
        ("int8", (128, 96), 1, torch.float32, False),
        ("int8", (128, 33), 1, torch.bfloat16, False),  # torch would read past its end
        ("int8", (33, 96), 1, torch.bfloat16, True),
        ("int4", (128, 128), 64, torch.bfloat16, True),
        ("int4", (128, 128), 65, torch.bfloat16, False),
        ("int4", (128, 128), 1, torch.float32, False),
        ("int4", (128, 48), 1, torch.bfloat16, False),
        ("int4", (33, 128), 1, torch.bfloat16, False),
    ],
)
def test_torchs_product_is_taken_where_it_is_right_and_faster(kind, shape, rows, dtype, torchs, monkeypatch):
    own, unpacked = kernels(), []
    packed = own.pack(weight(*shape), kind)
    unpack = own.unpack
    monkeypatch.setattr(own, "unpack", lambda *given: (unpacked.append(given), unpack(*given))[1])
    inputs = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    product = own.multiply(inputs.unsqueeze(0), packed)
    assert bool(unpacked) is not torchs
    assert product.shape == (1, rows, shape[0])
    exact = (
        inputs.double() @ PLAIN.unpack(packed if "tiles" not in packed else PLAIN.pack(weight(*shape), kind)).double().T
    )
    assert (product[0] - exact).abs().max() <= 0.01 * exact.abs().max()


def test_each_processor_is_asked(forks, monkeypatch):
    code = (
        "import torch, accelerators.quantized as q; s = q.cpu_kernels_supported(None); "
        "print(torch.backends.cpu.get_cpu_capability(), s.ok, s.reason)"
    )
    done = forks.python("-c", code, timeout=60, environment={"ATEN_CPU_CAPABILITY": "avx2"})
    assert done.stdout.startswith("AVX2 True ") and "few rows of a decoding step" in done.stdout
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    support = cpu_kernels_supported(None)
    assert not support and "torch has them for AVX2 and AVX512, this is DEFAULT" in support.reason


@pytest.mark.parametrize(
    ("operator", "reason"),
    [
        ("_convert_weight_to_int4pack_for_cpu", "orders int4 codes in an unknown way"),
        ("_weight_int4pack_mm_for_cpu", "multiplies int4 weights wrongly"),
        ("_weight_int8pack_mm", "multiplies int8 weights wrongly"),
    ],
)
def test_a_torch_that_does_it_otherwise_is_not_used(operator, reason, monkeypatch):
    kernels()
    real = getattr(torch, operator)
    monkeypatch.setattr(torch, operator, lambda *given: real(*given).roll(1))
    support = cpu_kernels_supported(None)
    assert support == Support(
        False, f"torch {torch.__version__} {support.reason.partition(f'{torch.__version__} ')[2]}"
    )
    assert reason in support.reason
