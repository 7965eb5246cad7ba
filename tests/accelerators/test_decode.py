"""Decoder layers in C: as near to float32 as plain bf16 is, whatever the sizes and the cache; nothing left after."""

from __future__ import annotations

import copy
from collections import Counter
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, StaticCache

from accelerators.backends.cpu import attention as cpu_attention
from accelerators.backends.cpu.kernels import compiler, decode
from rlhf.generation.hybrid_engine import generation_mode
from rlhf.generation.kv_cache import WindowedStaticCache
from tests.accelerators.test_packed import snapshot
from tests.generation.test_hybrid_engine import build, train

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},  # of the output's projection too
    "mistral": {"tie_word_embeddings": True},
    "qwen2": {},  # biases of q, k and v
    "qwen3": {"attention_bias": True},  # norms of q and k
}
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 288,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 0.01,  # as large as the squares
    "vocab_size": 304,  # 19 panels: the last block has one
}
PROMPT, STEPS = 12, 5
"""Columns of the prompts, and tokens that are decoded one at a time: 17, 18, ... columns in caches that grow."""

pytestmark = pytest.mark.skipif(not decode.supported(None), reason=decode.supported(None).reason)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    """How often each function of decode.c was called."""
    found: Counter[str] = Counter()
    functions = decode._functions()

    def counted(name: str) -> Any:
        def call(*arguments: Any) -> Any:
            found[name] += 1
            return getattr(functions, name)(*arguments)

        return call

    counting = SimpleNamespace(**{name: counted(name) for name in ("pack", "linear", "decode")})
    counting.amx, counting.omp_get_max_threads = functions.amx, functions.omp_get_max_threads
    monkeypatch.setattr(decode, "_functions", lambda: counting)
    return found


