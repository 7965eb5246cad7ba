"""The moving average of what is trained is a plain loop's, and changes places with the weights without a trace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.checkpoint.export import save_model
from rlhf.engine.engine import NotFiniteError
from rlhf.engine.fp32_weights import EMA
from tests.engine.engines import (
    DECAY,
    FALLING,
    IDS,
    PlainAverage,
    accepted_fp16,
    masters,
    scaled,
    step,
    weights_of,
)
from tests.engine.engines import build as build_engine
from tests.helpers import weights


def build(accelerator, zero_stage, precision="fp32", **options):
    return build_engine(accelerator, zero_stage, precision, optimizer=FALLING, **options)


def followed(engine, steps=5):
    """An engine with its average, after some steps, and the plain one."""
    plain, engine.ema = PlainAverage(engine), EMA(engine.optimizer, DECAY, engine.accelerator)
    for _ in range(steps):
        step(engine)
        plain.follow(engine)
    return engine, plain


def assert_equal(tensors, expected):
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("lora", [0, 4], ids=["", "LoRA"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_average_is_that_of_a_plain_loop(accelerator, zero_stage, precision, lora):
    """With LoRA it holds the adapters alone."""
    engine, plain = followed(build(accelerator, zero_stage, precision, lora=lora))
    size = sum(tensor.numel() for tensor in engine.ema.tensors)
    trained = engine.parameter_counts["trainable"]
    assert trained <= size < trained * 1.05 + 100  # shards are filled up
    before, computed = masters(engine), weights_of(engine)
    with engine.ema.in_place():
        plain.assert_is(engine)
        average = masters(engine)
        for name, tensor in weights_of(engine).items():  # the model computes with that, rounded once
            if name in before:
                assert torch.equal(tensor, average[name].to(tensor.dtype))
                assert not torch.equal(tensor, computed[name])
            else:
                assert torch.equal(tensor, computed[name])
    assert_equal(masters(engine), before)
    assert_equal(weights_of(engine), computed)


@pytest.mark.parametrize(
    ("zero_stage", "options"),
    [
        (1, {"offload": "optimizer"}),
        (2, {"offload": "optimizer"}),
        (3, {"offload": "optimizer"}),
        (3, {"offload": "all"}),
        (3, {"zero_persistence_threshold": 100_000}),  # parameters that ZeRO-3 keeps whole
    ],
)
def test_average_follows_weights_wherever_they_are(accelerator, zero_stage, options):
    engine, plain = followed(build(accelerator, zero_stage, **options))
    before = weights_of(engine)
    with engine.ema.in_place():
        plain.assert_is(engine)
        for name, tensor in weights_of(engine).items():
            torch.testing.assert_close(tensor.double(), plain.average[name], rtol=3e-7, atol=1e-8)
    assert_equal(weights_of(engine), before)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_training_continues_as_if_nothing_had_changed_places(accelerator, zero_stage):
    engine, _ = followed(build(accelerator, zero_stage), steps=2)
    other, plain = followed(build(accelerator, zero_stage), steps=2)
    with engine.ema.in_place():
        pass
    step(engine)
    step(other)
    plain.follow(other)
    assert_equal(masters(engine), masters(other))
    with engine.ema.in_place():
        plain.assert_is(engine)


def test_average_on_the_host_is_computed_there(accelerator):
    """On a device other than the host, here one without memory, nothing of it lies."""
    engine, plain = build(accelerator, 1), PlainAverage(build(accelerator, 1))
    host = accelerator.host_device()
    places: Any = SimpleNamespace(
        device=lambda: torch.device("meta"), host_device=lambda: host, pins_memory=lambda: False
    )
    on_host, on_device = (EMA(engine.optimizer, DECAY, places, on_host=place) for place in (True, False))
    assert all(tensor.device == host for tensor in on_host.tensors)
    assert all(tensor.device.type == "meta" for tensor in on_device.tensors)
    step(engine)
    on_host.follow()
    plain.follow(engine)
    with on_host.in_place():
        plain.assert_is(engine)


@pytest.mark.parametrize("lora", [0, 4], ids=["", "LoRA"])
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_average_is_saved_as_any_model_is(accelerator, zero_stage, lora, tokenizer, tmp_path):
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
    base = weights_of(build(accelerator, 0, lora=lora))[f"{name}.base_layer.weight"].double()
    expected = base + 16.0 / lora * up @ down
    torch.testing.assert_close(average[f"{name}.weight"].double(), expected, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(model[f"{name}.weight"].double(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_update_that_is_not_finite_does_not_move_the_average(accelerator, zero_stage, precision):
    engine, _ = followed(build(accelerator, zero_stage, precision), steps=2)
    saved = [tensor.clone() for tensor in engine.ema.tensors]
    with pytest.raises(NotFiniteError):
        engine.step([IDS], scaled(float("nan")))
    assert all(torch.equal(*pair) for pair in zip(engine.ema.tensors, saved))


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_skipped_step_moves_neither_average_nor_rate(accelerator, zero_stage):
    with accepted_fp16() as precision:
        engine, plain = followed(build(accelerator, zero_stage, precision), steps=2)
        rate, saved = engine.scheduled_rate, [tensor.clone() for tensor in engine.ema.tensors]
        engine.step([IDS], scaled(1e6))
        assert (engine.skipped, engine.steps) == (1, 3)
        assert engine.scheduled_rate == rate
        assert all(torch.equal(*pair) for pair in zip(engine.ema.tensors, saved))
        step(engine)
        plain.follow(engine)
        assert engine.scheduled_rate != rate
    with engine.ema.in_place():
        plain.assert_is(engine)
