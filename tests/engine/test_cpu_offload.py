"""Frozen models that wait on the host: on the device while they are used, once for a whole block, the same numbers."""

from __future__ import annotations

import pytest
import torch

from accelerators.backends.cpu.backend import CPU
from rlhf.config.schema import build_config
from rlhf.engine.cpu_offload import describe_offload, offload, on_device
from rlhf.engine.engine import freeze_model
from rlhf.roles.roles import model_placements
from tests.engine.test_engine import IDS
from tests.helpers import llama
from tests.in_process import bytes_held, make_placement

META = torch.device("meta")


class Apart(CPU):
    """Its device is not the host: tensors there have shapes and no numbers."""

    def __init__(self):
        self.brought = 0

    def device(self):
        return META

    def to_device(self, batch):
        self.brought += 1
        return super().to_device(batch)


@pytest.fixture
def apart():
    return Apart()


def places(model):
    return {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}


def seen(model):
    """Where the weights were during each forward pass from now on."""
    found = []
    model.model.norm.register_forward_hook(lambda *_: found.append(places(model)))
    return found


def used(model):
    return model(input_ids=IDS.to(META)).logits


def test_weights_come_for_a_forward_pass_and_leave_after_it(apart):
    model = offload(llama(60).requires_grad_(False), apart)
    found, kept = seen(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    addresses = [tensor.data_ptr() for tensor in model.parameters()]
    assert places(model) == {"cpu"}
    assert bytes_held(model, apart.host_device()) == bytes_held(model) > 0
    assert used(model).device == META
    assert found == [{"meta"}]
    assert places(model) == {"cpu"}
    assert [tensor.data_ptr() for tensor in model.parameters()] == addresses, "the weights on the host are others now"
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())


def test_a_block_brings_them_once_however_many_passes_it_makes(apart):
    model = offload(llama(60).requires_grad_(False), apart)
    tensors = len(list(model.parameters())) + len(list(model.buffers()))
    with on_device(model, None):
        assert places(model) == {"cpu"}, "brought before they are used"
        for _ in range(3):
            used(model)
            assert places(model) == {"meta"}
    assert places(model) == {"cpu"}
    assert apart.brought == tensors
    used(model)
    assert apart.brought == 2 * tensors


def test_weights_that_layers_share_come_once_and_stay_shared(apart):
    model = offload(llama(60, tie_word_embeddings=True).requires_grad_(False), apart)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with on_device(model):
        used(model)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert apart.brought == len(list(model.parameters())) + len(list(model.buffers()))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_pass_that_fails_leaves_the_device_too(apart):
    model = offload(llama(60).requires_grad_(False), apart)
    with pytest.raises(ValueError, match="exactly one of"):
        model()
    assert places(model) == {"cpu"}
    with pytest.raises(ValueError, match="exactly one of"), on_device(model):
        model()
    assert places(model) == {"cpu"}


def test_where_the_host_is_the_device_nothing_moves(accelerator):
    model = offload(llama(60), accelerator)
    assert not model._forward_pre_hooks and not model._forward_hooks
    with on_device(model):
        assert torch.equal(model(input_ids=IDS).logits, llama(60)(input_ids=IDS).logits)


@pytest.mark.parametrize(("offload", "waits"), [("none", False), ("optimizer", False), ("parameters", True)])
def test_a_frozen_model_below_zero_3_is_parked_where_weights_are_offloaded(apart, offload, waits):
    placement = make_placement(1, trained=False, offload=offload)
    model = freeze_model(llama(60), accelerator=apart, precision=apart.precision("fp32"), placement=placement)
    assert places(model) == {"cpu" if waits else "meta"}
    used(model)
    assert places(model) == {"cpu" if waits else "meta"}


def test_a_line_says_what_waits_on_the_host(apart, accelerator):
    def said(on, **engine):
        config = build_config({"engine": {"zero_stage": 1, **engine}, "roles": {"reward": {"offload": "none"}}})
        return describe_offload(model_placements(config, "ppo").values(), on)

    both = "offload: the optimizers of actor, critic and the weights of reference"
    assert said(apart) == said(accelerator) == ""
    assert said(apart, offload="optimizer") == "offload: the optimizers of actor, critic wait on the host"
    assert said(apart, offload="all") == f"{both} wait on the host"
    assert said(accelerator, offload="all") == (
        f"{both} would wait on the host, which is this device: no memory is gained"
    )
