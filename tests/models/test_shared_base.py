"""A model on another's frozen base: every family's fits, computes the same, and adds no memory but its head."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from rlhf.config.schema import LoraConfig, ModelConfig
from rlhf.engine.engine import freeze_model
from rlhf.errors import ModelError
from rlhf.models.loading import build_on_meta
from rlhf.models.lora import (
    FROZEN_ADAPTER,
    TRAINED_ADAPTER,
    add_adapters,
    build_peft_config,
    inject_adapters,
    merged_adapters,
    without_adapters,
)
from rlhf.models.shared_base import SharedBase, build_on_base, share_tensors
from tests.families.table import EACH
from tests.helpers import llama
from tests.in_process import make_placement

IDS = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def storages(model):
    return {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}


def adapted(model, **settings):
    add_adapters(model, LoraConfig(rank=4, **settings), seed=0)
    return model


@pytest.mark.parametrize("family", EACH)
def test_model_on_shared_base_computes_the_same_bits(family):
    torch.manual_seed(0)
    config = family.configuration()
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, attn_implementation="eager")
    twin = build_on_base(SharedBase(model.requires_grad_(False)), ModelConfig(), attention="eager")
    assert torch.equal(logits(twin), logits(model))
    assert storages(twin) <= storages(model)


@pytest.mark.parametrize("family", EACH)
def test_scalar_head_on_shared_base_adds_its_head_alone(family):
    torch.manual_seed(0)
    config = family.configuration()
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, attn_implementation="eager")
    scorer = build_on_meta(model.config, ModelConfig(), attention="eager", scalar_head=True)
    share_tensors(
        scorer, SharedBase(model.requires_grad_(False)), {"score.weight": torch.zeros(scorer.score.weight.shape)}
    )
    assert not any(tensor.is_meta for tensor in (*scorer.parameters(), *scorer.buffers()))
    theirs = set(map(id, model.parameters()))
    assert {name for name, parameter in scorer.named_parameters() if id(parameter) not in theirs} == {"score.weight"}


def test_trained_norms_and_embeddings_are_copies():
    model = adapted(llama(60), also_train=["norms", "embeddings"])
    base = SharedBase(model)
    before = model.model.norm.weight.clone()
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    twin = build_on_base(base, ModelConfig(), attention="sdpa")
    assert torch.equal(twin.model.norm.weight, before)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight is not model.lm_head.weight
    assert twin.model.layers[0].mlp.up_proj.weight is model.model.layers[0].mlp.up_proj.base_layer.weight


def test_two_adapters_add_up_merged_or_not_and_one_is_trained():
    model = llama(60)
    inject_adapters(model, FROZEN_ADAPTER, build_peft_config(model, LoraConfig(rank=2)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    plain = logits(model)
    assert torch.equal(logits(adapted(model)), plain)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(f".{TRAINED_ADAPTER}." in name for name in trained)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.lora_B[TRAINED_ADAPTER].weight.normal_(std=0.1)
    both = logits(model)
    assert (both - plain).abs().max() > 1e-3
    with merged_adapters(model):
        torch.testing.assert_close(logits(model), both)
    with without_adapters(model):
        assert torch.equal(logits(model), plain)


def test_layers_of_other_classes_are_shared():
    class Packed(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.register_buffer("packed", weight.detach().half())

        def forward(self, inputs):
            return inputs @ self.packed.float().T

    model = llama(60)
    layer = model.model.layers[0].mlp
    layer.up_proj = Packed(layer.up_proj.weight)
    twin = build_on_base(SharedBase(model), ModelConfig(), attention="sdpa")
    assert torch.equal(logits(twin), logits(model))
    mine = twin.model.layers[0].mlp.up_proj
    assert mine is not layer.up_proj and mine.packed is layer.up_proj.packed


def test_base_that_does_not_fit_is_refused():
    scorer = build_on_meta(llama(60, hidden_size=16).config, ModelConfig(), attention="sdpa", scalar_head=True)
    with pytest.raises(ModelError, match=r"^\S+: the shared base lacks .*; set lora.share_base=false$"):
        share_tensors(scorer, SharedBase(llama(60)), {})


def test_frozen_reward_model_on_shared_base_drops_nothing(accelerator, tmp_path):
    """Its adapter was trained with dropout, and the base belongs to a model in training mode."""
    torch.manual_seed(0)
    source = build_on_meta(llama(60).config, ModelConfig(), attention="sdpa", scalar_head=True).to_empty(device="cpu")
    peft_config = build_peft_config(source, LoraConfig(rank=4, dropout=0.5))
    inject_adapters(source, FROZEN_ADAPTER, peft_config)
    tensors = {
        f"base_model.model.{name.replace(f'.{FROZEN_ADAPTER}', '')}": torch.randn(parameter.shape)
        for name, parameter in source.named_parameters()
        if ".lora_" in name or name == "score.weight"
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    peft_config.save_pretrained(str(tmp_path))

    base = SharedBase(adapted(llama(60)).train())
    scorer = build_on_base(base, ModelConfig(), attention="sdpa", scalar_head=True, adapter=tmp_path)
    scorer.train()
    placement = make_placement(0, trained=False)
    precision = accelerator.precision("fp32")
    frozen = freeze_model(scorer, accelerator=accelerator, precision=precision, placement=placement, shared=True)
    with torch.no_grad():
        first, second = (frozen(input_ids=IDS).logits for _ in range(2))
        assert torch.equal(first, second)
        assert not torch.equal(*(frozen.train()(input_ids=IDS).logits for _ in range(2)))  # there is dropout
