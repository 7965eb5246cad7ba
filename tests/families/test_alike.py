"""What README says of the families: padded rows score as plain transformers scores them alone, and the decoder draws
what generate draws, recorded and not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from rlhf.config.schema import ModelConfig, SamplingConfig
from rlhf.generation.decoder import Decoder
from rlhf.models.compatibility import check_support
from rlhf.models.forward import ScalarHead, completion_log_probs
from rlhf.models.scalar_head import build_scalar_head_class
from tests.families.table import BY_NAME, EACH, FAMILIES, SIZES, Family, build

NAMES = [family.name for family in FAMILIES]


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows of 20 tokens, the first with 7 of padding on the left."""
    ids = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    ids[0, :7] = 0
    return ids, (ids != 0).long()


def assert_scores_as_plain_transformers(model: Any) -> None:
    ids, mask = rows()
    with torch.no_grad():
        actual = completion_log_probs(model, ids, mask, 6).log_probs
        for row, start in ((0, 7), (1, 0)):
            alone = ids[row : row + 1, start:]
            logits = model(input_ids=alone, use_cache=False).logits[0, -7:-1].log_softmax(-1)
            torch.testing.assert_close(
                actual[row], logits.gather(-1, alone[0, -6:, None])[:, 0], atol=2e-5, rtol=0, msg=f"row {row}"
            )


def assert_head_scores_as_plain_transformers(config: Any) -> None:
    config.num_labels = 1
    made = build_scalar_head_class(config)
    model = build(config, {type(config): made} if made else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING)
    ids, mask = rows()
    with torch.no_grad():
        actual = ScalarHead(model).eval()(ids, mask)[0, -1]
        expected = model(input_ids=ids[:1, 7:]).logits[0, 0]
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


def assert_draws_as_generate(accelerator: Any, model: Any) -> None:
    ids, mask = rows()
    prompts = ids[:, :14], mask[:, :14]
    expected = []
    for row, start in ((0, 7), (1, 0)):
        alone = ids[row : row + 1, start:14]
        options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        tokens = model.generate(alone, attention_mask=torch.ones_like(alone), **options)
        expected.append(tokens[0, alone.shape[1] :].tolist())
    decoder = Decoder(accelerator, eos_ids=[], pad_id=0, max_new_tokens=10)
    for _ in range(2):  # the second time with the first one's buffers
        decoder.release_if_large()
        assert decoder.generate(model, *prompts, SamplingConfig(temperature=0)).ids.tolist() == expected


@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_neither_scores_nor_draws(accelerator: Any, name: str, tmp_path: Path) -> None:
    config = BY_NAME[name].configuration()
    config.save_pretrained(tmp_path)
    model = build(config, MODEL_FOR_CAUSAL_LM_MAPPING)
    attention = model.config._attn_implementation
    check_support(str(tmp_path), ModelConfig(), attention=attention, scalar_head=True)
    assert_scores_as_plain_transformers(model)
    assert_draws_as_generate(accelerator, model)


# JetMoE's tolist() reads on the host, unseen here.
@pytest.mark.parametrize("family", [parameter for parameter in EACH if parameter.id != "JetMoE"])
def test_recorded_step_draws_the_same_tokens(accelerator: Any, monkeypatch: pytest.MonkeyPatch, family: Family) -> None:
    """What cannot be recorded is decoded as it is."""
    from accelerators.capture import Graph
    from accelerators.testing.stand_in import record

    model = build(family.configuration(), MODEL_FOR_CAUSAL_LM_MAPPING)
    monkeypatch.setattr(accelerator, "capture", lambda fn, key: Graph(fn, key, record))
    assert_draws_as_generate(accelerator, model)


@pytest.mark.parametrize("name", NAMES)
def test_padding_does_not_change_scalar_head_scores(name: str) -> None:
    assert_head_scores_as_plain_transformers(BY_NAME[name].configuration())


def gemma3() -> Any:
    from transformers import Gemma3Config, Gemma3TextConfig, SiglipVisionConfig

    text = Gemma3TextConfig(**SIZES | dict(BY_NAME["Gemma 3"].values))
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=63)


def test_text_part_of_composite_model_keeps_its_windows(accelerator: Any) -> None:
    model = build(gemma3(), MODEL_FOR_CAUSAL_LM_MAPPING)
    assert type(model).__name__ == "Gemma3ForConditionalGeneration"
    assert_scores_as_plain_transformers(model)
    assert_draws_as_generate(accelerator, model)
    completion_log_probs(model.train(), *rows(), 6).log_probs.sum().backward()
    assert_head_scores_as_plain_transformers(gemma3())
