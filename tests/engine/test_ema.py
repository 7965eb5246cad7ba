"""The moving average of what is trained is a plain loop's, and changes places with the weights without a trace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.checkpoint.export import save_model
from rlhf.engine.fp32_weights import EMA
from tests.engine import averages, halves
from tests.engine.averages import DECAY, IDS, Plain, build, masters, step
from tests.helpers import weights

BF16 = pytest.param(
    "bf16", marks=pytest.mark.skipif("not __import__('accelerators.backends.cpu.info', fromlist=['']).native_bf16()")
)


def followed(engine, steps=5):
    """An engine with its average, after some steps, and the plain one."""
    plain, engine.ema = Plain(engine), EMA(engine.optimizer, DECAY, engine.accelerator)
    for _ in range(steps):
        step(engine)
        plain.follow(engine)
    return engine, plain


def computed_with(engine):
    with engine.whole_weights() as module:
        return {name: tensor.detach().clone() for name, tensor in module.named_parameters()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("lora", [0, 4], ids=["", "LoRA"])
@pytest.mark.parametrize("precision", ["fp32", BF16])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_average_is_that_of_a_plain_loop(accelerator, zero_stage, precision, lora):
    engine, plain = followed(build(accelerator, zero_stage, precision, lora=lora))
    before, computed = masters(engine), computed_with(engine)
    with engine.ema.in_place():
        plain.assert_is(engine)
        for name, tensor in computed_with(engine).items():  # what it computes with is that, rounded once
            if name in before:
                assert torch.equal(tensor, masters(engine)[name].to(tensor.dtype))
                assert not torch.equal(tensor, computed[name])
            else:
                assert torch.equal(tensor, computed[name])
    assert_equal(masters(engine), before)
    assert_equal(computed_with(engine), computed)


@pytest.mark.parametrize(("zero_stage", "offload"), [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "all")])
def test_it_follows_an_optimizer_on_the_host(accelerator, zero_stage, offload):
    engine, plain = followed(build(accelerator, zero_stage, offload=offload))
    with engine.ema.in_place():
        plain.assert_is(engine)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_training_goes_on_as_if_they_had_not_changed_places(accelerator, zero_stage):
    engine, _ = followed(build(accelerator, zero_stage), steps=2)
    other, plain = followed(build(accelerator, zero_stage), steps=2)
    with engine.ema.in_place():
        pass
    for one in (engine, other):
        step(one)
    plain.follow(other)
    assert_equal(masters(engine), masters(other))
    with engine.ema.in_place():
        plain.assert_is(engine)


def test_parameters_that_zero_3_keeps_whole_change_places_too(accelerator):
    engine, plain = followed(build(accelerator, 3, zero_persistence_threshold=100_000))
    before = computed_with(engine)
    with engine.ema.in_place():
        found = computed_with(engine)
    for name, tensor in plain.average.items():
        torch.testing.assert_close(found[name].double(), tensor, rtol=3e-7, atol=1e-8)
    assert_equal(computed_with(engine), before)


def test_an_average_on_the_host_is_computed_there(accelerator):
    """On a device other than the host, here one without memory, nothing of it lies."""
    engine, plain = build(accelerator, 1), Plain(build(accelerator, 1))
    real = accelerator.host_device()
    places: Any = SimpleNamespace(
        device=lambda: torch.device("meta"), host_device=lambda: real, pins_memory=lambda: False
    )
    there, here = (EMA(engine.optimizer, DECAY, places, on_host=on_host) for on_host in (True, False))
    assert all(tensor.device == real for tensor in there.tensors)
    assert all(tensor.device.type == "meta" for tensor in here.tensors)
    step(engine)
    there.follow()
    plain.follow(engine)
    with there.in_place():
        plain.assert_is(engine)


def test_with_lora_it_holds_the_adapters_alone(accelerator):
    engine = build(accelerator, 0, lora=4)
    held = sum(tensor.numel() for tensor in EMA(engine.optimizer, DECAY, engine.accelerator).save_state())
    assert held == engine.parameter_counts["trainable"] < engine.parameter_counts["all"] / 2


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_what_is_saved_is_restored_bit_for_bit(accelerator, zero_stage):
    engine, plain = followed(build(accelerator, zero_stage))
    saved = [tensor.clone() for tensor in engine.ema.save_state()]
    step(engine)
    assert not all(torch.equal(*pair) for pair in zip(engine.ema.save_state(), saved))
    engine.ema.load_state(saved)
    assert all(torch.equal(*pair) for pair in zip(engine.ema.save_state(), saved))
    with engine.ema.in_place():
        plain.assert_is(engine)


@pytest.mark.parametrize("lora", [0, 4], ids=["", "LoRA"])
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_it_is_saved_as_any_model_is(accelerator, zero_stage, lora, tokenizer, tmp_path):
    """Adapters are merged as those of a model are whose adapters are the average's."""
    engine, plain = followed(build(accelerator, zero_stage, lora=lora))
    with engine.ema.in_place():
        save_model(engine, tokenizer, tmp_path / "average")
    save_model(engine, tokenizer, tmp_path / "model")
    average, model = weights(tmp_path / "average"), weights(tmp_path / "model")
    assert average.keys() == model.keys()
    if not lora:
        for name, tensor in plain.average.items():
            torch.testing.assert_close(average[name].double(), tensor, rtol=3e-7, atol=1e-8)
        return
    name = "model.layers.0.self_attn.q_proj"
    up, down = (plain.average[f"{name}.lora_{factor}.default.weight"] for factor in "BA")
    base = computed_with(build(accelerator, 0, lora=lora))[f"{name}.base_layer.weight"].double()
    expected = base + 16.0 / lora * up @ down
    torch.testing.assert_close(average[f"{name}.weight"].double(), expected, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(model[f"{name}.weight"].double(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_neither_the_average_nor_the_learning_rate_follows_a_step_that_is_skipped(accelerator, zero_stage):
    def overflowing(model, ids):
        value, found = averages.loss(model, ids)
        return value * 1e6, found

    with halves.accepted() as precision:
        engine, plain = followed(build(accelerator, zero_stage, precision), steps=2)
        rate, saved = engine.scheduled_rate, [tensor.clone() for tensor in engine.ema.save_state()]
        engine.step([IDS], overflowing)
        assert (engine.skipped, engine.steps) == (1, 3)
        assert engine.scheduled_rate == rate
        assert all(torch.equal(*pair) for pair in zip(engine.ema.save_state(), saved))
        step(engine)
        plain.follow(engine)
        assert engine.scheduled_rate != rate
    with engine.ema.in_place():
        plain.assert_is(engine)
