"""The CPU's operators that do not depend on the batch: against float64, and alone against in batches."""

from __future__ import annotations

import itertools

import pytest
import torch

from accelerators import find_batch_dependence
from accelerators.backends.cpu import attention
from accelerators.backends.cpu.kernels import invariant

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SHAPES = list(itertools.product((1, 3), (1, 5, 16, 17, 33, 70), (1, 64, 100), (1, 24, 37)))


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def inside(request):
    threads = torch.get_num_threads()
    torch.set_num_threads(request.param)
    with invariant.batch_invariant():
        yield
    torch.set_num_threads(threads)


def draw(*shape: int, dtype: torch.dtype, transposed: bool = False) -> torch.Tensor:
    *batch, rows, columns = shape
    if transposed:
        return torch.randn(*batch, columns, rows).to(dtype).mT
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", itertools.product((False, True), repeat=2), ids=str)
def test_a_row_of_a_product_is_right_and_the_same_alone(inside, dtype, layout):
    torch.manual_seed(0)
    for batch, rows, terms, columns in SHAPES:
        first = draw(batch, rows, terms, dtype=dtype, transposed=layout[0])
        second = draw(batch, terms, columns, dtype=dtype, transposed=layout[1])
        added = draw(batch, rows, columns, dtype=dtype)
        product, total = torch.bmm(first, second), torch.baddbmm(added, first, second, beta=0.5, alpha=2)
        exact = first.double() @ second.double()
        limit = DTYPES[dtype] * (first.abs().double() @ second.abs().double()).max().item()
        assert (product - exact).abs().max() <= limit
        assert (total - (0.5 * added.double() + 2 * exact)).abs().max() <= 3 * limit + DTYPES[dtype]
        for row in {0, rows // 2, rows - 1}:
            alone = torch.mm(first[0, row : row + 1].clone(), second[0].clone())
            assert torch.equal(alone[0], product[0, row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_is_right_and_ignores_hidden_columns(inside, dtype):
    torch.manual_seed(0)
    scores = (4 * torch.randn(13, 77)).to(dtype)
    lowest = torch.finfo(dtype).min
    padded = torch.nn.functional.pad(scores, (9, 30), value=lowest).softmax(-1)
    assert torch.equal(padded[:, 9:86], scores.softmax(-1))
    assert padded[:, :9].eq(0).all() and padded[:, 86:].eq(0).all()
    torch.testing.assert_close(scores.softmax(-1).double(), scores.double().softmax(-1), rtol=DTYPES[dtype], atol=1e-7)


@pytest.mark.parametrize("name", [name for name in invariant.ACTIVATIONS if hasattr(torch.ops.aten, f"{name}_")])
def test_operators_in_place_are_those_of_a_result(inside, name):
    numbers = torch.linspace(0.1, 5, 5 * 37).view(5, 37)
    expected = getattr(torch.ops.aten, name)(numbers)
    assert torch.equal(getattr(torch.ops.aten, f"{name}_")(numbers), expected)
    assert torch.equal(numbers, expected)


def test_sums_with_products_in_place_are_those_of_a_result(inside):
    torch.manual_seed(0)
    added, first, second = (draw(*shape, dtype=torch.float32) for shape in ((2, 5, 7), (2, 5, 64), (2, 64, 7)))
    expected = torch.baddbmm(added, first, second, beta=0.5, alpha=2)
    assert torch.equal(added[0].clone().addmm_(first[0], second[0], beta=0.5, alpha=2), expected[0])
    assert torch.equal(added.baddbmm_(first, second, beta=0.5, alpha=2), expected)
    assert torch.equal(added, expected)


@pytest.mark.parametrize(
    "product",
    [
        lambda ones: torch.bmm(ones(4, 2, 8), ones(1, 8, 3)),
        lambda ones: torch.baddbmm(ones(4, 2, 3), ones(4, 2, 8), ones(1, 8, 3)),
        lambda ones: torch.mm(ones(2, 2, 8), ones(2, 8, 3)),
        lambda ones: torch.mm(ones(2, 8), ones(7, 3)),
        lambda ones: torch.mm(ones(2, 8).bfloat16(), ones(8, 3).bfloat16(), out=ones(2, 3)),
        lambda ones: torch.addmm(ones(2, 3), ones(2, 8), ones(8, 3), out=ones(2, 3).double()),
    ],
)
def test_wrong_shapes_and_dtypes_raise_as_in_torch(inside, product):
    with pytest.raises(RuntimeError):
        product(torch.ones)


def test_softmax_keeps_what_is_not_a_number(inside):
    scores = torch.tensor([[1.0, float("nan"), 2.0], [0.0, -float("inf"), 0.0]])
    result = scores.softmax(-1)
    assert result[0].isnan().all()
    assert result[1].tolist() == [0.5, 0, 0.5]


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_a_long_row_is_that_of_each_token_alone(inside, dtype):
    """A block of queries has other keys than a single token, whose cache is longer than its row. Torch's attention,
    which is otherwise used for a bfloat16 token with such a cache, adds up keys in blocks."""
    torch.manual_seed(0)
    layer = torch.nn.Module()
    query, cache = torch.randn(1, 4, 700, 32).to(dtype), torch.randn(2, 1, 2, 720, 32).to(dtype)
    layer.is_causal, layer.num_key_value_groups = True, 2
    whole = attention.attend(layer, query, *cache[..., :700, :], None)[0]
    for token in (0, 63, 64, 300, 699):
        alone = attention.attend(layer, query[:, :, token : token + 1], *cache[..., : token + 1, :], None)[0]
        assert torch.equal(alone[:, 0], whole[:, token]), token
    key, value = cache[..., :700, :].double()
    exact = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key, value, is_causal=True, enable_gqa=True
    )
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    torch.testing.assert_close(whole.double(), exact.transpose(1, 2), **tolerance)


@pytest.mark.parametrize("name", invariant.ACTIVATIONS)
def test_an_activation_of_a_part_is_that_of_the_whole(inside, name):
    torch.manual_seed(0)
    function = getattr(torch, name, None) or getattr(torch.nn.functional, name)
    numbers = torch.randn(70, 37).abs()
    whole = function(numbers)
    assert all(torch.equal(function(numbers[:count].clone()), whole[:count]) for count in range(1, 70))
    torch.testing.assert_close(whole.double(), function(numbers.double()), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inside", [3, 4, 8], indirect=True)
def test_activations_do_not_depend_on_the_division_among_threads(accelerator, inside, dtype):
    for name in invariant.ACTIVATIONS:
        function = getattr(torch, name, None) or getattr(torch.nn.functional, name)
        for rows, size in ((160, 512), (514, 32), (3, 21846), (97, 1536)):
            numbers = torch.randn(rows, size, generator=torch.Generator().manual_seed(0)).abs().to(dtype)
            whole = function(numbers)
            assert all(torch.equal(function(numbers[row].clone()), whole[row]) for row in range(rows)), name
    assert find_batch_dependence(accelerator, dtype) == ""


@pytest.mark.parametrize("inside", [4, 8], indirect=True)
def test_activations_of_long_rows_are_found_to_depend_on_the_batch(accelerator, inside, monkeypatch):
    monkeypatch.setattr(invariant, "_shares", lambda name, count: 1)
    found = find_batch_dependence(accelerator, torch.float32)
    assert "depends on the number of rows, if they are long" in found


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_operator_is_found_to_depend_on_the_batch(accelerator, inside, dtype):
    assert find_batch_dependence(accelerator, dtype) == ""


def test_torchs_own_operators_are_found_to_depend_on_the_batch(accelerator):
    assert "its matmul depends on the number of rows" in find_batch_dependence(accelerator, torch.float32)


def test_operators_are_torchs_again_after_the_block():
    torch.manual_seed(0)
    first, second = torch.randn(16, 576), torch.randn(50, 576).T
    before = first @ second
    with invariant.batch_invariant():
        inside = first @ second
        with invariant.batch_invariant():
            assert torch.equal(first @ second, inside)
        assert torch.equal(first @ second, inside)
    assert torch.equal(first @ second, before) and not torch.equal(inside, before)


def test_gradients_are_those_of_torch(inside):
    torch.manual_seed(0)
    inputs, weight = torch.randn(9, 40, requires_grad=True), torch.randn(20, 40, requires_grad=True)
    torch.nn.functional.linear(inputs, weight).sum().backward()
    torch.testing.assert_close(weight.grad, inputs.sum(0).expand(20, -1))
    torch.testing.assert_close(inputs.grad, weight.sum(0).expand(9, -1))
