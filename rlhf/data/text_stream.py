"""Turn tokens into text as they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXT = 6  # tokens of the prompt that decide whether a completion begins with a space
_INCOMPLETE = "\ufffd"


class TextStream:
    """The text of a completion, piece by piece: each piece is certain, whatever token follows.

    A tokenizer may write a token differently after others (a space, a part of a character), so a token is decoded
    together with those of the piece before it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._start, self._read = 0, len(self._ids)

    def add(self, token: int) -> str:
        """Return the text that is certain with this token; it may be empty."""
        self._ids.append(token)
        text = self._rest()
        if text.endswith(_INCOMPLETE):  # the rest of a character comes with the next token
            return ""
        return self._advance(text)

    def end(self) -> str:
        """Return the text that was not certain while tokens could follow."""
        return self._advance(self._rest())

    def _rest(self) -> str:
        before, now = self._decode(self._ids[self._start : self._read]), self._decode(self._ids[self._start :])
        return now[len(before) :]

    def _advance(self, text: str) -> str:
        if text:
            self._start, self._read = self._read, len(self._ids)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        text: str = self._tokenizer.decode(ids, **options)
        return text
