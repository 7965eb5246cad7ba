"""One rate for all that a family drops in training: 0 computes what evaluation does, others are counted by hand."""

from __future__ import annotations

import json

import pytest
import torch

from rlhf.config.schema import LoraConfig
from rlhf.errors import ConfigError
from rlhf.models.dropout import check_dropout, set_dropout
from rlhf.models.forward import ScalarHead
from rlhf.models.lora import add_adapters
from tests.helpers import llama, weights
from tests.in_process import given, stage_context

SIZES = {
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "word_embed_proj_dim": 32, "intermediate_size": 48, "ffn_dim": 48,
    "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "num_attention_heads": 4, "n_head": 4, "attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 60, "max_position_embeddings": 64, "n_positions": 64,
    "num_local_experts": 2, "rotary_dim": 4, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
IDS = torch.randint(2, 60, (2, 12), generator=torch.Generator().manual_seed(0))
FAMILIES = ("llama", "gpt2", "opt", "gpt_neox", "mixtral", "phi", "phi3", "falcon", "bloom", "codegen", "biogpt")
RARER = ("persimmon", "starcoder2", "gptj", "cohere2")
slow = pytest.mark.slow


def build(family, rate=0.5, attention="sdpa", **changes):
    """A tiny model that drops `rate` of whatever it can drop."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known = AutoConfig.for_model(family).to_dict()
    rates = {name: rate for name, value in known.items() if "drop" in name and isinstance(value, int | float)}
    torch.manual_seed(0)
    values = {name: SIZES[name] for name in SIZES.keys() & known.keys()} | rates | changes
    config = AutoConfig.for_model(family, **values)
    if not AutoModelForCausalLM._model_mapping[type(config)]._supports_sdpa:
        attention = "eager"
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention), rates


def logits(model, *, training):
    with torch.no_grad():
        return model.train(training)(input_ids=IDS).logits


@pytest.fixture
def dropped(monkeypatch):
    """A list of (rate, inputs that are not 0, zeros of the output among them), one for each time that dropout acts."""
    drops = []
    dropout = torch.nn.functional.dropout

    def count(input, p=0.5, training=True, inplace=False):
        output = dropout(input, p, training, inplace)
        if training and p:
            inputs = input != 0
            remaining = inputs & (output != 0)
            torch.testing.assert_close(output[remaining], input[remaining] / (1 - p))
            drops.append((p, int(inputs.sum()), int((inputs & (output == 0)).sum())))
        return output

    monkeypatch.setattr(torch.nn.functional, "dropout", count)
    return drops


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(family, marks=slow) for family in RARER)])
def test_rate_0_trains_as_evaluation_computes(family):
    model, rates = build(family)
    expected = logits(model, training=False)
    assert not torch.equal(logits(model, training=True), expected)
    set_dropout(model, 0)
    assert torch.equal(logits(model, training=True), expected)
    assert {name: getattr(model.config, name) for name in rates} == rates, "the configuration is saved with the model"


@pytest.mark.parametrize(
    ("family", "start"),
    [
        *((family, 0.5) for family in FAMILIES),
        *(pytest.param(family, 0.5, marks=slow) for family in RARER),
        *(("llama", 0.0), ("opt", 0.0)),
        *(pytest.param(family, 0.0, marks=slow) for family in (*FAMILIES, *RARER) if family not in ("llama", "opt")),
    ],
)
def test_rate_acts_in_every_layer_in_training_only(dropped, family, start):
    model, rates = build(family, start, attention="eager")
    expected = logits(model, training=False)
    set_dropout(model, 0.25)
    for _ in range(8):
        logits(model, training=True)
    assert {rate for rate, _, _ in dropped} == {0.25}
    inputs, zeros = sum(count for _, count, _ in dropped), sum(count for _, _, count in dropped)
    assert inputs > 1000 and abs(zeros / inputs - 0.25) < 4 * (0.25 * 0.75 / inputs) ** 0.5, "of a binomial count"
    dropped.clear()
    assert torch.equal(logits(model, training=False), expected) and not dropped
    assert {name: getattr(model.config, name) for name in rates} == rates, "the configuration is saved with the model"


def test_sdpa_drops_at_the_rate(monkeypatch):
    model, _ = build("llama", 0.0)
    attend, rates = torch.nn.functional.scaled_dot_product_attention, []

    def note(*tensors, dropout_p=0.0, **options):
        rates.append(dropout_p)
        return attend(*tensors, dropout_p=dropout_p, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", note)
    set_dropout(model, 0.25)
    logits(model, training=True)
    assert rates == [0.25] * 2


def test_layerdrop_is_switched_off_by_rate_0_alone():
    model, _ = build("opt", 0.0, layerdrop=1.0 - 1e-9)
    whole = logits(model, training=False)
    set_dropout(model, 0.25)
    assert model.model.decoder.layerdrop == 1.0 - 1e-9
    set_dropout(model, 0)
    assert torch.equal(logits(model, training=True), whole)


def test_scalar_head_with_adapters_drops_nothing_at_0():
    from transformers import AutoModelForSequenceClassification

    config = build("gpt2")[0].config
    config.num_labels, config.pad_token_id = 1, 0
    model = AutoModelForSequenceClassification.from_config(config)
    add_adapters(model, LoraConfig(rank=2, dropout=0.5), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    head = ScalarHead(model)
    with torch.no_grad():
        expected = head.eval()(IDS, torch.ones_like(IDS))
        set_dropout(head, 0)
        assert torch.equal(head.train()(IDS, torch.ones_like(IDS)), expected)


def test_rate_without_any_dropout_is_refused():
    model, _ = build("lfm2", layer_types=["conv", "full_attention"])
    for rate in (None, 0.0):
        check_dropout(model, rate, "sft.dropout")
    with pytest.raises(ConfigError) as caught:
        check_dropout(model, 0.1, "sft.dropout")
    assert str(caught.value) == "sft.dropout: 0.1, but Lfm2ForCausalLM has no dropout; leave it empty, or set it to 0"
    check_dropout(build("llama", 0.0)[0], 0.1, "sft.dropout")


@pytest.mark.parametrize(
    ("stage", "dropout", "expected"),
    [("sft", None, {0.0, 0.5}), ("sft", 0.125, {0.125, 0.5}), ("ppo", 0.0, {0.0}), ("ppo", 0.125, {0.0, 0.125})],
)
def test_adapters_drop_at_their_rate_but_not_in_ppo(accelerator, tmp_path, stage, dropout, expected):
    context = stage_context(
        accelerator, tmp_path, stage, {"lora": {"rank": 2, "dropout": 0.5}, stage: {"dropout": dropout}}
    )
    model = llama(60)  # only attention drops anything, by numbers of each layer
    engine = context.engine(
        "sft" if stage == "sft" else "actor",
        given(model),
        context.config.sft.optimizer,
        total_steps=1,
        batch_size=1,
        micro_batch_size=1,
    )
    adapters = {module.p for module in engine.module.modules() if isinstance(module, torch.nn.Dropout)}
    attention = {layer.self_attn.attention_dropout for layer in model.model.layers}
    assert attention | (adapters or {0.0}) == expected  # without a rate an adapter has no layer of dropout
    assert attention == {dropout or 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_stage_trains_at_its_rate_and_saves_the_models(rlhf, finished_run, tmp_path, stage):
    settings = {
        "reward.model": finished_run / "sft" / "model",
        "ppo.actor": finished_run / "sft" / "model",
        "ppo.reward_model": finished_run / "reward" / "model",
        f"{stage}.dropout": 0.5,
    }
    options = (part for key, value in settings.items() for part in ("--set", f"{key}={value}"))
    rlhf(stage, "--output", tmp_path / "run", *options)
    dropped, plain = tmp_path / "run" / stage / "model", finished_run / stage / "model"
    assert json.loads((dropped / "config.json").read_text()) == json.loads((plain / "config.json").read_text())
    before, after = weights(plain), weights(dropped)
    assert any(not torch.equal(before[name], after[name]) for name in before)
