"""An observer sees the tensors of a step, whole and unscaled at every ZeRO stage, and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.engine.observer import Place
from tests.engine.engines import CONSTANT, IDS, accepted_fp16, build, loss, masters, scaled, train, weights_of
from tests.helpers import llama


@dataclass
class Seen:
    """An observer that keeps copies, by phase and name."""

    places: list[Place] = field(default_factory=list)
    tensors: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def __call__(self, place: Place, name: str, tensor: Tensor) -> None:
        self.places.append(place)
        self.tensors[place.phase, name] = tensor.clone()

    def of(self, phase: str) -> dict[str, Tensor]:
        return {name: tensor for (its, name), tensor in self.tensors.items() if its == phase}


def observe(engine: Any, parts: int = 1, of: Any = loss) -> Seen:
    engine.observation.observer = seen = Seen()
    with engine.observation.during("sft", 7):
        engine.step(IDS.split(len(IDS) // parts), of)
    return seen


def plain_gradients(model: Any) -> dict[str, Tensor]:
    scaled(20)(model, IDS)[0].backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_gradients_are_those_of_plain_torch_before_clipping(accelerator, zero_stage, accumulation):
    engine = build(accelerator, zero_stage, accumulation=accumulation, optimizer=CONSTANT | {"max_grad_norm": 0.5})
    seen, expected = observe(engine, accumulation, scaled(20)).of("gradients"), plain_gradients(llama(60))
    assert seen.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(seen[name], gradient, rtol=1e-4, atol=1e-6)
    norm = torch.stack([gradient.norm() for gradient in seen.values()]).norm().item()
    assert norm == pytest.approx(engine.grad_norm(), rel=1e-5) and norm > 0.5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_adapters_alone_are_seen_with_their_float32_weights(accelerator, zero_stage, precision):
    engine = build(accelerator, zero_stage, precision, lora=4)
    seen, after = observe(engine), masters(engine)
    assert seen.of("gradients").keys() == seen.of("update").keys() == after.keys()
    assert all(".lora_" in name for name in after)
    for name, weight in seen.of("update").items():
        assert weight.dtype == torch.float32 and torch.equal(weight, after[name])


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_offloaded_numbers_are_seen_too(accelerator, offload):
    engine = build(accelerator, 3 if offload == "all" else 2, offload=offload)
    seen, expected = observe(engine, of=scaled(20)), plain_gradients(llama(60))
    for name, gradient in expected.items():
        torch.testing.assert_close(seen.of("gradients")[name], gradient, rtol=1e-4, atol=1e-6)
    for name, weight in weights_of(engine).items():
        assert torch.equal(seen.of("update")[name], weight)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_gradients_of_fp16_are_without_the_loss_scale(accelerator, zero_stage):
    with accepted_fp16() as precision:
        seen = observe(build(accelerator, zero_stage, precision), of=scaled(20)).of("gradients")
    for name, gradient in plain_gradients(llama(60)).items():
        torch.testing.assert_close(seen[name], gradient, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_step_is_the_same_with_an_observer_and_reported_in_order(accelerator, zero_stage):
    alone, watched = (build(accelerator, zero_stage, accumulation=2) for _ in range(2))
    train(alone, 1, 2)
    seen = observe(watched, 2)
    for name, weight in weights_of(alone).items():
        assert torch.equal(weights_of(watched)[name], weight)
    phases = [place.phase for place in seen.places]
    assert list(dict.fromkeys(phases)) == ["loss", "gradients", "update"]
    assert seen.places[0] == ("sft", 7, "loss", "test", 0, 0) and seen.places[1].micro_batch == 1
    assert {place.micro_batch for place in seen.places[2:]} == {-1}


def test_nothing_is_reported_outside_of_a_step(accelerator):
    engine = build(accelerator, 0)
    engine.observation.observer = seen = Seen()
    train(engine, 1)
    assert not seen.places
