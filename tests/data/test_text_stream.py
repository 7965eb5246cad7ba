"""The pieces of a streamed text are certain, and together they are the text."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhf.data.text_stream import TextStream

TEXTS = [
    "The café is naïve.",
    "狐狸跳过懒狗",
    "👩‍👩‍👧 says hi 👍🏽",
    "  two  spaces\n\n\tand a tab ",
    "a�b",
    "we 're ' s don't .",
]


def byte_level() -> PreTrainedTokenizerFast:
    """Tokens are bytes and pairs of bytes, as in GPT-2: a character may need several."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<eos>"]
    )
    backend.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def sentence_piece() -> PreTrainedTokenizerFast:
    """Spaces belong to the next word, and the first one is not written, as in Llama 2; other characters are bytes."""
    alphabet = sorted({*"▁abcdefghijklmnopqrstuvwxyzT.'s"})
    vocabulary = ["<unk>", "<eos>", *[f"<0x{byte:02X}>" for byte in range(256)], *alphabet, "▁the", "▁a"]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, [], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")


TOKENIZERS = {"byte-level": byte_level, "sentence-piece": sentence_piece}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: Any) -> Any:
    return TOKENIZERS[request.param]()


def decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def pieces(tokenizer: Any, prompt: list[int], ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer, prompt)
    return [*map(stream.add, ids), stream.end()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_a_text_are_the_text(tokenizer: Any, text: str) -> None:
    prompt = tokenizer("The question.")["input_ids"]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    parts = pieces(tokenizer, prompt, ids)
    assert "".join(parts) == decode(tokenizer, prompt + ids)[len(decode(tokenizer, prompt)) :]
    assert sum(map(bool, parts)) > len(ids) / 6, "it comes in pieces"


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_random_text_are_that_text(tokenizer: Any, seed: int) -> None:
    rng = random.Random(seed)
    prompt, text = ("".join(rng.choices("ab T.'\n é狐👍\u200d�", k=length)) for length in (20, 100))
    prompt, text = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, text))
    assert (
        "".join(pieces(tokenizer, prompt, text)) == decode(tokenizer, prompt + text)[len(decode(tokenizer, prompt)) :]
    )


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_random_tokens_are_their_text(seed: int) -> None:
    """Of bytes that are no text: a tokenizer with single bytes writes them differently when others follow."""
    tokenizer, rng = byte_level(), random.Random(seed)
    prompt = tokenizer("The question.")["input_ids"]
    ids = [rng.randrange(len(tokenizer)) for _ in range(200)]
    assert "".join(pieces(tokenizer, prompt, ids)) == decode(tokenizer, prompt + ids)[len(decode(tokenizer, prompt)) :]


def test_character_waits_for_its_last_byte() -> None:
    tokenizer = sentence_piece()
    ids = [2 + byte for byte in "é狐".encode()]
    assert pieces(tokenizer, [2 + ord("x")], ids) == ["", "é", "", "", "狐", ""]


def test_end_tokens_are_not_shown(tokenizer: Any) -> None:
    ids = tokenizer("aa", add_special_tokens=False)["input_ids"]
    assert (
        "".join(pieces(tokenizer, ids, [*ids, tokenizer.eos_token_id]))
        == decode(tokenizer, ids + ids)[len(decode(tokenizer, ids)) :]
    )
