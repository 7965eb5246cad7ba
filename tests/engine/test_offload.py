"""Offload changes no number: neither DeepSpeed's, of trained models, nor ours, of frozen ones on the host."""

from __future__ import annotations

import functools

import pytest
import torch

from accelerators import KernelSet
from accelerators.backends.cpu.backend import CPU
from rlhf.checkpoint import training_state
from rlhf.config.schema import build_config
from rlhf.engine.cpu_offload import describe_offload, offload, on_device
from rlhf.engine.engine import freeze_model
from rlhf.roles.roles import model_placements
from rlhf.runs.directory import RunDirectory
from tests.engine.engines import IDS, build, train, weights_of
from tests.helpers import llama
from tests.in_process import bytes_held, make_placement

PLACES = [
    *((zero_stage, offload) for zero_stage in (1, 2) for offload in ("optimizer", "all")),
    *((3, offload) for offload in ("optimizer", "parameters", "all")),
]


def losses(engine, steps=4, accumulation=1):
    return [numbers["loss"] for numbers in train(engine, steps, accumulation)]


def assert_engine_weights(engine, expected, rtol, atol):
    torch.testing.assert_close(weights_of(engine), expected, rtol=rtol, atol=atol)


@pytest.fixture(scope="module")
def plain(accelerator):
    """(ZeRO stage, precision, accumulation) -> the losses, weights and norm of steps without offload."""

    @functools.cache
    def run(zero_stage, precision, accumulation):
        engine = build(accelerator, zero_stage, precision, accumulation)
        return losses(engine, accumulation=accumulation), weights_of(engine), engine.grad_norm()

    return run


@pytest.mark.parametrize(("precision", "accumulation"), [("fp32", 1), ("fp32", 2), ("bf16", 1)])
@pytest.mark.parametrize(("zero_stage", "place"), PLACES)
def test_steps_are_those_without_offload(accelerator, plain, zero_stage, place, precision, accumulation):
    """Bit for bit in fp32; at ZeRO-3, DeepSpeed sums up the norm that gradients are clipped by in another order."""
    moved = build(accelerator, zero_stage, precision, accumulation, offload=place)
    inner = moved.engine.optimizer
    assert (inner.offload_optimizer if zero_stage == 3 else inner.cpu_offload) == (place in ("optimizer", "all"))
    assert zero_stage < 3 or inner.offload_param == (place in ("parameters", "all"))
    expected, weights, norm = plain(zero_stage, precision, accumulation)
    if precision == "bf16":  # the last of its 8 bits may differ where the norm does; a step changes weights by 1e-2
        assert losses(moved) == pytest.approx(expected, rel=1e-3)
        assert_engine_weights(moved, weights, rtol=2**-7, atol=1e-3)
        return
    assert losses(moved, accumulation=accumulation) == pytest.approx(expected, rel=1e-6 if zero_stage == 3 else 0)
    assert_engine_weights(moved, weights, rtol=0, atol=1e-6 if zero_stage == 3 else 0)
    assert moved.grad_norm() == pytest.approx(norm, rel=1e-6)


def test_steps_on_the_host_take_the_accelerators_host_optimizer(accelerator, monkeypatch):
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
def test_checkpoint_continues_wherever_its_state_was(accelerator, tmp_path, zero_stage, before, after):
    first, whole = (build(accelerator, zero_stage, offload=before) for _ in range(2))
    stage = RunDirectory(tmp_path).stage("sft")
    losses(first, 2)
    training_state.save_checkpoint(stage, 2, {"model": first}, {})
    resumed = build(accelerator, zero_stage, offload=after)
    assert training_state.restore_checkpoint(stage, {"model": resumed})[:2] == (2, {})
    assert resumed.steps == 2
    expected = losses(whole)[2:]
    assert losses(resumed, 2) == pytest.approx(expected, rel=1e-6 if zero_stage == 3 else 0)
    assert_engine_weights(resumed, weights_of(whole), rtol=0, atol=1e-6 if zero_stage == 3 else 0)
    count = sum(parameter.numel() for parameter in llama(60).parameters())
    assert bytes_held(resumed, torch.device("cpu")) == bytes_held(resumed) >= 12 * count
    assert bytes_held(resumed, torch.device("cuda", 0)) == 0


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_frozen_model_scores_as_without_offload(accelerator, zero_stage):
    precision = accelerator.precision("fp32")

    def scores(place):
        placement = make_placement(zero_stage, trained=False, offload=place)
        assert placement.offloads_parameters == (place != "none")
        model = freeze_model(llama(60), accelerator=accelerator, precision=precision, placement=placement)
        with torch.no_grad():
            return model(input_ids=IDS).logits

    assert torch.equal(scores("parameters"), scores("none"))


