"""What decode.c does not compute is left to the layers, with the reason, and its logits are as before."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AttentionInterface, FalconConfig, FalconForCausalLM, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from accelerators.backends.cpu.kernels import decode, families, invariant
from rlhf.generation.kv_cache import WindowedStaticCache
from rlhf.models.lora import merged_adapters
from rlhf.models.transformers_patches import cache_argument
from tests.accelerators.decoding import STEPS, check, logits_of, model_of, off, prompts, truth

pytestmark = pytest.mark.skipif(not decode.supported(None), reason=decode.supported(None).reason)


@pytest.fixture(autouse=True)
def fresh(any_processor) -> None:
    torch.manual_seed(0)
    decode._report.cache_clear()


def slower(reason: str, model: str = "LlamaForCausalLM") -> str:
    return f"{model}: rollouts take longer, since decoder layers are not computed in C: {reason}"


@torch.no_grad()
def test_weights_are_read_by_nobody_who_computes_otherwise(decode_calls):
    """Gradients, autocast and many tokens: the model's own operators, to the bit."""
    model, (ids, mask) = model_of(), prompts(4)
    many = ids.repeat(9, 1)  # 612 tokens

    def results() -> list[Tensor]:
        with torch.enable_grad():
            model(ids).logits.float().logsumexp(-1).sum().backward()
            tensors = [model.model.layers[0].self_attn.q_proj.weight.grad.clone()]
            cache = StaticCache(config=model.config, max_cache_len=20)
            model(ids, **{cache_argument(model): cache})
            tensors.append(model(ids[:, :1], **{cache_argument(model): cache}).logits)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            tensors.append(logits_of(model, (ids, mask)))
        tensors.append(model(many).logits)
        return tensors

    expected = results()
    restore = decode.prepare(model, True)
    decode_calls.clear()
    assert all(torch.equal(actual, other) for actual, other in zip(results(), expected))
    assert not decode_calls
    restore()


@torch.no_grad()
def test_token_without_a_cache_is_left_to_the_layers(decode_calls):
    model, (ids, _) = model_of(), prompts(5)
    plain, exact = model(ids[:, :1], use_cache=False).logits, truth(model)(ids[:, :1], use_cache=False).logits
    restore = decode.prepare(model, True)
    logits = model(ids[:, :1], use_cache=False).logits
    restore()
    assert off(logits, exact) <= 1.1 * off(plain, exact)
    assert decode_calls["linear"] and not decode_calls["decode"]


def test_cache_of_another_dtype_is_left_to_the_layers_and_named(decode_calls, monkeypatch, caplog):
    model, given = model_of(), prompts(5)
    plain = logits_of(model, given)
    buffers = [torch.zeros(5, 1, 20, 32) for _ in range(4)]  # in float32
    monkeypatch.setattr(WindowedStaticCache, "decode_buffers", lambda *_: (buffers, 0))
    restore = decode.prepare(model, True)
    logits = logits_of(model, given)
    restore()
    assert off(logits, plain) < 0.1 and not decode_calls["decode"]
    assert slower("its cache is of an unknown form", "LlamaDecoderLayer") in caplog.text


@torch.no_grad()
def test_hooks_of_layers_receive_their_outputs(decode_calls):
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
    assert not decode_calls["decode"]
    logits_of(model, given)
    assert decode_calls["decode"] == STEPS + 1
    restore()
    assert len(actual) == 2 * (STEPS + 1)
    assert all(off(output.double(), plain.double()) < 0.05 for output, plain in zip(actual, expected))


class OneColumn:
    """A cache of the token at hand alone."""

    def __init__(self) -> None:
        self.buffers = list(torch.zeros(2, 3, 2, 1, 32, dtype=torch.bfloat16))

    def decode_buffers(self, *of_new: Any) -> tuple[list[Tensor], int]:
        return self.buffers, 0

    def update(self, keys: Tensor, values: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
        return keys, values


@torch.no_grad()
def test_other_positions_and_masks_are_left_to_the_layers(decode_calls):
    layer = model_of().model.layers[0]
    hidden, added = torch.randn(3, 1, 96, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)
    kinds = [(32, None, 1), (32, added, 1), (32, added.expand(3, -1, -1, -1), 1)]  # one angle, one mask for all rows
    kinds += [(1, None, 0), (32, added.expand(3, 6, -1, -1), 0), (32, added == 0, 1)]
    for width, mask, called in kinds:
        positions = tuple(angle.expand(1, 1, width) for angle in torch.tensor([[[0.6]], [[0.8]]]).bfloat16().split(1))
        named = {cache_argument(layer): OneColumn(), "position_embeddings": positions, "attention_mask": mask}
        expected = layer(hidden, **named)
        restore = decode.prepare(layer, True)
        decode_calls.clear()
        output = layer(hidden, **named)
        restore()
        assert decode_calls["decode"] == called
        torch.testing.assert_close(output, expected, rtol=0, atol=2**-6 * expected.abs().max().item())


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda buffers: buffers[:1],
        lambda buffers: [buffer.float() for buffer in buffers],
        lambda buffers: [buffer[:2] for buffer in buffers],
        lambda buffers: [buffers[0], buffers[1].repeat(1, 1, 2, 1)],
        lambda buffers: [
            buffer.transpose(2, 3).contiguous().transpose(2, 3).expand(-1, -1, 4, -1) for buffer in buffers
        ],
        lambda buffers: None,
    ],
)
def test_caches_that_cannot_be_written_to_are_left_to_the_layers(decode_calls, change):
    layer, cache = model_of().model.layers[0], OneColumn()
    positions = tuple(torch.full((3, 1, 32), angle, dtype=torch.bfloat16) for angle in (0.6, 0.8))
    named = {cache_argument(layer): cache, "position_embeddings": positions}
    hidden = torch.randn(3, 1, 96, dtype=torch.bfloat16)
    expected = layer(hidden, **named)
    buffers = change(cache.buffers)
    cache.decode_buffers = lambda *of_new: buffers and (buffers, 0)
    restore = decode.prepare(layer, True)
    decode_calls.clear()
    output = layer(hidden, **named)
    restore()
    assert not decode_calls["decode"]
    torch.testing.assert_close(output, expected, rtol=0, atol=2**-6 * expected.abs().max().item())


