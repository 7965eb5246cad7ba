"""The divergence of a student from a teacher over the whole vocabulary: numbers, gradients, and what it never makes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf.losses import log_probs as tokens
from rlhf.losses.divergence import Logits, sampled_divergences, token_divergences
from rlhf.models import forward
from rlhf.models.forward import completion_divergences, next_token_logits
from tests.helpers import llama

N, H, V = 12, 8, 50
DIRECTIONS = pytest.mark.parametrize("reverse", [True, False])


@pytest.fixture(autouse=True)
def several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(tokens, "CHUNK_ELEMENTS", 90)
    monkeypatch.setattr(tokens, "_FEWEST_COLUMNS", 1)


def drawn(dtype: torch.dtype = torch.float32, *, bias: bool = False, width: int = H, size: int = V) -> list[Tensor]:
    shapes = [(3, N // 3, width), (size, width)] + [(size,)] * bias
    return [torch.randn(*shape).to(dtype).requires_grad_() for shape in shapes]


def truth(student: Tensor, teacher: Tensor, *, reverse: bool) -> Tensor:
    """From the definition, of logits in float64."""
    p, q = (logits.log_softmax(-1) for logits in ((student, teacher) if reverse else (teacher, student)))
    return (p.exp() * (p - q)).sum(-1)


def double(inputs: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in inputs]


@DIRECTIONS
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.06)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [90, 1 << 24])  # eight parts of the vocabulary, and one
def test_numbers_and_gradients_are_those_of_the_definition(
    reverse: bool, dtype: torch.dtype, close: float, bias: bool, chunk: int
) -> None:
    """The teacher is wider than the student, and its logits lie elsewhere."""
    tokens.use_chunks(chunk)
    inputs, teacher, weights = drawn(dtype, bias=bias), drawn(dtype, bias=True, width=2 * H), torch.randn(3, N // 3)
    with torch.no_grad():
        teacher[2] += 3
    actual = token_divergences(Logits(*inputs), Logits(*(tensor.detach() for tensor in teacher)), reverse=reverse)
    leaves = double(inputs)
    expected = truth(F.linear(*leaves), F.linear(*double(teacher)), reverse=reverse)
    torch.testing.assert_close(actual.double(), expected, atol=close, rtol=close)
    (actual * weights).sum().backward()
    (expected * weights).sum().backward()
    for tensor, leaf in zip(inputs, leaves):
        assert tensor.grad is not None and leaf.grad is not None and tensor.grad.dtype == dtype
        error = (tensor.grad.double() - leaf.grad).norm() / leaf.grad.norm()
        assert error < close / 3, error


@DIRECTIONS
def test_stored_logits_have_the_numbers_of_their_product(reverse: bool) -> None:
    (hidden, weight), teacher = drawn(), F.linear(*drawn()).detach()
    logits = F.linear(hidden, weight).detach().requires_grad_()
    (leaf,) = double([logits])
    actual = token_divergences(Logits(logits), Logits(teacher), reverse=reverse)
    expected = truth(leaf, teacher.double(), reverse=reverse)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    actual.sum().backward()
    expected.sum().backward()
    assert logits.grad is not None and leaf.grad is not None
    torch.testing.assert_close(logits.grad.double(), leaf.grad, atol=1e-6, rtol=1e-5)


@DIRECTIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_distributions_have_no_divergence_and_no_gradient(reverse: bool, dtype: torch.dtype) -> None:
    """Exactly none: a student that has become its teacher stays that."""
    hidden, weight = drawn(dtype)
    divergences = token_divergences(Logits(hidden, weight), Logits(hidden.detach(), weight.detach()), reverse=reverse)
    divergences.sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    assert divergences.eq(0).all()
    assert hidden.grad.abs().max() < 1e-6 and weight.grad.abs().max() < 1e-5


@DIRECTIONS
@pytest.mark.parametrize("larger", ["student", "teacher"])
def test_tokens_that_one_model_lacks_are_left_out(reverse: bool, larger: str) -> None:
    """As with Qwen2.5, whose sizes have one tokenizer and output layers of different heights."""
    sizes = {"student": V, "teacher": V} | {larger: V + 7}
    inputs, teacher = drawn(bias=True, size=sizes["student"]), drawn(size=sizes["teacher"])
    actual = token_divergences(Logits(*inputs), Logits(*(tensor.detach() for tensor in teacher)), reverse=reverse)
    leaves = double(inputs)
    cut = [logits[..., :V] for logits in (F.linear(*leaves), F.linear(*double(teacher)))]
    expected = truth(*cut, reverse=reverse)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    actual.sum().backward()
    expected.sum().backward()
    for tensor, leaf in zip(inputs, leaves):
        assert tensor.grad is not None and leaf.grad is not None
        torch.testing.assert_close(tensor.grad.double(), leaf.grad, atol=1e-5, rtol=1e-4)


@DIRECTIONS
def test_token_that_both_exclude_does_no_harm(reverse: bool) -> None:
    inputs, (hidden, weight, bias) = drawn(bias=True), (tensor.detach() for tensor in drawn(bias=True))
    with torch.no_grad():
        inputs[2][7] = bias[7] = -torch.inf
    divergences = token_divergences(Logits(*inputs), Logits(hidden, weight, bias), reverse=reverse)
    divergences.sum().backward()
    assert divergences.isfinite().all() and all(tensor.grad.isfinite().all() for tensor in inputs)  # type: ignore[union-attr]
    assert inputs[1].grad[7].eq(0).all()  # type: ignore[index]


@DIRECTIONS
def test_frozen_output_layer_gets_no_gradient_but_hidden_states_do(reverse: bool) -> None:
    hidden, weight = drawn()
    teacher = Logits(*(tensor.detach() for tensor in drawn()))
    token_divergences(Logits(hidden, weight.requires_grad_(False)), teacher, reverse=reverse).sum().backward()
    assert weight.grad is None and hidden.grad is not None and hidden.grad.abs().sum() > 0


# In models

SIZES: dict[str, Any] = {"num_hidden_layers": 1, "initializer_range": 0.3}
LENGTH = 4


def models() -> tuple[Any, Any]:
    """A student, and a teacher of twice its width."""
    return llama(V, **SIZES), llama(V, seed=1, hidden_size=64, intermediate_size=96, head_dim=16, **SIZES)


def rows() -> tuple[Tensor, Tensor]:
    ids, mask = torch.randint(V, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    mask[1, :3] = 0
    return ids, mask


@DIRECTIONS
@pytest.mark.parametrize("fused", [True, False])
def test_models_divergence_is_that_of_their_logits(reverse: bool, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (student, teacher), (ids, mask) = models(), rows()
    if not fused:
        monkeypatch.setattr(forward, "can_be_fused", lambda model: False)
    with torch.no_grad():
        logits = next_token_logits(teacher, ids, mask, LENGTH)
    assert (logits.weight is not None) == fused
    actual = completion_divergences(student, logits, ids, mask, LENGTH, reverse=reverse)
    exact = copy.deepcopy(student).double()
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    both = [
        model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -LENGTH - 1 : -1]
        for model in (exact, copy.deepcopy(teacher).double())
    ]
    expected = truth(both[0], both[1].detach(), reverse=reverse)
    assert actual.shape == (3, LENGTH) and expected.min() > 0.1
    torch.testing.assert_close(actual.double(), expected, atol=1e-4, rtol=1e-4)
    actual.sum().backward()
    expected.sum().backward()
    for (name, parameter), right in zip(student.named_parameters(), exact.parameters()):
        torch.testing.assert_close(parameter.grad.double(), right.grad, atol=1e-4, rtol=1e-3, msg=name)


class Largest(TorchDispatchMode):
    """Elements of the largest floating tensor that is made meanwhile."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **kwargs or {})
        made = [leaf.numel() for leaf in tree_leaves(results) if torch.is_tensor(leaf) and leaf.is_floating_point()]
        self.elements = max(self.elements, *made, 0)
        return results


