"""Fused layers of a CPU: against float64 and float32, forward and backward, and what they keep in memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import silu
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from accelerators.backends.cpu.kernels import compiler, layers
from accelerators.backends.cpu.kernels.layers import FAMILIES, _Gate, _RMSNorm, fuse, supported
from rlhf.config.schema import OptimizerConfig
from rlhf.engine.engine import TrainingEngine, freeze_model
from rlhf.models.forward import completion_log_probs
from tests.in_process import make_placement

SIZES = {
    "hidden_size": 192,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 60,
    "pad_token_id": 0,
}

pytestmark = pytest.mark.skipif(not supported(None), reason=supported(None).reason)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def model_of(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**SIZES, head_dim=32)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.mul_(4)
    return model.bfloat16().to(dtype)


def trained(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and all gradients."""
    model.zero_grad()
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    return output.logits.detach().double(), {name: p.grad.double() for name, p in model.named_parameters()}


def off(actual: Tensor, exact: Tensor) -> float:
    return ((actual - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_model_is_as_close_to_float32_as_a_plain_one(family):
    plain, exact, fused = model_of(family), model_of(family, torch.float32), model_of(family)
    fuse(fused)
    parts = [layers.part(module) for module in fused.modules() if "forward" in vars(module)]
    # Qwen3 has two norms more in a layer.
    assert (parts.count("RMSNorm"), parts.count("MLP")) == ((9 if family == "qwen3" else 5), 2)
    ids = torch.randint(1, 60, (5, 37), generator=torch.Generator().manual_seed(1))
    (logits, gradients), (others, of_plain), (right, wanted) = (trained(m, ids) for m in (fused, plain, exact))
    assert off(logits, right) < max(1.2 * off(others, right), 1e-3)
    for name, gradient in wanted.items():
        assert off(gradients[name], gradient) < 1.3 * off(of_plain[name], gradient), name


@pytest.mark.parametrize(("rows", "size"), [(1, 16), (7, 64), (61, 576)])
@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_a_norm_is_that_of_its_paper(rows, size, epsilon, two_threads):
    draw = torch.Generator().manual_seed(0)
    hidden, gradient = (torch.randn(rows, size, generator=draw).bfloat16() for _ in range(2))
    weight = torch.empty(size).uniform_(0.5, 1.5, generator=draw).bfloat16()
    given = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    output = _RMSNorm.apply(*given, epsilon)
    output.backward(gradient)
    x, w = (tensor.double().requires_grad_() for tensor in (hidden, weight))
    exact = w * x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()
    exact.backward(gradient.double())
    for tensor, reference in ((output, exact), (given[0].grad, x.grad), (given[1].grad, w.grad)):
        torch.testing.assert_close(tensor.double(), reference, rtol=0.01, atol=0.01 * reference.abs().max().item())


def test_a_gate_is_silu_times_what_it_lets_through():
    draw = torch.Generator().manual_seed(0)
    gate, up, gradient = (torch.randn(3, 5, 48, generator=draw).mul(3).bfloat16() for _ in range(3))
    gate[0, 0, :4] = torch.tensor([100.0, -100.0, 0.0, -88.5])
    given = [tensor.clone().requires_grad_() for tensor in (gate, up)]
    output = _Gate.apply(*given)
    output.backward(gradient)
    g, u = (tensor.double().requires_grad_() for tensor in (gate, up))
    exact = silu(g) * u
    exact.backward(gradient.double())
    for tensor, reference in ((output, exact), (given[0].grad, g.grad), (given[1].grad, u.grad)):
        torch.testing.assert_close(tensor.double(), reference, rtol=0.012, atol=1e-3)


def test_replaced_forward_pass_is_unchanged():
    model = model_of("llama")
    norm, mlp = model.model.norm, model.model.layers[0].mlp
    norm.forward, mlp.forward = (lambda hidden: hidden + 1), (lambda hidden: hidden + 2)
    fuse(model)
    numbers = torch.ones(1, 1, 192, dtype=torch.bfloat16)
    assert (norm(numbers)[0, 0, 0], mlp(numbers)[0, 0, 0]) == (2, 3)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_is_seen(wrong):
    numbers = torch.ones(2, 32, dtype=torch.bfloat16)
    numbers[1, 3] = wrong
    assert not torch.isfinite(_RMSNorm.apply(numbers, torch.ones_like(numbers[0]), 1e-6)[1]).all()
    assert not torch.isfinite(_Gate.apply(numbers, torch.ones_like(numbers))[1]).all()
    assert torch.isfinite(_Gate.apply(numbers, torch.ones_like(numbers))[0]).all()


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_norm_and_gate_save_only_their_inputs(default):
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    hidden = torch.linspace(-2, 2, 8 * 64).view(8, 64).bfloat16().requires_grad_()
    weight = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    torch.set_default_dtype(default)  # what is computed in C has types of its own
    try:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            normed = _RMSNorm.apply(hidden, weight, 1e-6)
        (of_weight,) = torch.autograd.grad(normed.sum(), weight)
    finally:
        torch.set_default_dtype(torch.float32)
    assert sum(tensor.nbytes for tensor in saved) == 2 * 8 * 64 + 2 * 64 + 4 * 8  # input, weight, scales of rows
    torch.testing.assert_close(of_weight.float(), normed.detach().float().sum(0), rtol=0.02, atol=0.05)
    saved.clear()
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        _Gate.apply(hidden, hidden)
    assert sum(tensor.nbytes for tensor in saved) == 2 * 2 * 8 * 64


@pytest.mark.parametrize("threads", [1, 2])
def test_a_frozen_weight_gets_no_gradient_and_passes_one_on(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        hidden = torch.linspace(-2, 2, 5 * 64).view(5, 64).bfloat16().requires_grad_()
        weight = torch.full((64,), 2.0, dtype=torch.bfloat16)
        _RMSNorm.apply(hidden, weight, 1e-6).sum().backward()
    finally:
        torch.set_num_threads(before)
    x = hidden.detach().double().requires_grad_()
    (2 * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(hidden.grad.double(), x.grad, rtol=0.01, atol=0.01 * x.grad.abs().max().item())


def test_other_dtypes_layers_and_outlines_are_unchanged():
    plain, fused = model_of("llama", torch.float32), model_of("llama", torch.float32)
    fuse(fused)
    ids = torch.arange(1, 13).view(2, 6)
    assert torch.equal(trained(fused, ids)[0], trained(plain, ids)[0])
    outline = copy.deepcopy(fused).bfloat16().to("meta")
    assert outline(input_ids=ids.to("meta")).logits.shape == (2, 6, 60)
    gelu = model_of("llama")
    for module in gelu.modules():
        if layers.part(module) == "MLP":
            module.config.hidden_act = "gelu"
    fuse(gelu)
    assert all("forward" not in vars(module) for module in gelu.modules() if layers.part(module) == "MLP")
    bert = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING["gpt_neox"](vocab_size=60, hidden_size=64, num_hidden_layers=1)
    )
    fuse(bert)
    assert all("forward" not in vars(module) for module in bert.modules())


def test_without_a_compiler_the_reason_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    monkeypatch.setattr(layers, "_functions", lambda: compiler.compiled.__wrapped__("layers.c"))
    support = supported.__wrapped__(None)
    assert not support.ok and "no-such-compiler" in support.reason
    assert "without its code, training is a tenth slower" in support.reason


@pytest.mark.parametrize("trains", [True, False])
def test_engine_fuses_the_models_that_it_places(accelerator, trains):
    """Trained with fused layers, a model takes the steps that it takes without."""
    placement = {"precision": accelerator.precision("bf16"), "placement": make_placement(0)}
    if not trains:
        frozen = freeze_model(model_of("llama"), accelerator=accelerator, **placement)
        assert sum("forward" in vars(module) for module in frozen.modules() if layers.part(module)) >= 7
        return
    ids = torch.randint(1, 60, (4, 12), generator=torch.Generator().manual_seed(0))

    def loss(model: Any, ids: Tensor) -> Any:
        return -completion_log_probs(model, ids, torch.ones_like(ids), 8).log_probs.mean(), {}

    losses: dict[str, list[float]] = {"auto": [], "none": []}
    for choice, values in losses.items():
        accelerator.kernels.choose("fused_layers", choice)
        try:
            engine = TrainingEngine(
                "test",
                model_of("llama", torch.float32),
                accelerator=accelerator,
                optimizer=OptimizerConfig(learning_rate=1e-4, schedule="constant", warmup=0),
                total_steps=100,
                micro_batch_size=4,
                accumulation=1,
                **placement,
            )
        finally:
            accelerator.kernels.choose("fused_layers", "auto")
        assert any("forward" in vars(module) for module in engine.module.modules()) == (choice == "auto")
        for _ in range(6):
            with torch.no_grad():
                values.append(loss(engine.module, ids)[0].item())
            engine.step([ids], loss)
    assert losses["auto"] == pytest.approx(losses["none"], rel=0.02)
    assert losses["auto"][-1] < 0.9 * losses["auto"][0]
