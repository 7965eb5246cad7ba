"""A tokenizer made at run time: texts go in, a byte-level BPE tokenizer for models from scratch comes out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlhf.data import toy_world

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPECIAL = ("<pad>", "<eos>", "<system>", "<user>", "<assistant>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def build_tokenizer(texts: Iterable[str], *, vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with pad and end-of-sequence tokens and a chat template.

    The same texts give the same tokenizer. Any text can be encoded, since single bytes are tokens too.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", chat_template=_CHAT_TEMPLATE
    )


def world_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the embedded world; the same for every seed."""
    return build_tokenizer(text for record in toy_world.records(seed=0, count=4000) for text in record.values())
