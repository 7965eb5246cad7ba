"""What README says of architectures: padded rows score as plain transformers scores them alone, and the decoder
draws what generate draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.config import ModelConfig, SamplingConfig
from rlhf.models.forward import ScalarHead, completion_log_probs
from rlhf.models.scalar_head import made_class
from rlhf.models.support import check_support
from rlhf.rollout.decoder import Decoder

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "biogpt": {},
    "cohere2": GROUPED | {"sliding_window": 6},
    "falcon": {},
    "gemma": GROUPED,
    "gemma3_text": GROUPED | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4": GROUPED,
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "granite": GROUPED,
    "lfm2": {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
    "llama": GROUPED,
    "mistral": GROUPED | {"sliding_window": 6},
    "mixtral": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron": GROUPED,
    "olmo2": {"num_key_value_heads": 2},
    "olmo3": {"num_key_value_heads": 2, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
    "phi3": {"num_key_value_heads": 2, "sliding_window": 6},
    "phimoe": {"num_key_value_heads": 2, "num_local_experts": 4},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": GROUPED,
    "qwen3_moe": GROUPED | EXPERTS,
    "qwen3_next": GROUPED | EXPERTS | {"shared_expert_intermediate_size": 16} | LINEAR,
    "qwen3_5_text": GROUPED | LINEAR,
    "smollm3": {"num_key_value_heads": 2},
    "stablelm": {"num_key_value_heads": 2},
    "starcoder2": {"num_key_value_heads": 2},
}


def build(config: Any, mapping: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config._attn_implementation = "sdpa"
    model = mapping[type(config)](config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)  # far from uniform, so that what attention sees matters
    return model


def configuration(name: str) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[name](**SIZES | CONFIGS[name])


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows of 20 tokens, the first with 7 of padding on the left."""
    ids = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    ids[0, :7] = 0
    return ids, (ids != 0).long()


def assert_scores_as_plain_transformers(model: Any) -> None:
    ids, mask = rows()
    with torch.no_grad():
        found = completion_log_probs(model, ids, mask, 6).log_probs
        for row, start in ((0, 7), (1, 0)):
            alone = ids[row : row + 1, start:]
            logits = model(input_ids=alone, use_cache=False).logits[0, -7:-1].log_softmax(-1)
            torch.testing.assert_close(
                found[row], logits.gather(-1, alone[0, -6:, None])[:, 0], atol=2e-5, rtol=0, msg=f"row {row}"
            )


def assert_head_scores_as_plain_transformers(config: Any) -> None:
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    config.num_labels = 1
    made = made_class(config)
    model = build(config, {type(config): made} if made else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING)
    ids, mask = rows()
    with torch.no_grad():
        found = ScalarHead(model).eval()(ids, mask)[0, -1]
        expected = model(input_ids=ids[:1, 7:]).logits[0, 0]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def assert_draws_as_generate(accelerator: Any, model: Any) -> None:
    ids, mask = rows()
    prompts = ids[:, :14], mask[:, :14]
    decoder = Decoder(accelerator, eos_ids=[], pad_id=0, max_new_tokens=10)
    for _ in range(2):  # the second time with the first one's buffers
        decoder.make_room()
        found = decoder.generate(model, *prompts, SamplingConfig(temperature=0)).ids
        for row, start in ((0, 7), (1, 0)):
            alone = ids[row : row + 1, start:14]
            expected = model.generate(
                alone,
                attention_mask=torch.ones_like(alone),
                max_new_tokens=10,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert found[row].tolist() == expected[0, alone.shape[1] :].tolist(), f"row {row}"


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_changes_neither_scores_nor_what_is_drawn(accelerator: Any, name: str, tmp_path: Path) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = configuration(name)
    config.save_pretrained(tmp_path)
    check_support(str(tmp_path), ModelConfig(), attention="sdpa", scalar_head=True)
    model = build(config, MODEL_FOR_CAUSAL_LM_MAPPING)
    assert_scores_as_plain_transformers(model)
    assert_draws_as_generate(accelerator, model)


def test_alibi_sees_the_padding(accelerator: Any) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, FalconConfig

    model = build(FalconConfig(**SIZES, alibi=True), MODEL_FOR_CAUSAL_LM_MAPPING)
    assert_scores_as_plain_transformers(model)
    assert_draws_as_generate(accelerator, model)


def gemma3() -> Any:
    from transformers import Gemma3Config, Gemma3TextConfig, SiglipVisionConfig

    text = Gemma3TextConfig(**SIZES | CONFIGS["gemma3_text"])
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=63)


def test_the_text_part_of_a_composite_model_keeps_its_sliding_windows(accelerator: Any) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model = build(gemma3(), MODEL_FOR_CAUSAL_LM_MAPPING)
    assert type(model).__name__ == "Gemma3ForConditionalGeneration"
    assert_scores_as_plain_transformers(model)
    assert_draws_as_generate(accelerator, model)
    completion_log_probs(model.train(), *rows(), 6).log_probs.sum().backward()
    assert_head_scores_as_plain_transformers(gemma3())


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_does_not_change_the_scores_of_a_scalar_head(name: str) -> None:
    assert_head_scores_as_plain_transformers(configuration(name))
