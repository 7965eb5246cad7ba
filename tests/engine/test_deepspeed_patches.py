"""Patches of DeepSpeed: the patched step is AdamW's, and DeepSpeed without each patch still has the fault.

A test named `test_upstream_...` fails once DeepSpeed has fixed the fault; then the patch goes.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from rlhf.engine import deepspeed_patches as patches
from rlhf.engine.engine import TrainingEngine
from rlhf.errors import DependencyError
from tests.engine.engines import IDS, accepted_fp16, build, scaled, step
from tests.engine.engines import loss as plain_loss

RATE, BETAS, EPSILON, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1


@pytest.fixture(params=["torch-fused", "torch-foreach"])
def engine_of(request, accelerator):
    def build_clipped(most: float) -> TrainingEngine:
        settings = {"learning_rate": RATE, "schedule": "constant", "warmup": 0, "weight_decay": DECAY}
        accelerator.kernels.choose("adamw", request.param)
        try:
            return build(accelerator, 0, "bf16", optimizer=settings | {"max_grad_norm": most})
        finally:
            accelerator.kernels.choose("adamw", "auto")

    return build_clipped


def loss(model: Any, ids: torch.Tensor) -> Any:
    return model(input_ids=ids).logits.float().logsumexp(-1).mean(), {}


@pytest.mark.parametrize("most", [0.01, 1e6])
def test_masters_take_the_step_of_clipped_gradients(engine_of, most):
    engine = engine_of(most)
    pairs = [
        (parameter, master)
        for groups in zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups)
        for parameter, master in zip(*groups)
    ]
    moments = [[torch.zeros_like(master, dtype=torch.float64) for _ in range(2)] for _, master in pairs]
    for count in range(1, 4):
        engine.step([IDS], loss, apply=False)
        before = [master.detach().double() for _, master in pairs]
        gradients = [parameter.grad.double() for parameter, _ in pairs]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt().item()
        engine.apply()
        assert engine.grad_norm() == pytest.approx(norm, rel=1e-4)
        assert (norm > most) == (most == 0.01)
        for (parameter, master), was, gradient, (first, second) in zip(pairs, before, gradients, moments):
            gradient = gradient / max(1.0, norm / most)
            first.mul_(BETAS[0]).add_(gradient, alpha=1 - BETAS[0])
            second.mul_(BETAS[1]).add_(gradient.square(), alpha=1 - BETAS[1])
            mean, square = first / (1 - BETAS[0] ** count), second / (1 - BETAS[1] ** count)
            decay = DECAY if parameter.dim() > 1 else 0
            wanted = was * (1 - RATE * decay) - RATE * mean / (square.sqrt() + EPSILON)
            torch.testing.assert_close(master.double(), wanted, rtol=1e-4, atol=1e-4 * RATE)
            assert torch.equal(parameter, master.bfloat16())
            assert master.grad is None


def count_host_reads(engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch) -> int:
    """Numbers that a step reads on the host, but for those of the inner optimizer: torch-foreach's counters."""
    reads: list[torch.Tensor] = []
    engine.optimizer.optimizer.step = lambda: None
    for name in ("item", "__float__", "__bool__", "tolist"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, read=read: reads.append(self) or read(self))
    engine.optimizer.step()
    return len(reads)


def test_step_reads_one_number_on_the_host(engine_of, monkeypatch):
    engine = engine_of(0.01)
    engine.step([torch.ones(1, 3, dtype=torch.long)], loss, apply=False)
    assert count_host_reads(engine, monkeypatch) == 1


@pytest.mark.parametrize("version", ["0.18.9", "0.20.0", "0.190.0", "1.19.0", "unknown"])
def test_check_version_refuses_another_series(version):
    for known in ("0.19.8", "0.19.12+hpu.synapse.1", "0.19.9a0"):
        patches.check_version(known)
    with pytest.raises(DependencyError, match=f"deepspeed: .*0.19, got {version}; install"):
        patches.check_version(version)


def linear_tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 32), (8, 32), (8,)]  # inputs, weight, bias
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_at_zero_3_equals_torch(dtype):
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    patches.round_linear_once()
    tensors = linear_tensors(dtype)
    expected, actual = torch._C._nn.linear(*tensors), zero3_linear_wrap(*tensors)
    assert torch.equal(actual, expected)
    gradients = [torch.autograd.grad(output.float().square().sum(), tensors) for output in (actual, expected)]
    torch.testing.assert_close(*gradients)


def test_upstream_rounds_a_product_before_it_adds_the_bias():
    spec = importlib.util.find_spec("deepspeed.runtime.zero.linear")
    upstream = importlib.util.module_from_spec(spec)  # another copy of the module, which no test has patched
    spec.loader.exec_module(upstream)
    inputs, weight, bias = linear_tensors(torch.bfloat16)
    output = upstream.zero3_linear_wrap(inputs, weight, bias)
    assert torch.equal(output, inputs.matmul(weight.t()) + bias)
    assert not torch.equal(output, torch._C._nn.linear(inputs, weight, bias))