def model_of(family: str = "llama", **changes: Any) -> Any:
    """In bf16, with weights so large that attention looks at few tokens, and no bias or norm of zeros or ones."""
    cpu_attention.composed(None)
    config = CONFIG_MAPPING[family](**{**SIZES, **FAMILIES[family], "pad_token_id": 0, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=cpu_attention.ATTENTION).bfloat16().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.mul_(4)
    return model


def truth(model: Any) -> Any:
    """The same weights in float32, with transformers' own attention."""
    exact = copy.deepcopy(model).float()
    exact.set_attn_implementation("eager")
    return exact


def prompts(rows: int, columns: int = PROMPT) -> tuple[Tensor, Tensor]:
    """Tokens [rows, columns + STEPS] and the mask of the prompts; every other row is padded left."""
    ids, mask = torch.randint(3, 304, (rows, columns + STEPS)), torch.ones(rows, columns, dtype=torch.long)
    mask[::2, : columns // 2] = 0
    return ids, mask


class Viewed:
    """Rlhf's: parts of longer buffers, of which the last row leaves on the way; or buffers that grow by fours."""

    def __init__(self, config: Any, length: int, grows: bool) -> None:
        self.cache, self.grows = WindowedStaticCache(config, 3 * length, grows=grows), grows

    def show(self, rows: int, first: int, tokens: int) -> None:
        columns = -(-(first + tokens) // 4) * 4
        self.cache.show(rows, columns, torch.arange(first, first + tokens), first)


@torch.no_grad()
def logits_of(model: Any, given: tuple[Tensor, Tensor], kind: str = "viewed", leaves: bool = False) -> Tensor:
    """[STEPS + 1, rows, vocabulary] in float64: of the prompts, then of a token at a time.

    `leaves`: the last row is there for the prompts and the first token alone.
    """
    ids, mask = given
    columns, rows = mask.shape[1], len(ids)
    view = Viewed(model.config, columns + STEPS + 3, kind == "grown")
    positions, found = (mask.cumsum(1) - 1).clamp(min=0), []
    for first, last in [(0, columns), *((column, column + 1) for column in range(columns, columns + STEPS))]:
        if leaves and first > columns:
            rows = len(ids) - 1
        if first:
            mask = torch.cat([mask, mask.any(1, keepdim=True).long()], 1)
            positions = positions[:, -1:] + 1
        view.show(rows, first, last - first)
        logits = model(
            input_ids=ids[:rows, first:last],
            attention_mask=mask[:rows],
            position_ids=positions[:rows],
            past_key_values=view.cache,
            use_cache=True,
        ).logits[:, -1]
        found.append(torch.cat([logits, logits.new_zeros(len(ids) - rows, logits.shape[1])]))
    return torch.stack(found).double()


def off(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).pow(2).mean() / exact.pow(2).mean()).sqrt().item()


def check(model: Any, given: tuple[Tensor, Tensor], kind: str = "viewed") -> None:
    """Logits of the prepared model are as near to float32 as those of the model are; they were a bit nearer."""
    exact, plain = logits_of(truth(model), given), logits_of(model, given)
    restore = decode.prepare(model, True)
    found = logits_of(model, given, kind)
    restore()
    error, usual = off(found, exact), off(plain, exact)
    assert 1e-4 < usual < 0.05
    assert error <= 1.1 * usual, f"{error:.4f} of the logits, plain bf16 {usual:.4f}"


# against float32


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_as_near_to_float32_as_those_of_plain_bf16(family, calls):
    model = model_of(family)
    for number, rows in enumerate((1, 16, 40), 1):
        check(model, prompts(rows))
        assert calls["decode"] == STEPS * number  # both layers
        assert calls["linear"] >= (STEPS + 1) * number  # the output layer, and all of the prompts


@pytest.mark.parametrize(("size", "groups"), [(32, 1), (64, 6), (96, 2), (128, 1)])
def test_heads_of_any_size_and_number_of_groups(size, groups):
    check(model_of("qwen3", head_dim=size, num_key_value_heads=groups, num_hidden_layers=1), prompts(3))


@pytest.mark.parametrize(("inner", "hidden"), [(32, 96), (96, 288), (352, 192)])
def test_layers_narrower_or_wider_than_their_heads(inner, hidden):
    check(model_of(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=1), prompts(18))


@pytest.mark.parametrize("kind", ["viewed", "grown"])
def test_decoding_into_parts_of_buffers_or_growing_ones(kind, calls):
    check(model_of(), prompts(5), kind)
    assert calls["decode"] == STEPS
    assert calls["linear"]


@pytest.mark.parametrize("columns", [3, 11, 297])
def test_columns_of_any_number(columns):
    check(model_of(max_position_embeddings=512), prompts(3, columns), "grown")


@pytest.mark.parametrize("kind", ["viewed", "grown"])
def test_rows_that_leave_change_nothing_for_the_others(kind):
    model, given = model_of(), prompts(5)
    restore = decode.prepare(model, True)
    left, stayed = logits_of(model, given, kind, leaves=True), logits_of(model, given, kind)
    restore()
    assert torch.equal(left[:, :-1], stayed[:, :-1])
    assert not left[2:, -1].any()


def test_a_row_that_sees_nothing_gets_the_mean_as_before():
    model, (ids, mask) = model_of(), prompts(5)
    mask[1] = 0
    check(model, (ids, mask))
    restore = decode.prepare(model, True)
    found = logits_of(model, (ids, mask))
    restore()
    assert found.isfinite().all()
    assert off(found[:, 1], logits_of(truth(model), (ids, mask))[:, 1]) < 0.05


@pytest.mark.parametrize("rows", [1, 5, 13, 16, 40])
@torch.no_grad()
def test_products_are_those_of_float64_rounded_once(rows):
    for outputs in (16, 32, 48, 112):  # whole groups of panels, and others
        layer = nn.Linear(96, outputs, dtype=torch.bfloat16)
        inputs = torch.randn(rows, 192, dtype=torch.bfloat16)[:, ::2]
        found = decode._Linear(layer, decode._packed(layer))(inputs)
        exact = inputs.double() @ layer.weight.double().T + layer.bias.double()
        assert found.dtype == torch.bfloat16
        assert ((found - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


@torch.no_grad()
def test_products_without_amx_are_as_near(monkeypatch):
    """On a processor that has it, the same source is compiled for one that has not."""
    known = decode._functions()
    if not known.amx():
        pytest.skip("this processor has no AMX: all tests are without")
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-mno-amx-bf16"))
    functions = compiler.compiled.__wrapped__("decode.c")
    for name in ("pack", "linear", "decode"):
        getattr(functions, name).argtypes = getattr(known, name).argtypes
    assert not functions.amx()
    monkeypatch.setattr(decode, "_functions", lambda: functions)
    for rows in (1, 9, 40):
        check(model_of("qwen2"), prompts(rows))


# what is left to others


@torch.no_grad()
def test_weights_are_read_by_nobody_who_computes_otherwise(calls):
    """Gradients, autocast and many tokens: the model's own operators, to the bit."""
    model, (ids, mask) = model_of(), prompts(4)
    many = ids.repeat(9, 1)  # 612 tokens

    def results() -> list[Tensor]:
        with torch.enable_grad():
            model(ids).logits.float().logsumexp(-1).sum().backward()
            found = [model.model.layers[0].self_attn.q_proj.weight.grad.clone()]
            cache = StaticCache(config=model.config, max_cache_len=20)
            model(ids, past_key_values=cache)
            found.append(model(ids[:, :1], past_key_values=cache).logits)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            found.append(logits_of(model, (ids, mask)))
        found.append(model(many).logits)
        return found

    expected = results()
    restore = decode.prepare(model, True)
    calls.clear()
    assert all(torch.equal(one, other) for one, other in zip(results(), expected))
    assert not calls
    restore()


@torch.no_grad()
def test_token_without_a_cache_is_left_to_the_layers(calls):
    model, (ids, _) = model_of(), prompts(5)
    plain, exact = model(ids[:, :1], use_cache=False).logits, truth(model)(ids[:, :1], use_cache=False).logits
    restore = decode.prepare(model, True)
    logits = model(ids[:, :1], use_cache=False).logits
    restore()
    assert off(logits, exact) <= 1.1 * off(plain, exact)
    assert calls["linear"] and not calls["decode"]


@torch.no_grad()
def test_hooks_of_layers_receive_their_outputs(calls):
    model, given = model_of(), prompts(5)

    def outputs() -> list[Tensor]:
        results: list[Tensor] = []
        hooks = [layer.register_forward_hook(lambda *call: results.append(call[2])) for layer in model.model.layers]
        logits_of(model, given)
        for hook in hooks:
            hook.remove()
        return results

    expected = outputs()
    restore = decode.prepare(model, True)
    actual = outputs()
    assert not calls["decode"]
    logits_of(model, given)
    assert calls["decode"] == STEPS
    restore()
    assert len(actual) == 2 * (STEPS + 1)
    assert all(off(output.double(), plain.double()) < 0.05 for output, plain in zip(actual, expected))


class OneColumn:
    """A cache of the token at hand alone."""

    def __init__(self) -> None:
        self.kept = list(torch.zeros(2, 3, 2, 1, 32, dtype=torch.bfloat16))

    def decode_buffers(self) -> tuple[list[Tensor], int]:
        return self.kept, 0

    def update(self, keys: Tensor, values: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        return keys, values


@torch.no_grad()
def test_other_positions_and_masks_are_left_to_the_layers(calls):
    layer = model_of().model.layers[0]
    hidden, added = torch.randn(3, 1, 96, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)
    kinds = [(32, None, 1), (32, added, 1), (32, added.expand(3, -1, -1, -1), 1)]  # one angle, one mask for all rows
    kinds += [(1, None, 0), (32, added.expand(3, 6, -1, -1), 0), (32, added == 0, 0)]
    for width, mask, called in kinds:
        positions = tuple(each.expand(1, 1, width) for each in torch.tensor([[[0.6]], [[0.8]]]).bfloat16().split(1))
        named = {"past_key_values": OneColumn(), "position_embeddings": positions, "attention_mask": mask}
        expected = layer(hidden, **named)
        restore = decode.prepare(layer, True)
        calls.clear()
        found = layer(hidden, **named)
        restore()
        assert calls["decode"] == called
        torch.testing.assert_close(found, expected, rtol=0, atol=2**-6 * expected.abs().max().item())


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda kept: kept[:1],
        lambda kept: [each.float() for each in kept],
        lambda kept: [each[:2] for each in kept],
        lambda kept: [kept[0], kept[1].repeat(1, 1, 2, 1)],
        lambda kept: [each.transpose(2, 3).contiguous().transpose(2, 3).expand(-1, -1, 4, -1) for each in kept],
        lambda kept: None,
    ],
)
def test_caches_that_cannot_be_written_to_are_left_to_the_layers(calls, change):
    layer, cache = model_of().model.layers[0], OneColumn()
    positions = tuple(torch.full((3, 1, 32), each, dtype=torch.bfloat16) for each in (0.6, 0.8))
    named = {"past_key_values": cache, "position_embeddings": positions}
    hidden = torch.randn(3, 1, 96, dtype=torch.bfloat16)
    expected = layer(hidden, **named)
    kept = change(cache.kept)
    cache.decode_buffers = lambda: kept and (kept, 0)
    restore = decode.prepare(layer, True)
    calls.clear()
    found = layer(hidden, **named)
    restore()
    assert not calls["decode"]
    torch.testing.assert_close(found, expected, rtol=0, atol=2**-6 * expected.abs().max().item())


def listened(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, inputs, output: output * 2)
    model.model.layers[1].self_attn.register_forward_pre_hook(lambda module, inputs: None)


def another_forward(model: Any) -> None:
    for layer in model.model.layers:
        plain = type(layer.mlp).forward
        layer.mlp.forward = MethodType(lambda mlp, hidden, plain=plain: plain(mlp, hidden) * 2, layer.mlp)


def other_mlp(model: Any) -> None:
    class MLP(type(model.model.layers[0].mlp)):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) * 2

    for layer in model.model.layers:
        layer.mlp.__class__ = MLP


def adapted(model: Any) -> Any:
    made = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    return made.bfloat16().eval().base_model.model


def turned(model: Any) -> None:
    """The layers in another order, each with its own place in the cache."""
    model.model.layers = nn.ModuleList(reversed(model.model.layers))


def shortened(model: Any) -> None:
    model.config.num_hidden_layers = 1


def other_norm(model: Any) -> None:
    class Norm(type(model.model.norm)):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) + 1

    for layer in model.model.layers:
        layer.input_layernorm.__class__ = Norm


def unbiased_keys(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias = None


def fewer_key_heads(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.num_key_value_groups *= 2  # from 2 heads of keys to 1
    for name in ("k_proj", "v_proj"):
        layer = getattr(attention, name)
        setattr(attention, name, nn.Linear(layer.in_features, layer.out_features // 2, dtype=torch.bfloat16))


def windowed(model: Any) -> None:
    model.model.layers[1].self_attn.sliding_window = 4096


OBSTACLES: dict[str, tuple[dict[str, Any], Any, str]] = {
    "attention": ({}, lambda model: model.set_attn_implementation("sdpa"), "attention is sdpa, not cpu_composed"),
    "gate": ({"hidden_act": "gelu"}, None, "its gate is gelu, not silu"),
    "hook": ({}, listened, "its parts have hooks"),
    "bias of the mlp": ({"mlp_bias": True}, None, "a layer has a bias that its family does not have"),
    "adapters": ({}, adapted, "a Linear has its own product"),
    "mlp": ({}, other_mlp, "a part is not that of its family"),
    "forward": ({}, another_forward, "a part is not that of its family"),
    "width": ({"intermediate_size": 272}, None, "a size is no multiple of"),
    "heads": ({"head_dim": 16}, None, "a size is no multiple of 32"),
    "order": ({}, turned, "they are not the layers of one model in order"),
    "fewer": ({}, shortened, "the model skips some of them"),
    "bias of some": ({}, unbiased_keys, "a layer has a bias that its family does not have"),
    "norm": ({}, other_norm, "its norms are not those of its family in bf16"),
    "groups": ({}, fewer_key_heads, "their heads differ"),
    "windows": ({}, windowed, "their attention windows differ"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_layers_that_are_others_are_computed_as_before(name, calls, caplog):
    changes, change, reason = OBSTACLES[name]
    model = model_of(**changes)
    if change:
        model = change(model) or model
    with caplog.at_level("DEBUG", "accelerators.backends.cpu.kernels.decode"):
        check(model, prompts(5))
    assert f"2 layers are not computed by decode.c: {reason}" in caplog.text
    assert not calls  # the output layer too: those who compute all of it pack it


def test_output_layer_of_odd_size_is_not_packed(calls):
    check(model_of(vocab_size=309), prompts(5))
    assert calls["decode"]


def test_float32_model_is_computed_as_before(calls, caplog):
    model, given = model_of().float(), prompts(3)
    exact = logits_of(truth(model), given)
    with caplog.at_level("DEBUG", "accelerators.backends.cpu.kernels.decode"):
        restore = decode.prepare(model, True)
    assert off(logits_of(model, given), exact) < 1e-5
    restore()
    assert "2 layers are not computed by decode.c: its numbers are float32" in caplog.text
    assert not calls


# before and after


def test_a_model_is_afterwards_what_it_was(calls):
    model, given = model_of("qwen3"), prompts(5)
    before, expected = snapshot(model), logits_of(model, given)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    decode.prepare(model, True)()
    assert calls
    assert snapshot(model) == before
    assert torch.equal(logits_of(model, given), expected)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    calls.clear()
    decode.prepare(model, False)()  # weights that are given up are oneDNN's
    assert not calls
    assert snapshot(model) == before


def test_a_failure_on_the_way_leaves_nothing_behind(monkeypatch):
    model = model_of()
    before, packed, made = snapshot(model), decode._packed, []

    def failing(*linears: nn.Linear) -> Tensor:
        made.append(linears)
        if len(made) == 11:  # of the output layer, when all others have their places
            raise MemoryError
        return packed(*linears)

    monkeypatch.setattr(decode, "_packed", failing)
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
    model, given, threads, found = model_of(), prompts(21), torch.get_num_threads(), []
    restore = decode.prepare(model, True)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(logits_of(model, given))
    finally:
        torch.set_num_threads(threads)
    restore()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("zero_stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_training_after_rollouts_is_unchanged_bit_for_bit(accelerator, calls, monkeypatch, zero_stage):
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
                calls.clear()
                with generation_mode(engine) as module:
                    logits_of(module, prompts(3), "grown")
                assert calls["decode"] == (STEPS if way == "native" else 0)
                trained = train(engine)
        finally:
            accelerator.kernels.choose("inference_weights", "auto")
        weights.append(trained)
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
