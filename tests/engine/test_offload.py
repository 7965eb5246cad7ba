"""What waits on the host changes no number: losses, weights and checkpoints are those of a model without offload."""

from __future__ import annotations

import pytest
import torch

from accelerators import KernelSet
from rlhf.checkpoint import training_state
from rlhf.engine.engine import freeze_model
from rlhf.runs.directory import RunDirectory
from tests.engine.test_engine import IDS, build, train, weights_of
from tests.helpers import llama
from tests.in_process import bytes_held, make_placement

PLACES = [
    *((zero_stage, offload) for zero_stage in (1, 2) for offload in ("optimizer", "all")),
    *((3, offload) for offload in ("optimizer", "parameters", "all")),
]


def followed(engine, steps=4, accumulation=1):
    return [numbers["loss"] for numbers in train(engine, steps, accumulation)]


def assert_same_weights(found, expected, zero_stage):
    """Bit for bit; at ZeRO-3, DeepSpeed sums up the norm that gradients are clipped by in another order on the host."""
    for name, tensor in weights_of(expected).items():
        torch.testing.assert_close(weights_of(found)[name], tensor, rtol=0, atol=1e-6 if zero_stage == 3 else 0)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("zero_stage", "offload"), PLACES)
def test_steps_are_those_without_offload(accelerator, zero_stage, offload, accumulation):
    plain = build(accelerator, zero_stage, accumulation=accumulation)
    moved = build(accelerator, zero_stage, accumulation=accumulation, offload=offload)
    expected = followed(plain, accumulation=accumulation)
    assert followed(moved, accumulation=accumulation) == pytest.approx(expected, rel=1e-6 if zero_stage == 3 else 0)
    assert_same_weights(moved, plain, zero_stage)
    assert moved.grad_norm() == pytest.approx(plain.grad_norm(), rel=1e-6)


@pytest.mark.skipif("not __import__('accelerators.backends.cpu.info', fromlist=['']).native_bf16()")
@pytest.mark.parametrize(("zero_stage", "offload"), PLACES)
def test_bf16_steps_are_those_without_offload(accelerator, zero_stage, offload):
    """The weights are rounded to 8 bits: the last of them may differ where the norm does."""
    plain, moved = build(accelerator, zero_stage, "bf16"), build(accelerator, zero_stage, "bf16", offload=offload)
    assert followed(moved) == pytest.approx(followed(plain), rel=1e-3)
    for name, tensor in weights_of(plain).items():
        torch.testing.assert_close(weights_of(moved)[name], tensor, rtol=2**-7, atol=2e-4)


@pytest.mark.parametrize(("zero_stage", "offload"), PLACES)
def test_where_a_model_waits_is_where_deepspeed_holds_it(accelerator, zero_stage, offload):
    inner = build(accelerator, zero_stage, offload=offload).engine.optimizer
    state = inner.offload_optimizer if zero_stage == 3 else inner.cpu_offload
    assert state == (offload in ("optimizer", "all"))
    assert zero_stage < 3 or inner.offload_param == (offload in ("parameters", "all"))


def test_steps_on_the_host_are_those_of_the_accelerators_optimizer_for_it(accelerator, monkeypatch):
    asked = []
    get = KernelSet.get
    monkeypatch.setattr(
        KernelSet, "get", lambda self, name, **options: asked.append(name) or get(self, name, **options)
    )
    build(accelerator, 1, offload="optimizer")
    build(accelerator, 3, offload="parameters")
    assert [name for name in asked if name.startswith("adamw")] == ["adamw_cpu_offload", "adamw"]


@pytest.mark.parametrize(("before", "after"), [("all", "all"), ("none", "all"), ("all", "none")])
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_checkpoint_continues_wherever_its_state_waited(accelerator, tmp_path, zero_stage, before, after):
    first, whole = (build(accelerator, zero_stage, offload=before) for _ in range(2))
    place = RunDirectory(tmp_path).stage("sft")
    followed(first, 2)
    training_state.save_checkpoint(place, 2, {"model": first}, {})
    resumed = build(accelerator, zero_stage, offload=after)
    assert training_state.restore_checkpoint(place, {"model": resumed}) == (2, {})
    assert resumed.steps == 2
    expected = followed(whole)[2:]
    assert followed(resumed, 2) == pytest.approx(expected, rel=1e-6 if zero_stage == 3 else 0)
    assert_same_weights(resumed, whole, zero_stage)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_frozen_model_scores_as_without_offload(accelerator, zero_stage):
    precision = accelerator.precision("fp32")

    def scores(offload):
        placement = make_placement(zero_stage, trained=False, offload=offload)
        assert placement.offloads_parameters == (offload != "none")
        model = freeze_model(llama(60), accelerator=accelerator, precision=precision, placement=placement)
        with torch.no_grad():
            return model(input_ids=IDS).logits

    assert torch.equal(scores("parameters"), scores("none"))


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_what_waits_on_the_host_is_counted_there(accelerator, zero_stage):
    """On the CPU all is; another device holds none of it."""
    engine = build(accelerator, zero_stage, offload="all")
    train(engine, steps=1)
    count = sum(parameter.numel() for parameter in llama(60).parameters())
    assert bytes_held(engine, torch.device("cpu")) == bytes_held(engine) >= 12 * count
    assert bytes_held(engine, torch.device("cuda", 0)) == 0
