"""Weights packed for a phase of reading: products against float64, models against transformers, nothing left after."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from accelerators.backends.cpu import info as cpu_info
from accelerators.backends.cpu.kernels import packed
from accelerators.backends.cpu.kernels.packed import prepare, supported

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "gpt_neox": {},
    "opt": {"ffn_dim": 320, "word_embed_proj_dim": 256, "max_position_embeddings": 64},
    "qwen2": {"num_key_value_heads": 2},
    "gemma": {"num_key_value_heads": 1, "head_dim": 64},
}
LINEAR = {"llama": 15, "gpt_neox": 9, "opt": 13, "qwen2": 15, "gemma": 15}
PRODUCTS = {"llama": 9, "gpt_neox": 9, "opt": 9, "qwen2": 9, "gemma": 9}

pytestmark = pytest.mark.skipif(not supported(None), reason=supported(None).reason)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    config = CONFIG_MAPPING[family](**SIZES, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers begins with zeros
                parameter.normal_(std=0.5)
            elif parameter.dim() == 2:
                parameter.mul_(4)
    return model


def snapshot(module: nn.Module) -> dict[str, Any]:
    """All that is in the module tree: attributes, and the very tensors."""
    return {
        f"{path}.{name}": id(value) if isinstance(value, Tensor) else repr(type(value))
        for path, child in module.named_modules()
        for source in (vars(child), child._parameters, child._buffers)
        for name, value in source.items()
    }


def exact(layer: nn.Linear, inputs: Tensor) -> Tensor:
    bias = 0 if layer.bias is None else layer.bias.double()
    return inputs.double() @ layer.weight.double().T + bias


class Siblings(nn.Module):
    """As attention has them; the bias of k alone, so that the fused one is made of zeros too."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.q_proj = nn.Linear(256, 256, bias=False, dtype=dtype)
        self.k_proj = nn.Linear(256, 64, dtype=dtype)
        self.v_proj = nn.Linear(256, 64, bias=False, dtype=dtype)
        self.o_proj = nn.Linear(256, 256, dtype=dtype)

    def layers(self) -> list[nn.Linear]:
        return [self.q_proj, self.k_proj, self.v_proj, self.o_proj]


# products


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
@torch.no_grad()
def test_packed_products_are_those_of_float64(dtype, tolerance, keep):
    """In bf16 rounded twice at most: the product, and with its bias."""
    if dtype == torch.bfloat16 and not cpu_info.native_bf16():
        pytest.skip("this processor has no native bf16, so weights in bf16 stay plain")
    module = Siblings(dtype)
    for rows in (1, 16, 300):
        inputs = torch.randn(rows, 3, 256, dtype=dtype)
        expected = [exact(layer, inputs) for layer in module.layers()]
        restore = prepare(module, keep)
        assert all("forward" in vars(layer) for layer in module.layers()) == keep  # k and v are small by themselves
        for layer, product in zip(module.layers(), expected):
            output = layer(inputs)
            assert output.dtype == dtype
            off = (output.double() - product).abs().max() / product.abs().max()
            assert off <= tolerance, (rows, layer, off)
        restore()


def test_inputs_may_be_strided_and_of_any_shape():
    module = Siblings(torch.float32)
    restore = prepare(module, True)
    wide = torch.randn(2, 5, 512)
    with torch.no_grad():
        for inputs in (wide[..., ::2], wide[0, 0, :256], wide[:0, :, :256], wide[:, :, :256].transpose(0, 1)):
            expected = exact(module.q_proj, inputs)
            torch.testing.assert_close(module.q_proj(inputs).double(), expected, rtol=0, atol=1e-5)
    restore()


@pytest.mark.parametrize("keep", [True, False])
def test_gradients_and_autocast_use_the_plain_weights(keep):
    module = Siblings(torch.float32)
    inputs = torch.randn(4, 256, requires_grad=True)
    module.q_proj(inputs).sum().backward()
    expected, inputs.grad = inputs.grad, None
    restore = prepare(module, keep)
    module.q_proj(inputs).sum().backward()
    torch.testing.assert_close(inputs.grad, expected)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert module.o_proj(inputs).dtype == torch.bfloat16
    restore()


