"""The step at ZeRO 0 with masters in float32: that of AdamW's paper, of clipped gradients, with what implements it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.config.schema import OptimizerConfig
from rlhf.engine.deepspeed_patches import spare
from rlhf.engine.engine import TrainingEngine
from tests.helpers import llama
from tests.in_process import make_placement

RATE, BETAS, EPSILON, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1


@pytest.fixture(params=["torch-fused", "torch-foreach"])
def engine_of(request, accelerator):
    def build(most: float) -> TrainingEngine:
        accelerator.choose("adamw", request.param)
        try:
            return TrainingEngine(
                "test",
                llama(60),
                accelerator=accelerator,
                precision=accelerator.precision("bf16"),
                placement=make_placement(0),
                optimizer=OptimizerConfig(
                    learning_rate=RATE, schedule="constant", warmup=0, weight_decay=DECAY, max_grad_norm=most
                ),
                total_steps=100,
                micro_batch_size=4,
                accumulation=1,
            )
        finally:
            accelerator.choose("adamw", "auto")

    return build


def loss(model: Any, ids: torch.Tensor) -> Any:
    return model(input_ids=ids).logits.float().logsumexp(-1).mean(), {}


@pytest.mark.parametrize("most", [0.01, 1e6])
def test_masters_take_the_step_of_clipped_gradients(engine_of, most):
    engine = engine_of(most)
    ids = torch.randint(2, 60, (4, 12), generator=torch.Generator().manual_seed(0))
    pairs = [
        (parameter, master)
        for groups in zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups)
        for parameter, master in zip(*groups)
    ]
    moments = [[torch.zeros_like(master, dtype=torch.float64) for _ in range(2)] for _, master in pairs]
    for count in range(1, 4):
        engine.backward([ids], loss)
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


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_step_of_gradients_that_are_no_numbers_is_skipped(engine_of, wrong):
    engine = engine_of(1.0)
    before = [master.clone() for group in engine.optimizer.fp32_groups for master in group]
    engine.backward([torch.ones(1, 3, dtype=torch.long)], lambda model, ids: (loss(model, ids)[0] * wrong, {}))
    engine.apply()
    assert engine.skipped == 1
    after = [master for group in engine.optimizer.fp32_groups for master in group]
    assert all(torch.equal(*pair) for pair in zip(after, before))


def test_one_number_is_read_on_the_host(engine_of, monkeypatch):
    engine = engine_of(0.01)
    engine.backward([torch.ones(1, 3, dtype=torch.long)], loss)
    engine.optimizer.optimizer.step = lambda: None  # that of torch-foreach reads counters, which are on the host
    reads: list[torch.Tensor] = []
    for name in ("item", "__float__", "__bool__", "tolist"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, read=read: reads.append(self) or read(self))
    engine.optimizer.step()
    assert len(reads) == 1


def test_an_optimizer_without_masters_and_one_that_scales_losses_keep_their_step():
    for scaling, names in ((True, {"fp16_groups": []}), (False, {})):
        engine = SimpleNamespace(optimizer=SimpleNamespace(step="theirs", **names))
        spare(engine, ranks=2, loss_scaling=scaling)
        assert engine.optimizer.step == "theirs"
