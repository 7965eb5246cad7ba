"""The pad token is one that no prompt and no reply contains; end tokens are all that end generation."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from rlhf.config.schema import ModelConfig
from rlhf.errors import ModelError
from rlhf.models.loading import load_causal_lm, load_model_tokenizer
from rlhf.models.tokenizers import find_end_tokens, load_tokenizer
from tests.helpers import build_tokenizer, llama

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def tokenizer_with(special: list[str], added: list[str], template: str = CHATML, pad: str | None = "<eos>") -> Any:
    """Return a tokenizer without a token that is made for padding, with these tokens in addition."""
    state = build_tokenizer().backend_tokenizer.to_str().replace('"<pad>"', '"<zero>"')
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(state), eos_token="<eos>", pad_token=pad, chat_template=template
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(added)
    return tokenizer


PADDING = "{% for m in messages %}[PAD]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("tokens", "template", "pad", "expected", "reason"),
    [
        (["<|im_start|>", "<|im_end|>", "<|vision_pad|>", "<|fim_pad|>"], CHATML, "<eos>", "<|fim_pad|>", ""),
        (
            ["<|reserved_special_token_0|>", "<|finetune_right_pad_id|>"],
            CHATML,
            "<eos>",
            "<|finetune_right_pad_id|>",
            "",
        ),
        (["<|start_header_id|>", "<|reserved_special_token_0|>"], CHATML, "<eos>", "<|reserved_special_token_0|>", ""),
        (["<|user|>", "<|assistant|>", "<|placeholder1|>"], CHATML, "<eos>", "<|placeholder1|>", ""),
        (["<|im_start|>", "<|im_end|>", "<|image_pad|>"], CHATML, "<eos>", "<|pad|>", "pads with its end-of-sequence"),
        (["<|im_start|>", "<|im_end|>"], CHATML, None, "<|pad|>", "has no pad token"),
        (["[PAD]", "<unused1>"], PADDING, "<eos>", "<unused1>", ""),
        (["<|im_end|>", "<unused1>"], CHATML, "<|im_end|>", "<unused1>", "with '<|im_end|>', which its chat template"),
    ],
    ids=["qwen", "llama 3.1", "llama 3", "phi 3", "eos", "no pad", "template", "template writes pad"],
)
def test_pad_token_is_in_no_text(
    tmp_path: Path, tokens: list[str], template: str, pad: str | None, expected: str, reason: str
) -> None:
    special = [token for token in tokens if token != "<|fim_pad|>"]
    tokenizer_with(special, [*{*tokens} - {*special}], template, pad).save_pretrained(tmp_path)
    tokenizer, (note,) = load_tokenizer(str(tmp_path))
    assert tokenizer.pad_token == expected != tokenizer.eos_token
    assert expected not in tokenizer.apply_chat_template([{"role": "user", "content": "moo"}], tokenize=False)
    assert repr(expected) in note and reason in note


def test_tokenizer_with_a_pad_token_is_unchanged(model_folder: Path) -> None:
    tokenizer, notes = load_tokenizer(str(model_folder))
    assert tokenizer.pad_token == "<pad>" and notes == []


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (tokenizers.models.WordLevel({"<unk>": 0, "</s>": 1, "moo": 2}, unk_token="<unk>"), "<|pad|>"),
        (  # as Llama 2's and Mistral's, which fall back to bytes
            tokenizers.models.BPE(
                {"<unk>": 0, "</s>": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)},
                [],
                unk_token="<unk>",
                byte_fallback=True,
            ),
            "<unk>",
        ),
    ],
)
def test_unknown_token_pads_if_no_text_needs_it(tmp_path: Path, backend: Any, expected: str) -> None:
    tokenizer = tokenizers.Tokenizer(backend)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path))[0].pad_token == expected


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
def test_find_end_tokens_adds_the_models_special_ones(settings: Any, expected: list[int]) -> None:
    """An ordinary token, or none of the vocabulary, is what a configuration names that is not the tokenizer's."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<turn>"])
    assert tokenizer.eos_token_id == 1 and tokenizer.convert_tokens_to_ids(["#", "<turn>"]) == [7, 300]
    assert find_end_tokens(tokenizer, settings) == expected


