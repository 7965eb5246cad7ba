"""The projection to the vocabulary fused with log-probabilities: numbers, gradients, and what it never makes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf.losses import fused_lm_head
from rlhf.losses import log_probs as tokens
from rlhf.losses.fused_lm_head import projected_log_probs
from rlhf.models import forward
from rlhf.models.forward import completion_log_probs, model_inputs
from tests.helpers import llama

N, H, V = 12, 8, 50


@pytest.fixture(autouse=True)
def several_parts(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(tokens, "CHUNK_ELEMENTS", 90)
    monkeypatch.setattr(tokens, "_FEWEST_COLUMNS", 1)


def drawn(dtype, bias):
    hidden, weight = torch.randn(3, N // 3, H), torch.randn(V, H)
    inputs = [hidden, weight, torch.randn(V)] if bias else [hidden, weight]
    return [tensor.to(dtype).requires_grad_() for tensor in inputs], torch.randint(V, (3, N // 3))


def truth(inputs, labels, temperature):
    """From the definitions, in float64: log p(label), the entropy, and the leaves they come from."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in inputs]
    log_probs = (F.linear(*leaves) / temperature).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, labels[..., None])[..., 0], entropy, leaves


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.06)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("bias", "entropy"), [(False, False), (True, True)])
@pytest.mark.parametrize("chunk", [90, 1 << 24])  # seven parts of the vocabulary, and one
def test_numbers_and_gradients_are_those_of_the_definitions(dtype, close, temperature, bias, entropy, chunk):
    tokens.use_chunks(chunk)
    inputs, labels = drawn(dtype, bias)
    first, second = torch.randn(2, 3, N // 3)
    bias_or_none = inputs[2] if bias else None
    actual = projected_log_probs(*inputs[:2], bias_or_none, labels, temperature=temperature, entropy=entropy)
    log_probs, entropies, leaves = truth(inputs, labels, temperature)
    torch.testing.assert_close(actual[0].double(), log_probs, atol=close, rtol=close)
    loss, expected = (actual[0] * first).sum(), (log_probs * first).sum()
    if entropy:
        torch.testing.assert_close(actual[1].double(), entropies, atol=close, rtol=close)
        loss, expected = loss + (actual[1] * second).sum(), expected + (entropies * second).sum()
    loss.backward()
    expected.backward()
    for tensor, leaf in zip(inputs, leaves):
        assert tensor.grad.dtype == dtype
        error = (tensor.grad.double() - leaf.grad).norm() / leaf.grad.norm()
        assert error < close / 3, error


def test_weight_gradient_in_bf16_loses_no_digits():
    """Each row of the weight gets its gradient whole: added up in bf16 over parts, it would stop growing at 256."""
    rows = 2000
    hidden, weight = torch.ones(rows, H).bfloat16(), torch.zeros(V, H).bfloat16().requires_grad_()
    log_probs, _ = projected_log_probs(hidden, weight, None, torch.zeros(rows, dtype=torch.long))
    log_probs.sum().backward()
    expected = torch.full((V,), -rows / V) + rows * F.one_hot(torch.tensor(0), V)
    torch.testing.assert_close(weight.grad.float(), expected[:, None].expand(V, H), rtol=5e-3, atol=0)


def test_frozen_weights_get_no_gradient_but_hidden_states_do():
    (hidden, weight), labels = drawn(torch.float32, bias=False)
    weight.requires_grad_(False)
    projected_log_probs(hidden, weight, None, labels)[0].sum().backward()
    assert weight.grad is None and hidden.grad.abs().sum() > 0


def test_impossible_token_has_no_gradient():
    (hidden, weight, bias), labels = drawn(torch.float32, bias=True)
    with torch.no_grad():
        bias[7] = -torch.inf
    labels[labels == 7] = 8
    log_probs, entropy = projected_log_probs(hidden, weight, bias, labels, entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.isfinite().all() and entropy.isfinite().all()
    assert hidden.grad.isfinite().all() and weight.grad[7].eq(0).all() and bias.grad[7] == 0


def test_under_autocast_products_are_of_its_type():
    (hidden, weight), labels = drawn(torch.float32, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        actual, _ = projected_log_probs(hidden, weight, None, labels)
    expected, _ = projected_log_probs(hidden.bfloat16(), weight.bfloat16(), None, labels)
    assert torch.equal(actual, expected) and not torch.equal(
        actual, projected_log_probs(hidden, weight, None, labels)[0]
    )
    actual.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


def test_no_rows_are_no_numbers():
    weight = torch.randn(V, H, requires_grad=True)
    log_probs, _ = projected_log_probs(torch.randn(0, H), weight, None, torch.zeros(0, dtype=torch.long))
    log_probs.sum().backward()
    assert log_probs.shape == (0,) and weight.grad.eq(0).all()


# In a model


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made meanwhile: of float32, and of any type."""

    def __init__(self):
        super().__init__()
        self.float32 = self.any = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)):
            self.any = max(self.any, tensor.numel())
            if tensor.dtype == torch.float32:
                self.float32 = max(self.float32, tensor.numel())
        return out


def log_probs_and_gradients(model, ids, length, **options):
    model.zero_grad()
    actual = completion_log_probs(model, ids, torch.ones_like(ids), length, **options)
    (actual.log_probs.sum() + (0 if actual.entropy is None else actual.entropy.sum())).backward()
    return actual, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("large", [0, 1 << 30])
def test_training_makes_no_float32_tensor_of_logits(dtype, large, monkeypatch):
    """[B, A, V] of 2 x 20 x 3,000: in float32 none has as many elements, nor of any type where logits are large."""
    monkeypatch.setattr(tokens, "CHUNK_ELEMENTS", 3000)
    monkeypatch.setattr(forward, "LARGE", large)
    model, ids = llama(3000).to(dtype), torch.randint(3000, (2, 24))
    weights = max(parameter.numel() for parameter in model.parameters())
    for options in ({}, {"entropy": True, "temperature": 0.7}):
        with Largest() as largest:
            log_probs_and_gradients(model, ids, 20, **options)
        logits = 2 * 20 * 3000
        assert weights < logits, "or else the test shows nothing"
        assert 0 < largest.float32 < logits
        assert (largest.any < logits) == (dtype == torch.float32 or not large)


@pytest.mark.parametrize("tied", [False, True])
def test_fused_and_plain_numbers_and_gradients_agree(tied, monkeypatch):
    model, ids = llama(60, tie_word_embeddings=tied), torch.randint(60, (2, 12))
    fused, gradients = log_probs_and_gradients(model, ids, 8, entropy=True, temperature=0.7)
    assert forward.can_be_fused(model)
    monkeypatch.setattr(forward, "can_be_fused", lambda model: False)
    plain, expected = log_probs_and_gradients(model, ids, 8, entropy=True, temperature=0.7)
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)


def test_positions_that_are_named_are_those_of_the_whole(monkeypatch):
    model, ids = llama(60), torch.randint(60, (2, 12))
    inputs, places = model_inputs(model, ids, torch.ones_like(ids)), torch.tensor([3, 4, 17])
    whole = model(**inputs).logits.log_softmax(-1).flatten(0, 1)[places]
    for fused in (True, False):
        monkeypatch.setattr(forward, "can_be_fused", lambda model, fused=fused: fused)
        actual = forward.compute_log_probs(model, inputs, torch.tensor([5, 6, 7]), places=places)
        torch.testing.assert_close(actual.log_probs, whole[torch.arange(3), torch.tensor([5, 6, 7])])
    assert model(**inputs).logits.shape == (2, 12, 60)  # as it was


def gemma2(vocabulary_size):
    """A model that caps its logits after the output layer."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Gemma2Config(vocab_size=vocabulary_size, final_logit_softcapping=0.5, **sizes, **heads, pad_token_id=0)
    return Gemma2ForCausalLM(config)


def test_capped_logits_are_not_fused():
    model, ids = gemma2(60), torch.randint(60, (2, 12))
    with torch.no_grad():
        model.lm_head.weight.mul_(50)  # so that the cap is felt
        logits = model(**model_inputs(model, ids, torch.ones_like(ids))).logits[:, 3:-1]
    assert not forward.can_be_fused(model)
    expected = logits.log_softmax(-1).gather(-1, ids[:, 4:, None])[..., 0]
    torch.testing.assert_close(completion_log_probs(model, ids, torch.ones_like(ids), 8).log_probs, expected)


def test_output_layer_beyond_a_product_is_not_fused():
    class Adapted(torch.nn.Linear):
        pass

    model = llama(60)
    assert forward.can_be_fused(model)
    other = copy.deepcopy(model)
    other.lm_head = Adapted(other.lm_head.in_features, 60)
    assert not forward.can_be_fused(other)
    model.lm_head.forward = lambda hidden: hidden  # packed weights, say
    assert not forward.can_be_fused(model)


@pytest.mark.parametrize("large", [0, 1 << 30])
def test_entropy_outside_the_loss_costs_no_gradient(large, monkeypatch):
    """Scoring finds the entropy in the pass that the update differentiates, which asks for it with a bonus alone."""
    monkeypatch.setattr(forward, "LARGE", large)
    calls = []
    for module in (tokens, fused_lm_head):
        of = module.gradient_
        monkeypatch.setattr(module, "gradient_", lambda *tensors, of=of: calls.append(tensors[2:]) or of(*tensors))
    model, ids = llama(60).to(torch.bfloat16), torch.randint(2, 60, (2, 8))
    actual = completion_log_probs(model, ids, torch.ones_like(ids), 4, entropy=True)
    actual.log_probs.sum().backward(retain_graph=True)
    assert calls and not [tensors for tensors in calls if tensors and tensors[0] is not None]
    calls.clear()
    (actual.log_probs + actual.entropy).sum().backward()
    assert calls and not [tensors for tensors in calls if not tensors or tensors[0] is None]


def test_exact_sums_do_not_depend_on_rows_or_on_how_logits_are_stored(accelerator, monkeypatch):
    monkeypatch.setattr(tokens, "CHUNK_ELEMENTS", 70_000)
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(40, 64), torch.randn(10_000, 64), torch.randint(10_000, (40,))
    with accelerator.kernels.get("batch_invariant", required=True)(), tokens.exact_sums():
        whole, entropies = projected_log_probs(hidden, weight, None, labels, temperature=0.7, entropy=True)
        stored = tokens.token_log_probs_and_entropy(F.linear(hidden, weight)[None], labels[None], 0.7)
        assert torch.equal(stored[0][0], whole) and torch.equal(stored[1][0], entropies)
        for row in range(40):
            part = slice(row, row + 1)
            assert torch.equal(
                projected_log_probs(hidden[part], weight, None, labels[part], temperature=0.7)[0], whole[part]
            )
            alone = tokens.token_log_probs(F.linear(hidden[part], weight)[None], labels[part][None], 0.7)
            assert torch.equal(alone[0], whole[part])
    exact = (hidden.double() @ weight.double().T / 0.7).log_softmax(-1)
    torch.testing.assert_close(whole.double(), exact.gather(1, labels[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies.double(), -(exact.exp() * exact).sum(-1), rtol=1e-4, atol=1e-5)