def test_shared_weight_stays_plain_if_weights_are_given_up():
    module = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 256))
    module[2].weight = module[0].weight
    restore = prepare(module, keep=False)
    assert ["forward" in vars(layer) for layer in module] == [False, True, False]
    restore()


# siblings


@torch.no_grad()
def test_siblings_share_one_product_and_keep_nothing_alive(monkeypatch):
    module, calls = Siblings(torch.float32), []
    multiplied = packed._multiplied
    monkeypatch.setattr(packed, "_multiplied", lambda *a: calls.append(1) or multiplied(*a))
    restore = prepare(module, True)
    for _ in range(2):
        inputs = torch.randn(4, 256)
        parts = [layer(inputs) for layer in module.layers()[:3]]
        for part, layer in zip(parts, module.layers()):
            torch.testing.assert_close(part.double(), exact(layer, inputs), rtol=0, atol=1e-5)
    assert len(calls) == 2
    gone = [weakref.ref(inputs), weakref.ref(parts[0]._base if parts[0]._base is not None else parts[0])]
    del inputs, parts, part
    assert [reference() for reference in gone] == [None, None]
    restore()


@torch.no_grad()
def test_part_is_only_valid_for_the_same_unchanged_tensor():
    module = Siblings(torch.float32)
    restore = prepare(module, True)

    def right(layer: nn.Linear, inputs: Tensor) -> None:
        expected = exact(layer, inputs)
        torch.testing.assert_close(layer(inputs).double(), expected, rtol=0, atol=1e-5)

    q, k, v, _ = module.layers()
    inputs = torch.randn(4, 256)
    right(q, inputs)
    right(q, inputs)  # twice the same layer
    right(k, inputs)
    inputs.mul_(2)
    right(v, inputs)  # another content
    right(k, inputs.clone())  # another tensor
    right(q, torch.randn(4, 256))
    right(v, torch.randn(4, 256))
    with torch.inference_mode():
        right(q, torch.randn(4, 256))
    restore()


# models


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_greedy_decoding_in_float32_is_that_of_transformers(family, caplog):
    model = model_of(family)
    ids = torch.randint(2, 300, (3, 7))
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **options)
    assert len(expected.unique()) > 12  # no one token again and again
    before, weights = snapshot(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with caplog.at_level(logging.DEBUG, "accelerators.backends.cpu.kernels.packed"):
        restore = prepare(model, True)
    message = f"{LINEAR[family]} linear layers packed as {PRODUCTS[family]} products"
    assert message in caplog.text
    assert torch.equal(model.generate(ids, **options), expected)
    restore()
    assert snapshot(model) == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


# memory


GIVEN_UP = """
import torch
from torch import nn
from accelerators import host
from accelerators.backends.cpu.kernels.packed import prepare

prepare(nn.Sequential(nn.Linear(1024, 1024, bias=False)), keep=False)()  # loads what is loaded once
layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))  # 96 MiB
tied = nn.Sequential(layers[0])
weight_bytes = layers[0].weight.nbytes
host.reset_peak_memory()
before = host.resident_memory()[0]
restore = prepare(layers, keep=False)
peak = host.resident_memory()[1]
assert peak - before < 14 * weight_bytes, f"{(peak - before) / weight_bytes:.1f} weights more"
assert tied[0].weight.shape == (1024, 1024) and tied[0].weight.layout != torch.strided
restore()
"""


def test_weights_that_are_given_up_are_not_there_twice(run_python):
    """A copy of each of the 24 would add 24; libraries add 2 to 7. Tests before it leave memory: in a new process."""
    done = run_python("-c", GIVEN_UP)
    assert done.returncode == 0, done.stderr
