"""Quantized frozen layers: which they are, that they compute what their unpacked weights do, and what an export has."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D

from accelerators.quantized import KINDS, QuantizedWeights
from rlhf.checkpoint.export import save_model
from rlhf.config.schema import LoraConfig, ModelConfig, OptimizerConfig
from rlhf.engine.engine import TrainingEngine
from rlhf.models import lazy_tensors
from rlhf.models.forward import completion_log_probs
from rlhf.models.loading import load_causal_lm
from rlhf.models.lora import (
    TRAINED_ADAPTER,
    add_adapters,
    compute_adapter_update,
    find_adapted_layers,
    find_adapter_targets,
)
from rlhf.models.quantized import count_quantized, find_quantized_layers, quantize, quantize_on_load, unpack_weight
from rlhf.models.weight_loading import place_in_memory
from tests.families.table import BY_NAME
from tests.helpers import build_tokenizer, llama, weights
from tests.in_process import bytes_held, make_placement, scalar_llama

IDS = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(0))
PACKING = QuantizedWeights()
FAMILIES = ["Llama, Llama 2", "OPT", "BLOOM", "GPT-2", "Falcon"]


def tiny(name: str):
    config = BY_NAME[name].configuration()
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    for path, parameter in model.named_parameters():
        if path.endswith("bias"):  # zero at first: one that is lost would not be missed
            parameter.data.normal_(std=0.1)
    return model


def packed(model, kind="int8", **options):
    quantize(model, kind, PACKING, **{"exported": True, **options})
    return model


def same_in_float(model, float_model):
    """`float_model` with the weights that the layers of `model` multiply with."""
    for path, layer in find_quantized_layers(model).items():
        float_model.get_submodule(path).weight.data = unpack_weight(layer).contiguous()
    return float_model


def adapted(model):
    """With adapters that do something."""
    add_adapters(model, LoraConfig(rank=4), seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    return model


# which layers


@pytest.mark.parametrize("name", FAMILIES)
def test_the_linear_layers_of_the_transformer_are_quantized_and_nothing_else(name):
    plain = tiny(name)
    linear = {path for path, layer in plain.base_model.named_modules() if isinstance(layer, torch.nn.Linear | Conv1D)}
    model = packed(copy.deepcopy(plain))
    assert set(find_quantized_layers(model.base_model)) == linear
    assert len(find_quantized_layers(model)) == len(linear)
    before, after = dict(plain.named_parameters()), dict(model.named_parameters())
    assert all(torch.equal(after[path], before[path]) for path in after)
    gone = {f"{plain.base_model_prefix}.{path}.weight" for path in linear}
    assert before.keys() - after.keys() == gone
    assert count_quantized(model) == sum(before[path].numel() for path in gone)
    find_adapter_targets(model, (next(iter(linear)).rpartition(".")[2],))


def test_a_scalar_head_is_not_quantized():
    model = packed(scalar_llama(60))
    assert type(model.score) is torch.nn.Linear and count_quantized(model) > 0


def test_the_state_of_a_quantized_model_is_without_its_weights_and_its_buffers_have_names():
    model = packed(llama(60))
    assert not any("_proj" in name for name in model.state_dict())
    assert "model.layers.0.mlp.up_proj.values" in dict(model.named_buffers())


def test_a_layer_that_does_more_than_multiply_is_left_alone():
    model = packed(tiny("Phi-3.5 MoE"))
    assert not any("router" in path for path in find_quantized_layers(model)) and count_quantized(model)
    assert model(input_ids=IDS).logits.isfinite().all()


def test_layers_that_share_a_weight_share_what_it_is_packed_into():
    model = packed(tiny("Zamba 2"))
    assert count_quantized(model) < sum(layer.weight.shape.numel() for layer in find_quantized_layers(model).values())
    assert count_quantized(model) < sum(parameter.numel() for parameter in tiny("Zamba 2").parameters())


# numbers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_the_model_with_unpacked_weights(name, kind):
    plain = tiny(name)
    model = packed(copy.deepcopy(plain), kind)
    expected = same_in_float(model, plain)
    found = []
    for each in (adapted(model), adapted(expected)):
        embeddings = each.get_input_embeddings()(IDS).detach().requires_grad_()
        logits = each(inputs_embeds=embeddings).logits
        logits.square().mean().backward()
        gradients = {path: parameter.grad for path, parameter in each.named_parameters() if parameter.requires_grad}
        found.append((logits, embeddings.grad, gradients))
    assert found[0][2].keys() == found[1][2].keys() and len(found[0][2]) > 8
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.02), ("int4", 0.3)])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_near_those_of_the_model_as_it_was(name, kind, most):
    plain = tiny(name)
    with torch.no_grad():
        expected = plain(input_ids=IDS).logits
        found = packed(copy.deepcopy(plain), kind)(input_ids=IDS).logits
    off = (found - expected).norm() / expected.norm()
    assert 0 < off < most


def test_inputs_are_cast_where_autocast_says_so():
    layer = next(iter(find_quantized_layers(packed(llama(60))).values()))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(2, 32)).dtype == torch.bfloat16
    assert layer(torch.ones(2, 32)).dtype == torch.float32


# loading


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_packed_as_they_are_read_and_the_whole_weights_lie_in_one_place(model_folder, kind, monkeypatch):
    places: list[int] = []
    copy_of = lazy_tensors.copy_source

    def watched(source, out, *given):
        if out.dim() == 2 and out.shape != (len(build_tokenizer()), 32):
            places.append(out.untyped_storage().data_ptr())
        return copy_of(source, out, *given)

    monkeypatch.setattr(lazy_tensors, "copy_source", watched)
    put = quantize_on_load(place_in_memory(torch.bfloat16), kind, PACKING, torch.device("cpu"))
    model = load_causal_lm(ModelConfig(path=str(model_folder)), build_tokenizer(), attention="sdpa", put=put)
    assert len(places) == len(find_quantized_layers(model)) == 14 and len(set(places)) <= 2  # it grows once
    monkeypatch.undo()
    expected = packed(load_causal_lm(ModelConfig(path=str(model_folder)), build_tokenizer(), attention="sdpa"), kind)
    buffers, wanted = dict(model.named_buffers()), dict(expected.named_buffers())
    assert buffers.keys() == wanted.keys() and all(torch.equal(buffers[name], wanted[name]) for name in wanted)


def test_a_model_that_nobody_exports_keeps_no_float_weight():
    plain = llama(60)
    kept = [weakref.ref(layer.weight) for layer in plain.modules() if isinstance(layer, torch.nn.Linear)]
    model = packed(plain, exported=False)
    gc.collect()
    assert sum(reference() is not None for reference in kept) == 1  # the output embedding
    assert bytes_held(model) < 0.4 * bytes_held(llama(60))


# under an engine


def engine(accelerator, model, zero_stage, precision, **placement):
    return TrainingEngine(
        "test",
        model,
        accelerator=accelerator,
        precision=accelerator.precision(precision),
        placement=make_placement(zero_stage, **placement),
        optimizer=OptimizerConfig(learning_rate=1e-3, schedule="constant", warmup=0),
        total_steps=100,
        micro_batch_size=3,
        accumulation=1,
    )


def loss(model, ids):
    return -completion_log_probs(model, ids, torch.ones_like(ids), 8).log_probs.mean(), {}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_the_model_with_unpacked_weights(accelerator, zero_stage, kind, checkpointing):
    model = packed(llama(60), kind)
    plain = same_in_float(model, llama(60))
    found = []
    for each in (model, plain):
        if checkpointing:
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        trained = engine(accelerator, adapted(each), zero_stage, "fp32")
        for _ in range(3):
            trained.step([IDS], loss)
        found.append({name: tensor for name, tensor in trained.module.state_dict().items() if ".lora_" in name})
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_leaves_packed_weights_bit_for_bit(accelerator, zero_stage, precision, kind):
    model = adapted(packed(llama(60), kind))
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    size = count_quantized(model)
    trained = engine(accelerator, model, zero_stage, precision)
    trained.step([IDS], loss)
    after = dict(trained.module.named_buffers())
    assert before.keys() == after.keys() and len(before) > 20
    assert all(tensor.dtype == before[name].dtype for name, tensor in after.items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    counts = trained.parameter_counts
    assert counts["all"] - counts["trainable"] == sum(parameter.numel() for parameter in llama(60).parameters())
    assert size > 10_000


# export


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_saved_is_the_base_as_it_was_and_the_adapters_added_in_float32(accelerator, tmp_path, name, kind):
    plain = tiny(name)
    model = adapted(packed(copy.deepcopy(plain), kind))
    expected = {path: tensor.clone() for path, tensor in plain.state_dict().items()}
    for path, layer in find_adapted_layers(model).items():
        expected[f"{path}.weight"] += compute_adapter_update(layer).detach()
    trained = engine(accelerator, model, 0, "fp32")
    save_model(trained, build_tokenizer(), tmp_path / "model")
    found = weights(tmp_path / "model")
    assert found and all(torch.equal(tensor, expected[path]) for path, tensor in found.items())
    assert expected.keys() - found.keys() <= set(plain.all_tied_weights_keys)
    assert layer.scaling[TRAINED_ADAPTER] > 0
