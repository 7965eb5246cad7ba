"""Adapters: what they train, that they begin as nothing, and that merging and switching them off is exact."""

import pytest
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForSequenceClassification,
)

from rlhf.config.schema import LoraConfig, ModelConfig, load_config
from rlhf.errors import ConfigError, ModelError
from rlhf.models.loading import load_causal_lm
from rlhf.models.lora import (
    adapters_for_rollout,
    add_adapters,
    find_adapted_layers,
    merged_adapters,
    should_merge,
    without_adapters,
)
from tests.families.table import FAMILIES
from tests.helpers import build_tokenizer, llama
from tests.in_process import plain_state_dict

IDS = torch.randint(2, 60, (3, 7), generator=torch.Generator().manual_seed(0))


def gpt2():
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(vocab_size=60, bos_token_id=1, eos_token_id=1, **sizes))


MODELS = {"llama": lambda: llama(60), "gpt2, whose layers hold their weights transposed": gpt2}


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


def test_new_adapters_change_no_number(plain):
    expected = logits(plain)
    assert torch.equal(logits(adapted(plain)), expected)


def test_without_its_adapters_a_trained_model_is_the_one_it_began_as(plain):
    expected = logits(plain)
    model = trained(adapted(plain))
    assert not torch.allclose(logits(model), expected, atol=1e-2)
    with without_adapters(model):
        assert torch.equal(logits(model), expected)


def test_merged_weights_compute_what_adapters_beside_them_do(plain):
    model = trained(adapted(plain))
    expected = logits(model)
    with merged_adapters(model):
        torch.testing.assert_close(logits(model), expected)


def test_a_merged_model_is_a_plain_model(plain, tmp_path):
    names = plain.state_dict().keys()
    model = trained(adapted(plain))
    with merged_adapters(model):
        assert plain_state_dict(model).keys() == names
        model.save_pretrained(tmp_path, state_dict=plain_state_dict(model))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_adapters_of_every_family_can_be_merged(family):
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


def test_adapters_train_and_nothing_else_does():
    names = trainable(adapted(llama(60)))
    assert len(names) == 2 * 2 * 7 and all(".lora_" in name for name in names)


def test_a_scalar_head_is_trained_whole():
    model = adapted(LlamaForSequenceClassification(llama(60, num_labels=1).config))
    assert {name for name in trainable(model) if ".lora_" not in name} == {"score.weight"}


def test_named_layers_are_adapted_alone():
    names = trainable(adapted(llama(60), target_modules=["q_proj", "mlp.up_proj"]))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in names} == {"q_proj", "up_proj"}


def test_layers_are_chosen_by_a_regular_expression_for_their_whole_path():
    names = trainable(adapted(llama(60), target_modules=[r"re:model\.layers\.1\..*_proj", "q_proj"]))
    found = {name.split(".lora_")[0].removeprefix("model.layers.") for name in names}
    assert found == {f"1.mlp.{part}_proj" for part in ("gate", "up", "down")} | {
        f"1.self_attn.{part}_proj" for part in "qkvo"
    } | {"0.self_attn.q_proj"}
    assert not trainable(adapted(llama(60), target_modules=[r"re:.*\.q_proj"])) ^ {
        f"model.layers.{layer}.self_attn.q_proj.lora_{factor}.default.weight" for layer in (0, 1) for factor in "AB"
    }


def test_an_expression_that_matches_part_of_paths_alone_is_answered_with_a_path():
    with pytest.raises(ConfigError, match=r"'re:q_proj' matches no full path .* is model\.layers\.0\.\S+$"):
        adapted(llama(60), target_modules=["re:q_proj"])