@pytest.mark.parametrize("named", [{}, ["<eos>"], 2.5, "2"])
def test_end_tokens_that_are_no_ids_are_refused(named: Any) -> None:
    with pytest.raises(ModelError, match=r"the model's eos_token_id is .*correct generation_config\.json"):
        find_end_tokens(build_tokenizer(), SimpleNamespace(eos_token_id=named))


def endless(folder: Path) -> Any:
    """A tokenizer without an end-of-sequence token, saved in `folder`."""
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_requested_end_token_is_added_once(tmp_path: Path) -> None:
    before = endless(tmp_path)
    loaded, notes = load_tokenizer(str(tmp_path), eos_token="<|end|>")
    assert (loaded.eos_token, loaded.eos_token_id, len(loaded)) == ("<|end|>", len(before), len(before) + 1)
    assert notes == [
        f"{tmp_path}: the tokenizer has no end-of-sequence token; added '<|end|>' (id {len(before)}), to be learned"
    ]
    assert loaded("moo<|end|>", add_special_tokens=False)["input_ids"][-1] == loaded.eos_token_id
    assert loaded.decode([loaded.eos_token_id], skip_special_tokens=True) == ""
    loaded.save_pretrained(tmp_path / "saved")
    for asked in ("<|end|>", None):
        again, notes = load_tokenizer(str(tmp_path / "saved"), eos_token=asked)
        assert (again.get_vocab(), again.eos_token, notes) == (loaded.get_vocab(), "<|end|>", [])


def test_requested_end_token_may_exist(tmp_path: Path) -> None:
    before = endless(tmp_path)
    loaded, (note,) = load_tokenizer(str(tmp_path), eos_token="<eos>")
    assert (loaded.eos_token_id, loaded.get_vocab()) == (before.convert_tokens_to_ids("<eos>"), before.get_vocab())
    assert note.endswith("the tokenizer has no end-of-sequence token; ending with '<eos>'")


def test_previous_end_token_does_not_pad(tmp_path: Path) -> None:
    tokenizer_with([], []).save_pretrained(tmp_path)  # pads with <eos>, which ends generation still
    loaded, notes = load_tokenizer(str(tmp_path), eos_token="<|end|>")
    assert (loaded.eos_token, loaded.pad_token) == ("<|end|>", "<|pad|>")
    assert "ends with '<eos>'; added '<|end|>'" in notes[0] and "pads with its end-of-sequence token" in notes[1]


@pytest.mark.parametrize(("before", "after"), [(None, [300]), (1, [1, 300]), ([1, 7], [1, 300])])
def test_model_ends_with_its_tokenizers_token(tmp_path: Path, before: Any, after: list[int]) -> None:
    """Of what its settings named before, special tokens stay (1); 7 is a letter of this tokenizer."""
    model = llama(300)
    model.generation_config.eos_token_id = before
    model.save_pretrained(tmp_path)
    tokenizer = build_tokenizer()
    assert len(tokenizer) == 300
    tokenizer.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), eos_token="<|end|>")
    tokenizer, _ = load_model_tokenizer(config)
    grown = load_causal_lm(config, tokenizer, attention="sdpa")
    ends = grown.generation_config.eos_token_id
    assert (ends if isinstance(ends, list) else [ends]) == after
    rows = grown.get_input_embeddings().weight
    assert len(rows) == 301
    torch.testing.assert_close(rows[300], rows[:300].mean(0))


@pytest.mark.parametrize("limit", ["x", [5]])
def test_maximum_length_that_is_no_number_is_refused(tmp_path: Path, limit: Any) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": limit}))
    with pytest.raises(ModelError, match=r"model_max_length is .*, not a number; correct tokenizer_config\.json"):
        load_tokenizer(str(tmp_path))
