"""Adapters train the right weights, start without effect, and are merged and switched off exactly."""

import pytest
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForSequenceClassification,
)

from rlhf.config.schema import LoraConfig, build_config
from rlhf.errors import ConfigError, ModelError
from rlhf.models.lora import (
    adapters_for_rollout,
    add_adapters,
    find_adapted_layers,
    merged_adapters,
    should_merge,
    without_adapters,
)
from tests.families.table import EACH
from tests.helpers import llama
from tests.in_process import plain_state_dict

IDS = torch.randint(2, 60, (3, 7), generator=torch.Generator().manual_seed(0))


def gpt2():
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(vocab_size=60, bos_token_id=1, eos_token_id=1, **sizes))


MODELS = {"llama": lambda: llama(60), "gpt2, whose layers have transposed weights": gpt2}


@pytest.fixture(params=MODELS)
def plain(request):
    return MODELS[request.param]().eval()


def adapted(model, **settings):
    add_adapters(model, LoraConfig(rank=4, **settings), seed=0)
    return model


def trained(model):
    """Give the factors that begin at zero other values."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    return model


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_new_adapters_change_no_logit(plain):
    expected = logits(plain)
    assert torch.equal(logits(adapted(plain)), expected)


def test_without_adapters_is_the_untrained_model(plain):
    expected = logits(plain)
    model = trained(adapted(plain))
    assert not torch.allclose(logits(model), expected, atol=1e-2)
    with without_adapters(model):
        assert torch.equal(logits(model), expected)


def test_merged_model_is_a_plain_model(plain, tmp_path):
    names = plain.state_dict().keys()
    model = trained(adapted(plain))
    expected = logits(model)
    with merged_adapters(model):
        torch.testing.assert_close(logits(model), expected)
        assert plain_state_dict(model).keys() == names
        model.save_pretrained(tmp_path, state_dict=plain_state_dict(model))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)


@pytest.mark.parametrize("family", EACH)
def test_adapters_of_family_can_be_merged(family):
    config = family.configuration()
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    before = logits(model)
    trained(adapted(model))
    expected = logits(model)
    assert (expected - before).abs().max() > 1e-3
    with merged_adapters(model):
        torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_is_undone_bit_for_bit(plain, dtype):
    model = trained(adapted(plain)).to(dtype)
    before, parameters, output = state(model), trainable(model), logits(model)
    with merged_adapters(model):
        changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert changed and all(name.endswith("base_layer.weight") for name in changed)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert trainable(model) == parameters
    assert torch.equal(logits(model), output)


def test_merging_rounds_once():
    model = trained(adapted(llama(60), alpha=6)).to(torch.bfloat16)
    layer = model.model.layers[0].mlp.up_proj
    factors = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    expected = layer.base_layer.weight.double() + 6 / 4 * factors
    with merged_adapters(model):
        assert torch.equal(layer.base_layer.weight, expected.bfloat16())


def test_adapters_are_drawn_in_float32_from_the_seed():
    model, whole = adapted(llama(60).bfloat16()), adapted(llama(60))
    drawn = {name: tensor for name, tensor in whole.state_dict().items() if ".lora_" in name}
    assert drawn
    for name, tensor in drawn.items():
        assert model.state_dict()[name].dtype == torch.float32 and torch.equal(model.state_dict()[name], tensor)


def test_dropout_acts_on_adapters_while_training_only():
    model = trained(adapted(llama(60), dropout=0.5))
    assert not torch.equal(logits(model.train()), logits(model))
    assert torch.equal(logits(model.eval()), logits(model))


BLOCK = {f"mlp.{part}_proj" for part in ("gate", "up", "down")} | {f"self_attn.{part}_proj" for part in "qkvo"}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("auto", {f"{layer}.{path}" for layer in (0, 1) for path in BLOCK}),
        ("q_proj", {"0.self_attn.q_proj", "1.self_attn.q_proj"}),
        (["k_proj", "mlp.up_proj"], {f"{n}.{path}" for n in (0, 1) for path in ("self_attn.k_proj", "mlp.up_proj")}),
        ([r"re:model\.layers\.1\..*_proj", "q_proj"], {f"1.{path}" for path in BLOCK} | {"0.self_attn.q_proj"}),
    ],
)
def test_target_modules_select_layers(targets, expected):
    model = adapted(llama(60), target_modules=build_config({"lora": {"target_modules": targets}}).lora.target_modules)
    assert {path.removeprefix("model.layers.") for path in find_adapted_layers(model)} == expected
    assert len(trainable(model)) == 2 * len(expected) and all(".lora_" in name for name in trainable(model))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "query"], r"lora\.target_modules: .*'query'; there are down_proj, .*, v_proj$"),
        (["re:q_proj"], r"'re:q_proj' matches no full path .* is model\.layers\.0\.\S+$"),
        ([], r"lora\.target_modules: expected auto or names of layers, .* got \[\]"),
        (7, r"lora\.target_modules: expected auto or names of layers, .* got 7"),
        ("re:(", r"lora\.target_modules: .*not a regular expression \(missing \), .*\), got 're:\('"),
    ],
)
def test_unusable_target_modules_are_refused_in_one_line(targets, message):
    with pytest.raises(ConfigError, match=message) as caught:
        adapted(llama(60), target_modules=build_config({"lora": {"target_modules": targets}}).lora.target_modules)
    assert "\n" not in str(caught.value)


def test_model_without_linear_layers_is_refused():
    with pytest.raises(ModelError, match=r"lora\.rank: LlamaModel has no linear layers to adapt"):
        adapted(llama(60, num_hidden_layers=0))


@pytest.mark.parametrize(
    ("also", "expected"),
    [
        ([], {"score.weight"}),
        (["norms"], {"score.weight", "norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight"}),
        (["biases"], {"score.weight"} | {f"{part}_proj.base_layer.bias" for part in "qkvo"}),
        (["embeddings"], {"score.weight", "embed_tokens.weight"}),
    ],
)
def test_scalar_head_and_also_train_are_trained_whole(also, expected):
    model = adapted(
        LlamaForSequenceClassification(llama(60, num_labels=1, attention_bias=True).config), also_train=also
    )
    others = {name for name in trainable(model) if ".lora_" not in name}
    assert all(any(name.endswith(end) for end in expected) for name in others)
    assert all(any(name.endswith(end) for name in others) for end in expected)


def test_adapters_are_merged_for_rollouts_if_a_copy_is_small():
    model = trained(adapted(llama(60)))
    copied = 4 * sum(layer.get_base_layer().weight.numel() for layer in find_adapted_layers(model).values())
    assert copied == 4 * 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48)
    assert should_merge(model, LoraConfig(), 10 * copied) == (True, "")
    merged, reason = should_merge(model, LoraConfig(), 10 * copied - 1)
    assert not merged and "lora.merge=true" in reason
    assert should_merge(model, LoraConfig(merge=True), 1) == (True, "")
    assert should_merge(model, LoraConfig(merge=False), 2**60) == (False, "")
    expected, before = logits(model), state(model)
    for merge in (False, True):
        with adapters_for_rollout(model, LoraConfig(merge=merge), 2**60):
            changed = any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
            assert changed == merge
            torch.testing.assert_close(logits(model), expected)
