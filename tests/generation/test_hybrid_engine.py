"""Weights as the device reads them best, for a rollout and in frozen models: the same numbers, and nothing left after.

The CPU's implementation packs all sizes here, for the models are small.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification

from accelerators.backends.cpu import info as cpu_info
from accelerators.backends.cpu.kernels import packed
from rlhf.engine.engine import TrainingEngine, freeze_model
from rlhf.generation.hybrid_engine import count_step_bytes, generation_mode
from rlhf.generation.rank_groups import SingleRank
from rlhf.models.forward import ScalarHead
from rlhf.models.lora import find_adapted_layers
from rlhf.models.quantized import quantize
from tests.engine import engines
from tests.engine.engines import IDS
from tests.helpers import llama
from tests.in_process import bytes_held, make_placement

PRECISIONS = ["fp32", *(["bf16"] if cpu_info.native_bf16() else [])]

pytestmark = pytest.mark.skipif(not packed.supported(None), reason=packed.supported(None).reason)


@pytest.fixture(autouse=True)
def packs_all(monkeypatch, accelerator):
    """Pack all layers, also those that decode.c could compute on this processor."""
    monkeypatch.setattr(packed, "SMALLEST", 0)
    accelerator.kernels.choose("inference_weights", "onednn")
    yield
    accelerator.kernels.choose("inference_weights", "auto")


@contextlib.contextmanager
def without(accelerator: Any) -> Iterator[None]:
    accelerator.kernels.choose("inference_weights", "none")
    try:
        yield
    finally:
        accelerator.kernels.choose("inference_weights", "onednn")


def build(accelerator: Any, precision: str, zero_stage: int = 0, **lora: Any) -> TrainingEngine:
    engine = engines.build(accelerator, zero_stage, precision, model=llama(60), lora={"rank": 4, **lora} if lora else 0)
    for name, parameter in engine.module.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    return engine


@torch.no_grad()
def logits(module: nn.Module) -> torch.Tensor:
    return module(input_ids=IDS).logits.float()


def packed_layers(module: nn.Module) -> list[str]:
    return [path for path, layer in module.named_modules() if isinstance(layer, nn.Linear) and "forward" in vars(layer)]


def train(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    engines.step(engine)
    return engines.weights_of(engine)


# rollouts


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_training_after_rollouts_is_that_without_packing(accelerator, precision, zero_stage):
    weights, read = {}, {}
    for way in ("packed", "none"):
        engine = build(accelerator, precision, zero_stage)
        with without(accelerator) if way == "none" else contextlib.nullcontext():
            for _ in range(2):
                with generation_mode(engine) as module:
                    assert module is engine.module
                    assert len(packed_layers(module)) == (15 if way == "packed" else 0)
                    read[way] = logits(module)  # of weights that changed in between
                assert packed_layers(engine.module) == []
                weights[way] = train(engine)
    assert weights["packed"].keys() == weights["none"].keys()
    assert all(torch.equal(tensor, weights["none"][name]) for name, tensor in weights["packed"].items())
    tolerance = 1e-5 if precision == "fp32" else 2**-6
    torch.testing.assert_close(read["packed"], read["none"], rtol=0, atol=tolerance * read["none"].abs().max().item())


@pytest.mark.parametrize("merge", [True, False])
def test_adapters_are_in_packed_weights_or_separate(accelerator, merge):
    engine = build(accelerator, "fp32", merge=merge)
    with without(accelerator), generation_mode(engine) as module:
        expected = logits(module)
    with generation_mode(engine) as module:
        assert len(packed_layers(module)) == 15  # no adapters among them
        torch.testing.assert_close(logits(module), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    with engine.whole_weights() as module:
        assert packed_layers(module) == []


@pytest.mark.parametrize("merge", [True, False])
def test_weights_converted_in_place_are_held_once_and_restored(accelerator, merge):
    """Frozen weights under adapters; the trained part of the model is small."""
    engine = build(accelerator, "fp32", merge=merge)
    before, held = engines.weights_of(engine), bytes_held(engine.module)
    with without(accelerator), generation_mode(engine) as module:
        expected, held_plain = logits(module), bytes_held(module)
    assert held_plain == held
    with generation_mode(engine, layout="in place") as module:
        assert len(packed_layers(module)) == 14  # but for the output layer, whose weight is the embedding's
        assert bytes_held(module) == held
        torch.testing.assert_close(logits(module), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    after = engines.weights_of(engine)
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    train(engine)


def test_unchanged_layout_neither_merges_nor_converts_weights(accelerator):
    engine = build(accelerator, "fp32", merge=True)
    with generation_mode(engine, layout="unchanged") as module:
        assert packed_layers(module) == []
        assert not any(layer.disable_adapters for layer in find_adapted_layers(module).values())
    with generation_mode(engine) as module:
        assert all(layer.disable_adapters for layer in find_adapted_layers(module).values())


def test_weights_in_a_common_buffer_are_not_converted_in_place(accelerator):
    engine = build(accelerator, "fp32", zero_stage=2)
    before = train(engine)
    with generation_mode(engine, layout="in place") as module:
        assert packed_layers(module) == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in engines.weights_of(engine).items())


def test_a_rollout_that_fails_leaves_nothing_behind(accelerator):
    engine = build(accelerator, "fp32")
    before = logits(engine.module)
    with pytest.raises(KeyboardInterrupt), generation_mode(engine):
        raise KeyboardInterrupt
    assert packed_layers(engine.module) == []
    assert torch.equal(logits(engine.module), before)


def test_a_packing_that_fails_leaves_nothing_behind(accelerator, monkeypatch):
    engine, reordered, calls = build(accelerator, "fp32"), packed._reordered, []

    def failing(weight: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 6:
            raise MemoryError
        return reordered(weight)

    monkeypatch.setattr(packed, "_reordered", failing)
    for keep in (True, False):
        before, names = logits(engine.module), engine.module.state_dict().keys()
        calls.clear()
        with pytest.raises(MemoryError):
            packed.prepare(engine.module, keep)
        assert packed_layers(engine.module) == []
        assert torch.equal(logits(engine.module), before)
        assert engine.module.state_dict().keys() == names


# frozen models


def frozen(accelerator: Any, model: Any, precision: str = "fp32", shared: bool = False, **engine: Any) -> nn.Module:
    placement = make_placement(0, trained=False, **engine)
    return freeze_model(
        model, accelerator=accelerator, precision=accelerator.precision(precision), placement=placement, shared=shared
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_frozen_model_takes_the_same_memory_and_scores(accelerator, precision):
    with without(accelerator):
        plain = frozen(accelerator, llama(60), precision)
    model = frozen(accelerator, llama(60), precision)
    assert len(packed_layers(model)) == 14  # but for the output layer, whose product others may make in parts
    assert bytes_held(model) == bytes_held(plain)
    expected = logits(plain)
    tolerance = 1e-5 if precision == "fp32" else 2**-6
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=tolerance * expected.abs().max().item())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert packed_layers(frozen(accelerator, llama(60), precision, shared=True)) == []


def test_the_last_product_of_a_scalar_head_stays_in_float32(accelerator):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    made = LlamaForSequenceClassification(LlamaConfig(**sizes, vocab_size=60, num_labels=1, pad_token_id=0))
    expected = ScalarHead(made).eval()(IDS, torch.ones_like(IDS)).detach()
    model = frozen(accelerator, ScalarHead(made))
    assert len(packed_layers(model)) == 15  # the head's forward is its own
    assert model.model.score.weight.layout == torch.strided
    with torch.no_grad():
        torch.testing.assert_close(model(IDS, torch.ones_like(IDS)), expected, rtol=0, atol=1e-5)


# Of `llama`: in each of 2 layers queries and output of 32 x 32, keys and values of 16 x 32, three matrices of 48 x 32,
# two norms of 32; one norm behind them. The vocabulary is 60.
LAYERS = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32) + 32
OUTPUT = 60 * 32


@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize(("tied", "rank"), [(True, 0), (False, 0), (False, 4)])
def test_a_decoding_step_reads_each_weight_once(accelerator, zero_stage, tied, rank):
    model = llama(60, tie_word_embeddings=tied)
    engine = engines.build(accelerator, zero_stage, model=model, lora=rank)
    assert count_step_bytes(engine, SingleRank()) == 4 * (LAYERS + OUTPUT)


def test_a_decoding_step_reads_packed_weights_as_they_are(accelerator):
    model, packing = llama(60), accelerator.kernels.get("quantized_weights")
    quantize(model, "int8", packing, exported=False)
    engine = engines.build(accelerator, 0, model=model, lora=4)
    linear = LAYERS - 5 * 32  # a byte each; a scale of two bytes for each row
    rows = 2 * (2 * 32 + 2 * 16 + 2 * 48 + 32)
    assert count_step_bytes(engine, SingleRank()) == linear + 2 * rows + 4 * (5 * 32 + OUTPUT)