@pytest.mark.parametrize(
    ("also", "trained"),
    [
        (["norms"], {"norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight"}),
        (["biases"], {f"{part}_proj.base_layer.bias" for part in "qkvo"}),
        (["embeddings"], {"embed_tokens.weight"}),
    ],
)
def test_other_weights_are_trained_too_on_request(also, trained):
    names = trainable(adapted(llama(60, attention_bias=True), also_train=also))
    others = {name for name in names if ".lora_" not in name}
    assert others and all(any(name.endswith(end) for end in trained) for name in others)
    assert all(any(name.endswith(end) for name in others) for end in trained)


def test_adapters_are_drawn_in_float32_whatever_the_weights_are():
    model, whole = adapted(llama(60).bfloat16()), adapted(llama(60))
    drawn = {name: tensor for name, tensor in whole.state_dict().items() if ".lora_" in name}
    assert drawn
    for name, tensor in drawn.items():
        assert model.state_dict()[name].dtype == torch.float32 and torch.equal(model.state_dict()[name], tensor)


def test_adapters_are_merged_for_rollouts_where_a_copy_of_what_they_adapt_is_small():
    model = adapted(llama(60))
    copied = 4 * sum(layer.get_base_layer().weight.numel() for layer in find_adapted_layers(model).values())
    assert copied == 4 * 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48)
    assert should_merge(model, LoraConfig(), 10 * copied) == (True, "")
    merged, why = should_merge(model, LoraConfig(), 10 * copied - 1)
    assert not merged and "lora.merge=true" in why
    assert should_merge(model, LoraConfig(merge=True), 1) == (True, "")
    assert should_merge(model, LoraConfig(merge=False), 2**60) == (False, "")


def test_adapters_that_are_not_merged_run_beside_the_weights():
    model = trained(adapted(llama(60)))
    expected, before = logits(model), state(model)
    with adapters_for_rollout(model, LoraConfig(merge=False), 2**60):
        assert torch.equal(logits(model), expected)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with adapters_for_rollout(model, LoraConfig(merge=True), 1):
        assert any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_adapters_follow_the_seed():
    def drawn(seed):
        model = llama(60)
        add_adapters(model, LoraConfig(rank=4), seed=seed)
        return model.state_dict()["model.layers.1.mlp.up_proj.lora_A.default.weight"]

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))


def test_new_rows_of_a_frozen_embedding_are_the_same_at_each_loading(model_folder):
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<new>"])

    def loaded():
        model = load_causal_lm(ModelConfig(path=str(model_folder)), tokenizer, attention="sdpa")
        return model.get_input_embeddings().weight

    first, state = loaded(), torch.get_rng_state()
    assert torch.equal(loaded(), first) and torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert torch.equal(loaded(), first)


def test_dropout_acts_on_adapters_while_training_only():
    model = trained(adapted(llama(60), dropout=0.5))
    assert not torch.equal(logits(model.train()), logits(model))
    assert torch.equal(logits(model.eval()), logits(model))


def test_an_unknown_layer_is_answered_with_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"lora\.target_modules: .*'query'; there are down_proj, .*, v_proj$"
    ) as caught:
        adapted(llama(60), target_modules=["q_proj", "query"])
    assert "\n" not in str(caught.value)


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ModelError, match=r"lora\.rank: LlamaModel has no linear layers to adapt"):
        adapted(llama(60, num_hidden_layers=0))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lora.rank=-1", "expected a number of at least 0, got -1"),
        ("lora.alpha=0", "expected a number above 0, got 0"),
        ("lora.dropout=1", "expected a number below 1, got 1"),
        ("lora.target_modules=[]", r"expected auto or names of layers, .* got \[\]"),
        ("lora.target_modules=7", "expected auto or names of layers, .* got 7"),
        (
            "lora.target_modules=re:(",
            r"not a regular expression \(missing \), .*\), got 're:\('",
        ),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(None, [override])
    assert "\n" not in str(caught.value)


def test_one_layer_may_be_named_without_a_list():
    assert load_config(None, ["lora.target_modules=q_proj"]).lora.target_modules == ("q_proj",)
    assert load_config(None, ["lora.target_modules=auto"]).lora.target_modules == "auto"