@torch.no_grad()
def test_layer_without_positions_fails_as_before(decode_calls):
    """decode.c would compute it without rotations."""
    layer, hidden = model_of().model.layers[0], torch.randn(3, 1, 96, dtype=torch.bfloat16)
    restore = decode.prepare(layer, True)
    decode_calls.clear()
    with pytest.raises(TypeError):
        layer(hidden, **{cache_argument(layer): OneColumn()})
    restore()
    assert not decode_calls["decode"]


def listened(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, inputs, output: output * 2)
    model.model.layers[1].self_attn.register_forward_pre_hook(lambda module, inputs: None)


def observed(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, inputs, output: None)


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


def other_attention(model: Any) -> None:
    AttentionInterface.register("theirs", ALL_ATTENTION_FUNCTIONS["sdpa"])
    AttentionMaskInterface.register("theirs", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("theirs")


def both_directions(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


OBSTACLES: dict[str, tuple[dict[str, Any], Any, str]] = {
    "attention": ({}, other_attention, "attention is theirs"),
    "activation": ({"hidden_act": "tanh"}, None, "its activation is tanh"),
    "needs": ({"family": "opt", "do_layer_norm_before": False}, None, "its do_layer_norm_before is False"),
    "direction": ({}, both_directions, "its attention looks at later tokens"),
    "hook": ({}, listened, "a layer or a part of it has hooks"),
    "hook of a layer": ({}, observed, "a layer or a part of it has hooks"),
    "adapters": ({}, adapted, "it has a Linear of another library or class"),
    "mlp": ({}, other_mlp, "it has a MLP of another library or class"),
    "forward": ({}, another_forward, "its LlamaMLP has another forward pass"),
    "width": ({"intermediate_size": 276}, None, "a size is no multiple of"),
    "heads": ({"head_dim": 4}, None, "a size is no multiple of"),
    "order": ({}, turned, "they are not the layers of one model in order"),
    "fewer": ({}, shortened, "the model skips some of them"),
    "bias of some": ({}, unbiased_keys, "some parts of a product have a bias and others have none"),
    "norm": ({}, other_norm, "it has a Norm of another library or class"),
    "groups": ({}, fewer_key_heads, "their heads differ"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_layers_that_are_others_are_computed_as_before(name, decode_calls, caplog):
    changes, change, reason = OBSTACLES[name]
    model = model_of(**changes)
    if change:
        model = change(model) or model
    check(model, prompts(5))
    assert slower(reason, type(model).__name__) in caplog.text
    assert not decode_calls  # the output layer too: those who compute all of it pack it


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_layers_whose_adapters_are_merged_are_computed(family, decode_calls):
    """peft's layers then compute the layers below them."""
    model = model_of(family)
    targets = {"llama": ["q_proj", "down_proj", "lm_head"], "gpt2": ["c_attn", "c_proj"]}[family]
    adapted_model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    with merged_adapters(adapted_model.bfloat16().eval()):
        check(adapted_model.base_model.model, prompts(5))
    assert decode_calls["decode"] and decode_calls["linear"]


def test_output_layer_of_odd_size_is_not_packed(decode_calls):
    check(model_of(vocab_size=309), prompts(5))
    assert decode_calls["decode"]


def test_model_in_other_numbers_is_computed_as_before(decode_calls, caplog):
    model, given = model_of().half(), prompts(3)
    exact = logits_of(truth(model), given)
    restore = decode.prepare(model, True)
    assert off(logits_of(model, given), exact) < 0.01
    restore()
    assert slower("a layer is in torch.float16 on cpu") in caplog.text
    assert not decode_calls


def test_slower_rollouts_are_said_once_for_each_reason(caplog):
    unknown = FalconForCausalLM(FalconConfig(hidden_size=32, num_attention_heads=1, num_hidden_layers=1, vocab_size=32))
    for model in (unknown, model_of(), model_of().half(), model_of(head_dim=4)):
        decode.prepare(model, False)()  # for scoring, layers remain as they are
        for _ in range(2):
            decode.prepare(model, True)()
    assert caplog.messages == [
        slower("`rlhf accelerators explain cpu` does not list its architecture", "FalconForCausalLM"),
        slower("a layer is in torch.float16 on cpu"),
        slower(f"a size is no multiple of {decode._numbers_at_once(torch.bfloat16)}"),
    ]


def test_numbers_of_several_dtypes_are_an_obstacle():
    model = model_of()
    assert not isinstance(decode._read_all(*families.find_layers(model)), str)
    model.model.layers[1].input_layernorm.float()
    assert decode._read_all(*families.find_layers(model)) == "its numbers are of several dtypes"


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_standard_attention_is_computed(implementation, decode_calls):
    model = model_of()
    model.set_attn_implementation(implementation)
    check(model, prompts(5))
    assert decode_calls["decode"]


def test_numbers_that_must_not_depend_on_the_batch_are_not_computed_here(decode_calls):
    model = model_of(dtype=torch.float32)
    restore = decode.prepare(model, True)
    decode_calls.clear()
    with invariant.batch_invariant():
        logits_of(model, prompts(5))
    restore()
    assert not decode_calls
