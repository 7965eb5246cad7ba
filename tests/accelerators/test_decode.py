"""Decoder layers in C: as near to float32 as the model's own, whatever the sizes and the cache; nothing left after."""

from __future__ import annotations

import functools
import platform
import shutil
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

from accelerators.backends.cpu import info as cpu_info
from accelerators.backends.cpu.kernels import compiler, decode, dtypes, families
from rlhf.generation.hybrid_engine import generation_mode
from tests.accelerators.decoding import FAMILIES, STEPS, Viewed, check, logits_of, model_of, off, prompts, truth
from tests.accelerators.test_packed import snapshot
from tests.generation.test_hybrid_engine import build, train

pytestmark = pytest.mark.skipif(not decode.supported(None), reason=decode.supported(None).reason)


@pytest.fixture(autouse=True)
def fresh(any_processor) -> None:
    torch.manual_seed(0)


# against float32


@pytest.mark.parametrize("dtype", dtypes.DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_as_near_to_float32_as_those_of_the_plain_model(family, dtype, decode_calls):
    """Of prompts and of a token at a time; layers with other windows are another call."""
    model = model_of(family, dtype)
    runs = 2 if family.startswith(("gemma2", "gemma3")) else 1
    for number, rows in enumerate((1, 16, 40), 1):
        check(model, prompts(rows))
        assert decode_calls["decode"] == runs * (STEPS + 1) * number
        assert decode_calls["linear"] == (STEPS + 1) * number  # the output layer


def test_every_family_of_the_table_is_tested():
    modules = {CONFIG_MAPPING[name].__module__.split(".")[-2] for name in FAMILIES}
    assert modules == set(families.FAMILIES)


@torch.no_grad()
def test_long_prompts_are_read_some_rows_at_a_time(decode_calls, monkeypatch):
    monkeypatch.setattr(decode, "MOST", 50)
    check(model_of(), prompts(9))  # 108 tokens: four rows of 12, and again
    assert decode_calls["decode"] == 3 + STEPS
    decode_calls.clear()
    check(model_of(), prompts(2, 60))  # a row at a time
    assert decode_calls["decode"] == 2 + STEPS


@pytest.mark.parametrize(("size", "groups"), [(32, 1), (64, 6), (96, 2), (128, 1)])
def test_heads_of_any_size_and_number_of_groups(size, groups):
    check(model_of("qwen3", head_dim=size, num_key_value_heads=groups, num_hidden_layers=1), prompts(3))


@pytest.mark.parametrize(("inner", "hidden"), [(32, 96), (96, 288), (352, 192)])
def test_layers_narrower_or_wider_than_their_heads(inner, hidden):
    check(model_of(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=1), prompts(18))


def test_numbers_do_not_depend_on_the_default_dtype(monkeypatch):
    """Room that C writes to has a type of its own: too little of it would be found by its size."""
    model, given, made, empty = model_of(), prompts(5), [], torch.empty

    def recorded(*sizes: Any, **options: Any) -> torch.Tensor:
        made.append(empty(*sizes, **options))
        return made[-1]

    restore = decode.prepare(model, True)
    expected = logits_of(model, given)
    monkeypatch.setattr(torch, "empty", recorded)
    torch.set_default_dtype(torch.float64)
    try:
        logits = logits_of(model, given)
    finally:
        torch.set_default_dtype(torch.float32)
        restore()
    assert torch.equal(logits, expected)
    assert made and not any(tensor.dtype == torch.float64 for tensor in made)


@pytest.mark.parametrize("kind", ["viewed", "grown"])
def test_decoding_into_parts_of_buffers_or_growing_ones(kind, decode_calls):
    check(model_of(), prompts(5), kind)
    assert decode_calls["decode"] == STEPS + 1


@pytest.mark.parametrize("columns", [3, 11, 297])
def test_columns_of_any_number(columns):
    check(model_of(max_position_embeddings=512), prompts(3, columns), "grown")


@pytest.mark.parametrize("kind", ["viewed", "grown"])
def test_rows_that_leave_change_nothing_for_the_others(kind):
    model, given = model_of(), prompts(5)
    restore = decode.prepare(model, True)
    shrunk, stayed = logits_of(model, given, kind, leaves=True), logits_of(model, given, kind)
    restore()
    assert torch.equal(shrunk[:, :-1], stayed[:, :-1])
    assert not shrunk[2:, -1].any()


def test_a_row_that_sees_nothing_has_numbers_and_changes_no_other():
    model, (ids, mask) = model_of(), prompts(5)
    mask[1] = 0
    exact, plain = logits_of(truth(model), (ids, mask)), logits_of(model, (ids, mask))
    restore = decode.prepare(model, True)
    logits = logits_of(model, (ids, mask))
    restore()
    others = [0, 2, 3, 4]
    assert off(logits[:, others], exact[:, others]) <= 1.1 * off(plain[:, others], exact[:, others]) < 0.05
    assert logits.isfinite().all()


@pytest.mark.parametrize("rows", [1, 5, 13, 16, 40])
@torch.no_grad()
def test_products_are_those_of_float64_rounded_once(rows):
    for outputs in (16, 32, 48, 112):  # whole groups of panels, and others
        layer = nn.Linear(96, outputs, dtype=torch.bfloat16)
        inputs = torch.randn(rows, 192, dtype=torch.bfloat16)[:, ::2]
        products = decode._Output(layer)(inputs)
        exact = inputs.double() @ layer.weight.double().T + layer.bias.double()
        assert products.dtype == torch.bfloat16
        assert ((products - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


@torch.no_grad()
def test_products_without_amx_are_as_near(monkeypatch):
    """On a processor that has it, the same source is compiled for one that has not."""
    known = decode._functions()
    if not known.amx():
        pytest.skip("this processor has no AMX: all tests are without")
    use_compiled(monkeypatch, "-mno-amx-bf16")
    assert not decode._functions().amx()
    for rows in (1, 9, 40):
        check(model_of("qwen2"), prompts(rows))


def test_cache_that_grows_frees_what_it_replaces():
    """A kernel keeps the list of a cache's tensors from call to call."""
    config = model_of("qwen2").config
    view = Viewed(config, 20, grows=True)
    view.show(2, 0, 5)
    kept, _ = view.cache.decode_buffers(config.num_key_value_heads, 8, torch.float32)
    replaced = [weakref.ref(tensor) for tensor in kept]
    assert replaced
    view.show(2, 5, 8)
    assert [tensor() for tensor in replaced] == [None] * len(replaced)
    assert len(view.cache.decode_buffers(config.num_key_value_heads, 8, torch.float32)[0]) == len(replaced)


def use_compiled(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    """Let decode.c be compiled with more flags; the last of a kind counts."""
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, *flags))
    monkeypatch.setattr(compiler, "compiled", compiler.compiled.__wrapped__)
    monkeypatch.setattr(decode, "_functions", functools.cache(decode._functions.__wrapped__))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86")
@pytest.mark.parametrize("dtype", dtypes.DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(
    ("processor", "lanes"), [("x86-64", 4), ("haswell", 8), ("skylake-avx512", 16)], ids=lambda value: str(value)
)
def test_older_processors_compute_the_same(processor, lanes, dtype, monkeypatch):
    """SSE, AVX2, and AVX512 without bf16, whose registers have other numbers of lanes."""
    if processor == "skylake-avx512" and "avx512f" not in cpu_info.cpu_flags():
        pytest.skip("this processor has no AVX512")
    use_compiled(monkeypatch, f"-march={processor}")
    assert decode._functions(dtype).lanes() == lanes
    for family in ("qwen3", "gpt_neox"):
        for rows in (1, 25):
            check(model_of(family, dtype), prompts(rows))


@pytest.mark.skipif(not shutil.which("clang"), reason="no clang here")
@pytest.mark.parametrize("dtype", dtypes.DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_clang_compiles_the_same_on_the_same_threads(dtype, monkeypatch):
    monkeypatch.setenv("CC", "clang")
    use_compiled(monkeypatch)
    check(model_of("gemma2", dtype), prompts(25))


# before and after


def test_a_model_is_afterwards_what_it_was(decode_calls):
    model, given = model_of("qwen3"), prompts(5)
    before, expected = snapshot(model), logits_of(model, given)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    decode.prepare(model, True)()
    assert decode_calls
    assert snapshot(model) == before
    assert torch.equal(logits_of(model, given), expected)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    decode_calls.clear()
    decode.prepare(model, False)()  # weights that are given up are oneDNN's
    assert not decode_calls
    assert snapshot(model) == before


def test_a_failure_on_the_way_leaves_nothing_behind(monkeypatch):
    model = model_of()
    before, packed, made = snapshot(model), decode._Packed, []

    def failing(*weights: Any, **options: Any) -> Any:
        made.append(weights)
        if len(made) == 9:  # of the output layer, when all others have their places
            raise MemoryError
        return packed(*weights, **options)

    monkeypatch.setattr(decode, "_Packed", failing)
    with pytest.raises(MemoryError):
        decode.prepare(model, True)
    assert snapshot(model) == before


def test_weights_trained_between_rollouts_are_read_again():
    model, given = model_of("llama"), prompts(5)
    check(model, given)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1 * parameter.float().std().nan_to_num(0.1).item())
    check(model, given)


def test_any_number_of_threads_gives_the_same_bits():
    model, given, threads, runs = model_of(), prompts(21), torch.get_num_threads(), []
    restore = decode.prepare(model, True)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            runs.append(logits_of(model, given))
    finally:
        torch.set_num_threads(threads)
    restore()
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("zero_stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_training_after_rollouts_is_unchanged_bit_for_bit(accelerator, decode_calls, monkeypatch, zero_stage):
    def made(vocabulary: int) -> Any:
        torch.manual_seed(0)
        return model_of()

    monkeypatch.setattr("tests.generation.test_hybrid_engine.llama", made)
    weights = []
    for way in ("native", "none"):
        accelerator.kernels.choose("inference_weights", way)
        try:
            engine = build(accelerator, "bf16", zero_stage)
            for _ in range(2):
                decode_calls.clear()
                with generation_mode(engine) as module:
                    logits_of(module, prompts(3), "grown")
                assert decode_calls["decode"] == (STEPS + 1 if way == "native" else 0)
                trained = train(engine)
        finally:
            accelerator.kernels.choose("inference_weights", "auto")
        weights.append(trained)
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
