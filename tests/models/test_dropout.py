"""Without dropout a model in training mode computes what it does in evaluation, in every family."""

import pytest
import torch

from rlhf.config import LoraConfig
from rlhf.models.dropout import disable_dropout
from rlhf.models.forward import ScalarHead
from rlhf.models.lora import add_adapters

SIZES = {
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "word_embed_proj_dim": 32, "intermediate_size": 48, "ffn_dim": 48,
    "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "num_attention_heads": 4, "n_head": 4, "attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 60, "max_position_embeddings": 64, "n_positions": 64,
    "num_local_experts": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
IDS = torch.randint(2, 60, (2, 12), generator=torch.Generator().manual_seed(0))
FAMILIES = ("llama", "gpt2", "opt", "gpt_neox", "mixtral", "phi", "phi3", "falcon", "bloom", "persimmon", "starcoder2")


def build(family):
    """A tiny model that drops half of whatever it can drop."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known = AutoConfig.for_model(family).to_dict()
    rates = {name: 0.5 for name, value in known.items() if "drop" in name and isinstance(value, int | float)}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{name: SIZES[name] for name in SIZES.keys() & known.keys()}, **rates)
    return AutoModelForCausalLM.from_config(config), rates


def logits(model, *, training):
    with torch.no_grad():
        return model.train(training)(input_ids=IDS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_training_mode_computes_what_evaluation_does(family):
    model, rates = build(family)
    expected = logits(model, training=False)
    assert not torch.equal(logits(model, training=True), expected)
    disable_dropout(model)
    assert torch.equal(logits(model, training=True), expected)
    assert {name: getattr(model.config, name) for name in rates} == rates, "the configuration is saved with the model"


def test_a_scalar_head_and_adapters_drop_nothing_either():
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
        disable_dropout(head)
        assert torch.equal(head.train()(IDS, torch.ones_like(IDS)), expected)