def test_upstream_takes_a_step_while_it_sets_up(accelerator, monkeypatch):
    monkeypatch.setattr(patches, "undo_setup_step", lambda engine: None)
    engine = build(accelerator, 0, "bf16")
    steps = [state["step"].item() for state in engine.optimizer.optimizer.state.values() if "step" in state]
    assert steps and set(steps) == {1.0}


def test_upstream_reads_a_number_for_every_gradient(accelerator, monkeypatch):
    monkeypatch.setattr(patches, "replace_step", lambda engine, **options: None)
    engine = build(accelerator, 0, "bf16")
    engine.step([IDS], plain_loss, apply=False)
    assert count_host_reads(engine, monkeypatch) > len(list(engine.module.parameters()))


def test_upstream_divides_fp16_gradients_by_a_missing_scale(accelerator, monkeypatch):
    monkeypatch.setattr(patches, "missing_loss_scale", lambda engine, **options: 1.0)
    with accepted_fp16() as precision:
        engine = build(accelerator, 0, precision)
        scale = engine.loss_scale()
        engine.step([IDS], plain_loss, apply=False)
        largest = max(parameter.grad.abs().max().item() for parameter in engine.module.parameters())
        applied: list[float] = []
        weights = [weight for group in engine.optimizer.fp32_groups for weight in group]
        engine.optimizer.clip_grad = 0.0
        engine.optimizer.optimizer.step = lambda: applied.append(max(w.grad.abs().max().item() for w in weights))
        engine.apply()
    assert scale > 1
    assert applied == [pytest.approx(largest / scale, rel=1e-3)]


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_upstream_raises_bare_exception_at_lowest_loss_scale(accelerator, zero_stage):
    with accepted_fp16() as precision:
        engine = build(accelerator, zero_stage, precision)
        engine.step([IDS], scaled(float("inf")), apply=False)
        scaler = engine.optimizer.loss_scaler
        scaler.cur_scale = scaler.min_scale
        with pytest.raises(Exception, match="already at minimum") as raised:
            engine.engine.step()
    assert raised.type is Exception


def test_upstream_records_a_scoring_pass_as_training_order(accelerator, monkeypatch):
    def trace_is_complete():
        engine = build(accelerator, 3)
        with torch.no_grad():
            engine.engine(input_ids=IDS)
        coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        for _ in range(2):
            step(engine)
        return coordinator.is_complete_trace()

    assert trace_is_complete()
    monkeypatch.setattr(patches, "restart_trace", lambda engine: None)
    assert not trace_is_complete()


def test_upstream_adds_adapters_to_their_layer_after_it_recorded_the_order(accelerator, monkeypatch):
    def train_and_evaluate():
        engine = build(accelerator, 3, lora=4, zero_persistence_threshold=100_000)
        persistent = engine.optimizer.persistent_parameters
        persistent[0].all_gather(persistent)  # as when DeepSpeed has loaded a checkpoint
        for _ in range(2):
            step(engine)
        with engine.whole_weights():  # releases them
            pass
        with torch.no_grad():
            engine.engine(input_ids=IDS)
        step(engine)

    train_and_evaluate()
    monkeypatch.setattr(patches, "declare_adapters", lambda layers: None)
    with pytest.raises(RuntimeError, match="tracing error"):
        train_and_evaluate()


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_whole_weights_have_no_hooks_which_come_back_in_order(accelerator, zero_stage):
    """The engine's hooks read counters of training steps: steps that were compiled with them would not fit again."""
    engine = build(accelerator, zero_stage)

    def hooks():
        return [[*module._forward_pre_hooks, *module._forward_hooks] for module in engine.module.modules()]

    before = hooks()
    assert any(before)
    with engine.whole_weights() as module:
        assert module is engine.module and not any(hooks())
    assert hooks() == before


def test_upstream_releases_gathered_weights_after_each_layer(accelerator):
    from deepspeed.runtime.zero import GatheredParameters

    engine = build(accelerator, 3)
    parameters = list(engine.module.parameters())
    with GatheredParameters(parameters), patches.without_hooks(engine.engine):
        engine.module(input_ids=IDS)
        assert all(parameter.numel() for parameter in parameters)
    with GatheredParameters(parameters):
        engine.module(input_ids=IDS)
        assert not all(parameter.numel() for parameter in parameters)


def test_upstream_keeps_its_process_group_after_torchs(forks):
    code = """
import accelerators
from rlhf.engine import deepspeed_patches, distributed
clear, deepspeed_patches.clear_process_groups = deepspeed_patches.clear_process_groups, lambda: None
with distributed.start_process_group(accelerators.select("cpu", environ={})):
    pass
from deepspeed.comm import comm
assert comm.cdb is not None
clear()
assert comm.cdb is None
"""
    done = forks.python("-c", code, timeout=60)
    assert done.returncode == 0, done.stderr
