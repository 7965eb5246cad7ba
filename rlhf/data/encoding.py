"""Text to token ids: a row's prompt and a reply become prompt ids and completion ids.

With a chat template the ids are those of the template's own text. Without one, a prompt is its plain text
(`Row.text`), and the reply follows after a space unless the prompt ends in white space. Either way the
completion ends with the end-of-sequence token, and a beginning-of-sequence token comes once, where the
tokenizer wants one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf.data.rows import Message, Row, plain_prompt
from rlhf.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "a"


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, chat_template: bool
) -> list[int]:
    """Prompt ids of a conversation up to where the assistant replies, for chat and samples.

    Raises:
        DataError: the tokenizer's chat template refuses these messages.
    """
    row = Row(tuple(messages), plain_prompt(messages), None, None, None, "")
    ids = encode_prompts(tokenizer, [row], chat_template=chat_template)[0]
    if ids is None:
        roles = ", ".join(message.role for message in messages)
        raise DataError(
            f"the tokenizer's chat template refuses the roles {roles}; change them or set data.chat_template=false"
        )
    return ids


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, chat_template: bool
) -> list[list[int] | None]:
    """Prompt ids of each row; None where the chat template refuses its messages."""
    return _ids(tokenizer, [_prompt(tokenizer, row, chat_template) for row in rows])


def encode_replies(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    replies: Sequence[str],
    prompts: Sequence[list[int] | None],
    *,
    chat_template: bool,
) -> list[list[int] | None]:
    """Completion ids of a reply to each row, the end-of-sequence token included.

    `prompts` are the rows' prompt ids. Prompt and completion ids together are the tokens of the whole text,
    unless the tokenizer would merge across their border: then the reply is tokenized alone, because
    generation starts from the prompt ids as they are.
    """
    wholes = [_whole(tokenizer, row, reply, chat_template) for row, reply in zip(rows, replies, strict=True)]
    completions: list[list[int] | None] = []
    for row, reply, prompt_ids, whole, ids in zip(rows, replies, prompts, wholes, _ids(tokenizer, wholes), strict=True):
        if prompt_ids is None or whole is None or ids is None:
            completions.append(None)
            continue
        if ids[: len(prompt_ids)] == prompt_ids:
            completion = ids[len(prompt_ids) :]
        else:
            prompt = _prompt(tokenizer, row, chat_template) or ""
            tail = whole[len(prompt) :] if whole.startswith(prompt) else reply
            completion = tokenizer(tail, add_special_tokens=False)["input_ids"]
        completions.append(_ended(completion, tokenizer.eos_token_id))
    return completions


def _ended(ids: list[int], eos: int) -> list[int]:
    """The ids up to and including the first end-of-sequence token, added where there is none."""
    return ids[: ids.index(eos) + 1] if eos in ids else [*ids, eos]


def _prompt(tokenizer: PreTrainedTokenizerBase, row: Row, chat_template: bool) -> str | None:
    if _has_template(tokenizer, chat_template):
        return _render(tokenizer, row.prompt, add_generation_prompt=True)
    return _begun(tokenizer, row.text)


def _whole(tokenizer: PreTrainedTokenizerBase, row: Row, reply: str, chat_template: bool) -> str | None:
    if _has_template(tokenizer, chat_template):
        text = _render(tokenizer, [*row.prompt, Message("assistant", reply)], add_generation_prompt=False)
        return text and text.rstrip()  # what a template puts after the end-of-sequence token is no part of the reply
    space = "" if row.text[-1:].isspace() else " "
    return _begun(tokenizer, f"{row.text}{space}{reply}")


def _has_template(tokenizer: PreTrainedTokenizerBase, wanted: bool) -> bool:
    return wanted and bool(tokenizer.chat_template)


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool
) -> str | None:
    from jinja2 import TemplateError

    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt)
    except TemplateError:
        return None


def _begun(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The text with the beginning-of-sequence token, where the tokenizer starts texts with one."""
    bos = tokenizer.bos_token
    wanted = bos is not None and tokenizer(_PROBE)["input_ids"][0] == tokenizer.bos_token_id
    return f"{bos}{text}" if wanted and not text.startswith(bos) else text


def _ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str | None]) -> list[list[int] | None]:
    known = [text for text in texts if text is not None]
    encoded = iter(tokenizer(known, add_special_tokens=False, verbose=False)["input_ids"] if known else [])
    return [None if text is None else next(encoded) for text in texts]
