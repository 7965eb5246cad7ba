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
from rlhf.models.quantized import count_quantized, find_quantized_layers, quantize, quantize_on_load
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
        weight = layer.packing.unpack(dict(layer.named_buffers(recurse=False)))
        transposed = isinstance(layer, Conv1D)
        float_model.get_submodule(path).weight.data = (weight.T if transposed else weight).contiguous()
    return float_model


def adapted(model):
    """With adapters that do something."""
    add_adapters(model, LoraConfig(rank=4), seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_only_linear_layers_of_the_transformer_are_packed(name):
    plain = tiny(name)
    linear = {path for path, layer in plain.base_model.named_modules() if isinstance(layer, torch.nn.Linear | Conv1D)}
    model = packed(copy.deepcopy(plain))
    assert set(find_quantized_layers(model.base_model)) == linear
    assert len(find_quantized_layers(model)) == len(linear)
    before, after = dict(plain.named_parameters()), dict(model.named_parameters())
    assert all(torch.equal(after[path], before[path]) for path in after)
    gone = {f"{plain.base_model_prefix}.{path}.weight" for path in linear}
    assert before.keys() - after.keys() == gone and not gone & model.state_dict().keys()
    assert count_quantized(model) == sum(before[path].numel() for path in gone)
    find_adapter_targets(model, (next(iter(linear)).rpartition(".")[2],))


def test_heads_routers_and_shared_weights():
    scorer, experts, shared = packed(scalar_llama(60)), packed(tiny("Phi-3.5 MoE")), packed(tiny("Zamba 2"))
    assert type(scorer.score) is torch.nn.Linear and count_quantized(scorer) > 0
    assert not any("router" in path for path in find_quantized_layers(experts)) and count_quantized(experts)
    assert experts(input_ids=IDS).logits.isfinite().all()
    # Layers that share a weight share what it is packed into.
    assert count_quantized(shared) < sum(layer.weight.shape.numel() for layer in find_quantized_layers(shared).values())


@pytest.mark.parametrize(("kind", "largest_error"), [("int8", 0.02), ("int4", 0.3)])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_model_computes_as_with_unpacked_weights(name, kind, largest_error):
    plain = tiny(name)
    model = packed(copy.deepcopy(plain), kind)
    with torch.no_grad():
        logits = plain(input_ids=IDS).logits
        assert 0 < (model(input_ids=IDS).logits - logits).norm() / logits.norm() < largest_error
    unpacked = same_in_float(model, plain)
    results = []
    for network in (adapted(model), adapted(unpacked)):
        embeddings = network.get_input_embeddings()(IDS).detach().requires_grad_()
        logits = network(inputs_embeds=embeddings).logits
        logits.square().mean().backward()
        gradients = {path: parameter.grad for path, parameter in network.named_parameters() if parameter.requires_grad}
        results.append((logits, embeddings.grad, gradients))
    assert results[0][2].keys() == results[1][2].keys() and len(results[0][2]) > 8
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def test_autocast_casts_inputs():
    layer = next(iter(find_quantized_layers(packed(llama(60))).values()))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(2, 32)).dtype == torch.bfloat16
    assert layer(torch.ones(2, 32)).dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_packed_on_load_through_one_buffer(model_folder, kind, monkeypatch):
    buffers_used: list[int] = []
    copy_of = lazy_tensors.copy_source

    def watch(source, out, *start):
        if out.dim() == 2 and out.shape != (len(build_tokenizer()), 32):
            buffers_used.append(out.untyped_storage().data_ptr())
        return copy_of(source, out, *start)

    monkeypatch.setattr(lazy_tensors, "copy_source", watch)
    put = quantize_on_load(place_in_memory(torch.bfloat16), kind, PACKING, torch.device("cpu"))
    model = load_causal_lm(ModelConfig(path=str(model_folder)), build_tokenizer(), attention="sdpa", put=put)
    assert len(buffers_used) == len(find_quantized_layers(model)) == 14 and len(set(buffers_used)) <= 2  # it grows once
    monkeypatch.undo()
    expected = packed(load_causal_lm(ModelConfig(path=str(model_folder)), build_tokenizer(), attention="sdpa"), kind)
    buffers, wanted = dict(model.named_buffers()), dict(expected.named_buffers())
    assert buffers.keys() == wanted.keys() and all(torch.equal(buffers[name], wanted[name]) for name in wanted)