def test_logits_of_a_batch_never_exist() -> None:
    vocabulary = 600
    sizes = SIZES | {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    student, teacher = (llama(vocabulary, seed=seed, head_dim=4, **sizes) for seed in (0, 1))
    ids, mask = torch.randint(vocabulary, (8, 5 + LENGTH)), torch.ones(8, 5 + LENGTH, dtype=torch.long)
    forward.can_be_fused(student), forward.can_be_fused(teacher)
    with Largest() as largest:
        with torch.no_grad():
            logits = next_token_logits(teacher, ids, mask, LENGTH)
        completion_divergences(student, logits, ids, mask, LENGTH, reverse=True).sum().backward()
    assert largest.elements <= vocabulary * 8 < 8 * LENGTH * vocabulary  # the gradient of the output layer


def test_estimate_of_drawn_tokens_has_the_mean_and_gradient_of_the_divergence() -> None:
    """Summed over all tokens, each as often as the student draws it."""
    student, teacher = torch.randn(V, dtype=torch.float64).requires_grad_(), torch.randn(V, dtype=torch.float64)
    whole = truth(student, teacher, reverse=True)
    (wanted,) = torch.autograd.grad(whole, student)
    estimates = sampled_divergences(student.log_softmax(-1), teacher.log_softmax(-1))
    mean = (student.softmax(-1).detach() * estimates).sum()
    (actual,) = torch.autograd.grad(mean, student)
    torch.testing.assert_close(mean, whole)
    torch.testing.assert_close(actual, wanted)
    assert wanted.abs().max() > 1e-3