# Frozen models below ZeRO-3 on a device that is not the host.

META = torch.device("meta")


class SeparateDevice(CPU):
    """Its device is not the host: tensors there have shapes and no numbers."""

    def __init__(self):
        self.copies = 0

    def device(self):
        return META

    def to_device(self, batch):
        self.copies += 1
        return super().to_device(batch)


@pytest.fixture
def separate():
    return SeparateDevice()


def places(model):
    return {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}


def use(model):
    return model(input_ids=IDS.to(META)).logits


def test_weights_come_for_a_forward_pass_and_leave_after_it(separate):
    model = offload(llama(60).requires_grad_(False), separate)
    state, places_in_pass = {name: tensor.clone() for name, tensor in model.state_dict().items()}, []
    model.model.norm.register_forward_hook(lambda *_: places_in_pass.append(places(model)))
    addresses = [tensor.data_ptr() for tensor in model.parameters()]
    assert bytes_held(model, separate.host_device()) == bytes_held(model) > 0
    assert use(model).device == META
    assert (places_in_pass, places(model)) == ([{"meta"}], {"cpu"})
    assert [tensor.data_ptr() for tensor in model.parameters()] == addresses, "the weights on the host are others now"
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_block_copies_weights_once_and_keeps_them_tied(separate):
    model = offload(llama(60, tie_word_embeddings=True).requires_grad_(False), separate)
    tensors = len(list(model.parameters())) + len(list(model.buffers()))
    with on_device(model, None):
        assert places(model) == {"cpu"}, "copied before they are used"
        for _ in range(3):
            use(model)
            assert places(model) == {"meta"}
            assert model.lm_head.weight is model.model.embed_tokens.weight
    assert places(model) == {"cpu"} and model.lm_head.weight is model.model.embed_tokens.weight
    assert separate.copies == tensors
    use(model)
    assert separate.copies == 2 * tensors


def test_failed_pass_leaves_the_device_too(separate):
    model = offload(llama(60).requires_grad_(False), separate)
    with pytest.raises(ValueError, match="exactly one of"):
        model()
    assert places(model) == {"cpu"}
    with pytest.raises(ValueError, match="exactly one of"), on_device(model):
        model()
    assert places(model) == {"cpu"}


def test_on_a_host_that_is_the_device_nothing_moves(accelerator):
    model = offload(llama(60), accelerator)
    assert not model._forward_pre_hooks and not model._forward_hooks
    with on_device(model):
        assert torch.equal(model(input_ids=IDS).logits, llama(60)(input_ids=IDS).logits)


@pytest.mark.parametrize(("place", "waits"), [("none", False), ("optimizer", False), ("parameters", True)])
def test_frozen_model_below_zero_3_follows_engine_offload(separate, place, waits):
    placement = make_placement(1, trained=False, offload=place)
    model = freeze_model(llama(60), accelerator=separate, precision=separate.precision("fp32"), placement=placement)
    assert places(model) == {"cpu" if waits else "meta"}
    use(model)
    assert places(model) == {"cpu" if waits else "meta"}


def test_offload_is_described_in_one_line(separate, accelerator):
    def describe(device, **engine):
        config = build_config({"engine": {"zero_stage": 1, **engine}, "roles": {"reward": {"offload": "none"}}})
        return describe_offload(model_placements(config, "ppo").values(), device)

    both = "offload: the optimizers of actor, critic and the weights of reference"
    assert describe(separate) == describe(accelerator) == ""
    assert describe(separate, offload="optimizer") == "offload: the optimizers of actor, critic wait on the host"
    assert describe(separate, offload="all") == f"{both} wait on the host"
    assert describe(accelerator, offload="all").startswith(f"{both} would wait on the host, which is this device")