def test_model_without_export_keeps_no_float_weight():
    plain = llama(60)
    references = [weakref.ref(layer.weight) for layer in plain.modules() if isinstance(layer, torch.nn.Linear)]
    model = packed(plain, exported=False)
    gc.collect()
    assert sum(reference() is not None for reference in references) == 1  # the output embedding
    assert bytes_held(model) < 0.4 * bytes_held(llama(60))


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


@pytest.mark.parametrize(
    ("kind", "zero_stage", "checkpointing"),
    [("int8", 0, True), ("int4", 0, False), ("int4", 1, True), ("int8", 2, False), ("int4", 2, True)],
)
def test_training_is_that_with_unpacked_weights(accelerator, zero_stage, kind, checkpointing):
    model = packed(llama(60), kind)
    plain = same_in_float(model, llama(60))
    states = []
    for network in (model, plain):
        if checkpointing:
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        trained = engine(accelerator, adapted(network), zero_stage, "fp32")
        for _ in range(3):
            trained.step([IDS], loss)
        states.append({name: tensor for name, tensor in trained.module.state_dict().items() if ".lora_" in name})
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "zero_stage", "precision"), [("int8", 0, "bf16"), ("int4", 1, "bf16"), ("int8", 2, "fp32")]
)
def test_engine_leaves_packed_weights_bit_for_bit(accelerator, zero_stage, precision, kind):
    model = adapted(packed(llama(60), kind))
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    trained = engine(accelerator, model, zero_stage, precision)
    trained.step([IDS], loss)
    after = dict(trained.module.named_buffers())
    assert before.keys() == after.keys() and len(before) > 20
    assert all(tensor.dtype == before[name].dtype for name, tensor in after.items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    counts = trained.parameter_counts
    assert counts["all"] - counts["trainable"] == sum(parameter.numel() for parameter in llama(60).parameters())


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", ["OPT", "GPT-2"])  # GPT-2's weights are transposed
def test_export_computes_some_rows_in_float32_at_a_time(accelerator, tmp_path, monkeypatch, name, quantized):
    plain = tiny(name)
    model = adapted(packed(copy.deepcopy(plain), "int8") if quantized else copy.deepcopy(plain))
    expected = {
        f"{path}.weight": plain.get_submodule(path).weight + compute_adapter_update(layer)
        for path, layer in find_adapted_layers(model).items()
    }
    sizes = []

    def watch(layer, rows):
        sizes.append((update := compute_adapter_update(layer, rows)).numel())
        return update

    for module in ("rlhf.models.lora", "rlhf.models.quantized"):
        monkeypatch.setattr(f"{module}.compute_adapter_update", watch)
    monkeypatch.setattr(lazy_tensors, "CHUNK", 300)
    save_model(engine(accelerator, model, 0, "fp32"), build_tokenizer(), tmp_path / "model")
    exported = weights(tmp_path / "model")
    assert all(torch.allclose(exported[path], tensor, rtol=0, atol=1e-6) for path, tensor in expected.items())
    assert len(sizes) > 2 * len(expected) and max(sizes) <= 300


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_export_is_the_unpacked_base_plus_adapters(accelerator, tmp_path, name, kind):
    plain = tiny(name)
    model = adapted(packed(copy.deepcopy(plain), kind))
    expected = {path: tensor.clone() for path, tensor in plain.state_dict().items()}
    for path, layer in find_adapted_layers(model).items():
        expected[f"{path}.weight"] += compute_adapter_update(layer).detach()
    trained = engine(accelerator, model, 0, "fp32")
    save_model(trained, build_tokenizer(), tmp_path / "model")
    exported = weights(tmp_path / "model")
    assert exported and all(torch.equal(tensor, expected[path]) for path, tensor in exported.items())
    assert expected.keys() - exported.keys() <= set(plain.all_tied_weights_keys)
    assert layer.scaling[TRAINED_ADAPTER] > 0
