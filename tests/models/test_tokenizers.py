"""The pad token is one that no prompt and no reply contains; end tokens are all that end generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from rlhf.config.schema import ModelConfig
from rlhf.models.loading import load_causal_lm, load_model_tokenizer
from rlhf.models.tokenizers import find_end_tokens, load_tokenizer
from tests.helpers import build_tokenizer, llama

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def tokenizer_with(special: list[str], added: list[str], template: str) -> Any:
    """A tokenizer that pads with its end-of-sequence token and has these tokens beside it."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    state = build_tokenizer().backend_tokenizer.to_str().replace('"<pad>"', '"<zero>"')
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(state), eos_token="<eos>", pad_token="<eos>", chat_template=template
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(added)
    return tokenizer


@pytest.mark.parametrize(
    ("special", "added", "expected"),
    [
        (["<|im_start|>", "<|im_end|>", "<|vision_pad|>"], ["<tool_call>", "<|fim_pad|>"], "<|fim_pad|>"),
        (["<|start_header_id|>", "<|reserved_special_token_0|>", "<|finetune_right_pad_id|>"], [], "<|finetune_right"),
        (["<|start_header_id|>", "<|reserved_special_token_0|>"], [], "<|reserved_special_token_0|>"),
        (["<|user|>", "<|assistant|>", "<|placeholder1|>"], [], "<|placeholder1|>"),
        (["<|im_start|>", "<|im_end|>", "<|image_pad|>"], [], "<|pad|>"),
    ],
    ids=["qwen", "llama 3.1", "llama 3", "phi 3", "none"],
)
def test_the_pad_token_is_made_for_padding_or_for_nothing(
    tmp_path: Path, special: list[str], added: list[str], expected: str
) -> None:
    tokenizer_with(special, added, CHATML).save_pretrained(tmp_path)
    found, (note,) = load_tokenizer(str(tmp_path))
    assert found.pad_token.startswith(expected)
    assert found.pad_token not in found.apply_chat_template([{"role": "user", "content": "moo"}], tokenize=False)
    assert repr(found.pad_token) in note


def test_a_token_that_the_template_writes_does_not_pad(tmp_path: Path) -> None:
    template = "{% for m in messages %}[PAD]{{ m.content }}{% endfor %}"
    tokenizer_with(["[PAD]", "<unused1>"], [], template).save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path))[0].pad_token == "<unused1>"


def test_a_pad_token_that_the_template_writes_is_replaced(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(["<|im_start|>", "<|im_end|>", "<unused1>"], [], CHATML)
    tokenizer.pad_token = "<|im_end|>"
    tokenizer.save_pretrained(tmp_path)
    found, (note,) = load_tokenizer(str(tmp_path))
    assert found.pad_token == "<unused1>"
    assert "pads with '<|im_end|>', which its chat template writes; padding with its '<unused1>'" in note


def test_an_unknown_token_that_texts_contain_does_not_pad(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "moo": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>").save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path))[0].pad_token == "<|pad|>"


def test_an_unknown_token_that_no_text_needs_pads(tmp_path: Path) -> None:
    """As in Llama 2 and Mistral, whose tokenizers fall back to bytes."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "</s>": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.ByteFallback()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>").save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path))[0].pad_token == "<unk>"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, [1]),
        (GenerationConfig(eos_token_id=0), [0, 1]),
        (GenerationConfig(eos_token_id=[1, 300]), [1, 300]),
        (GenerationConfig(eos_token_id=7), [1]),
        (GenerationConfig(eos_token_id=[7, 300, 9999]), [1, 300]),
    ],
)
def test_end_tokens_are_the_tokenizers_and_the_models(settings: Any, expected: list[int]) -> None:
    """An ordinary token, or none of the vocabulary, is what a configuration names that is not the tokenizer's."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<turn>"])
    assert tokenizer.eos_token_id == 1 and tokenizer.convert_tokens_to_ids(["#", "<turn>"]) == [7, 300]
    assert find_end_tokens(tokenizer, settings) == expected


def endless(folder: Path) -> Any:
    """A tokenizer without an end-of-sequence token, saved in `folder`."""
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_an_end_token_that_is_asked_for_is_added_once(tmp_path: Path) -> None:
    before = endless(tmp_path)
    found, notes = load_tokenizer(str(tmp_path), eos_token="<|end|>")
    assert (found.eos_token, found.eos_token_id, len(found)) == ("<|end|>", len(before), len(before) + 1)
    assert notes == [
        f"{tmp_path}: the tokenizer has no end-of-sequence token; added '<|end|>' (id {len(before)}), to be learned"
    ]
    assert found("moo<|end|>", add_special_tokens=False)["input_ids"][-1] == found.eos_token_id
    assert found.decode([found.eos_token_id], skip_special_tokens=True) == ""
    found.save_pretrained(tmp_path / "saved")
    for asked in ("<|end|>", None):
        again, notes = load_tokenizer(str(tmp_path / "saved"), eos_token=asked)
        assert (again.get_vocab(), again.eos_token, notes) == (found.get_vocab(), "<|end|>", [])


def test_an_end_token_may_be_one_of_the_tokenizer(tmp_path: Path) -> None:
    before = endless(tmp_path)
    found, (note,) = load_tokenizer(str(tmp_path), eos_token="<eos>")
    assert (found.eos_token_id, found.get_vocab()) == (before.convert_tokens_to_ids("<eos>"), before.get_vocab())
    assert note.endswith("the tokenizer has no end-of-sequence token; ending with '<eos>'")


def test_the_end_token_of_before_does_not_pad_beside_another(tmp_path: Path) -> None:
    tokenizer_with([], [], CHATML).save_pretrained(tmp_path)  # pads with <eos>, which ends generation still
    found, notes = load_tokenizer(str(tmp_path), eos_token="<|end|>")
    assert (found.eos_token, found.pad_token) == ("<|end|>", "<|pad|>")
    assert "ends with '<eos>'; added '<|end|>'" in notes[0] and "pads with its end-of-sequence token" in notes[1]


@pytest.mark.parametrize(("before", "after"), [(None, [300]), (1, [1, 300]), ([1, 7], [1, 300])])
def test_a_model_ends_where_its_tokenizer_does(tmp_path: Path, before: Any, after: list[int]) -> None:
    """Of what its settings named before, special tokens stay (1); 7 is a letter of this tokenizer."""
    model = llama(300)
    model.generation_config.eos_token_id = before
    model.save_pretrained(tmp_path)
    tokenizer = build_tokenizer()
    assert len(tokenizer) == 300
    tokenizer.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), eos_token="<|end|>")
    tokenizer, _ = load_model_tokenizer(config)
    found = load_causal_lm(config, tokenizer, attention="sdpa")
    ends = found.generation_config.eos_token_id
    assert (ends if isinstance(ends, list) else [ends]) == after
    rows = found.get_input_embeddings().weight
    assert len(rows) == 301
    torch.testing.assert_close(rows[300], rows[:300].mean(0))
