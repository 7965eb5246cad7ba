"""Tokenize prompts and replies: a row's prompt and a reply become prompt ids and completion ids.

With a chat template the ids are those of the text that the template writes. Without one, a prompt is its plain text
(`Row.text`), and the reply follows after a space unless the prompt ends in white space. In both cases the completion
ends with a token that also ends generation, and a beginning-of-sequence token appears once if the tokenizer adds one.
A text without a prompt is a completion, and the template does not apply to it.

Tokenizers encode the text of a control token (<|im_end|>) as that token. With a chat template only the template may
write control tokens: content with one could end a reply or forge a turn. In a prompt, such text is split so that it
stays plain text; `has_control_tokens` detects it in replies. Without a template a prompt is used as written, control
tokens included.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.config.data import PLACEHOLDER
from rlhf.data.records import (
    Message,
    Row,
    append_reply,
    format_plain_prompt,
    format_transcript,
    format_with_template,
)
from rlhf.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PromptFormat = str
"""The way a conversation becomes text: `template` (the chat template), `transcript` (`Human: ... Assistant:`), `plain`
(a single message unchanged), or the text of data.datasets.*.template."""

_PROBE = "a"
_TAG = re.compile(r"</?\w+>")


def detect_prompt_format(
    tokenizer: PreTrainedTokenizerBase, formats: Iterable[PromptFormat], *, chat_template: bool
) -> PromptFormat:
    """Return the format in which the model sees most prompts, from those of the rows; "" for a row without a prompt."""
    if uses_chat_template(tokenizer, chat_template):
        return "template"
    counts = Counter(filter(None, formats))
    return max(sorted(counts), key=counts.__getitem__, default="plain")


def find_row_format(row: Row) -> PromptFormat:
    """Return the format of a row's text."""
    return row.template or ("transcript" if row.text == format_transcript(row.prompt) else "plain")


def format_prompt(messages: Sequence[Message], prompt_format: PromptFormat) -> str:
    """Return a conversation as text; with a chat template, as text without it."""
    if PLACEHOLDER in prompt_format:
        return format_with_template(messages, prompt_format)
    return format_transcript(messages) if prompt_format == "transcript" else format_plain_prompt(messages)


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], prompt_format: PromptFormat
) -> list[int]:
    """Return the prompt ids of a conversation up to the assistant's reply, encoded as in training with that format.

    Raises:
        DataError: the tokenizer's chat template refuses these messages.
    """
    row = make_conversation_row(messages, prompt_format)
    ids = encode_prompts(tokenizer, [row], chat_template=prompt_format == "template")[0]
    if ids is None:
        roles = ", ".join(message.role for message in messages)
        raise DataError(
            f"the tokenizer's chat template refuses the roles {roles}; change them, or set data.chat_template=false"
        )
    return ids


def make_conversation_row(messages: Sequence[Message], prompt_format: PromptFormat) -> Row:
    """Return a row for a conversation that is not from a data set."""
    template = prompt_format if PLACEHOLDER in prompt_format else ""
    return Row(tuple(messages), format_prompt(messages, prompt_format), None, None, None, "", template=template)


def _split_token(match: re.Match[str]) -> str:
    """Return the text of a control token with a space in it, which makes it plain text; a single character is lost."""
    token = match[0]
    return f"{token[0]} {token[1:]}" if len(token) > 1 else " "


def _split_control_tokens(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], chat_template: bool
) -> Sequence[Row]:
    """Return the rows with the control tokens in their prompts split, if a template is used."""
    if not uses_chat_template(tokenizer, chat_template):
        return rows
    control = compile_control_tokens(tokenizer)
    return [
        replace(row, prompt=tuple(Message(m.role, control.sub(_split_token, m.content)) for m in row.prompt))
        for row in rows
    ]


def uses_chat_template(tokenizer: PreTrainedTokenizerBase, enabled: bool) -> bool:
    """Return True if a chat template writes the prompts: it is enabled, and the tokenizer has one."""
    return enabled and bool(tokenizer.chat_template)


def compile_control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern that matches the control tokens of a tokenizer.

    These are its special tokens and the other added tokens that its template writes (DeepSeek's <｜User｜>), but not
    tags like <think>, which belong to the content and are not special tokens.
    """
    template = str(tokenizer.chat_template or "")
    names = set(tokenizer.all_special_tokens)
    for token in tokenizer.added_tokens_decoder.values():
        if token.special or (token.content in template and not _TAG.fullmatch(token.content)):
            names.add(token.content)
    longest_first = sorted((name for name in names if name.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def has_control_tokens(replies: Sequence[str], control: re.Pattern[str], *, templated: bool) -> bool:
    """Return True if replies contain control tokens that are not allowed.

    Without a template a reply may end with them: the data was formatted beforehand.
    """
    if templated:
        return any(map(control.search, replies))
    return any(part.strip() for reply in replies for part in control.split(reply)[1:])


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, chat_template: bool
) -> list[list[int] | None]:
    """Return the prompt ids of each row; None if the chat template refuses its messages."""
    rows, bos = _split_control_tokens(tokenizer, rows, chat_template), _find_added_bos(tokenizer)
    return _ids(tokenizer, [_prompt_text(tokenizer, row, chat_template, bos) for row in rows])


def encode_replies(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    replies: Sequence[str],
    prompts: Sequence[list[int] | None],
    *,
    chat_template: bool,
    end_ids: Sequence[int] | None = None,
) -> list[list[int] | None]:
    """Return the completion ids of a reply to each row, up to and including the first of `end_ids`.

    `prompts` are the rows' prompt ids. Prompt and completion ids together are the tokens of the whole text, unless the
    tokenizer would merge across their border: then the reply is tokenized alone, because generation starts from
    exactly the prompt ids.

    `end_ids` are the tokens that end generation (default: the end-of-sequence token). If a reply has none, the
    end-of-sequence token is added. The text that a template writes after the first of them (Gemma: after
    <end_of_turn>) is dropped, because generation never reaches it.
    """
    rows, bos = _split_control_tokens(tokenizer, rows, chat_template), _find_added_bos(tokenizer)
    texts = [
        _conversation_text(tokenizer, row, reply, chat_template, bos) for row, reply in zip(rows, replies, strict=True)
    ]
    completions: list[list[int] | None] = []
    for row, reply, prompt_ids, text, ids in zip(rows, replies, prompts, texts, _ids(tokenizer, texts), strict=True):
        if prompt_ids is None or text is None or ids is None:
            completions.append(None)
            continue
        if ids[: len(prompt_ids)] == prompt_ids:
            completion = ids[len(prompt_ids) :]
        else:
            prompt = _prompt_text(tokenizer, row, chat_template, bos) or ""
            tail = text[len(prompt) :] if text.startswith(prompt) else reply
            completion = tokenizer(tail, add_special_tokens=False)["input_ids"]
        completions.append(_cut_at_end(completion, end_ids or [tokenizer.eos_token_id], tokenizer.eos_token_id))
    return completions


def encode_documents(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of separate texts, each with one end token, and a beginning token if the tokenizer adds one."""
    bos = _find_added_bos(tokenizer)
    texts = [_add_bos(text, bos) for text in texts]
    documents = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    eos = tokenizer.eos_token_id
    return [ids if ids[-1:] == [eos] else [*ids, eos] for ids in documents]


def _cut_at_end(ids: list[int], ends: Sequence[int], eos: int) -> list[int]:
    """Return the ids up to and including the first of `ends`; with `eos` if they have none."""
    first = next((position for position, token in enumerate(ids) if token in ends), None)
    return [*ids, eos] if first is None else ids[: first + 1]


def _prompt_text(tokenizer: PreTrainedTokenizerBase, row: Row, chat_template: bool, bos: str) -> str | None:
    if row.prompt and uses_chat_template(tokenizer, chat_template):
        return _render(tokenizer, row.prompt, add_generation_prompt=True)
    return _add_bos(row.text, bos)


def _conversation_text(
    tokenizer: PreTrainedTokenizerBase, row: Row, reply: str, chat_template: bool, bos: str
) -> str | None:
    if row.prompt and uses_chat_template(tokenizer, chat_template):
        text = _render(tokenizer, [*row.prompt, Message("assistant", reply)], add_generation_prompt=False)
        return text and text.rstrip()  # white space after the end-of-sequence token is not part of the reply
    return _add_bos(append_reply(row.text, reply), bos)


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool
) -> str | None:
    from jinja2 import TemplateError

    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt))
    except TemplateError:
        return None


def _find_added_bos(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the beginning-of-sequence token if the tokenizer starts texts with it, else an empty text."""
    bos: str | None = tokenizer.bos_token
    return bos if bos is not None and tokenizer(_PROBE)["input_ids"][0] == tokenizer.bos_token_id else ""


def _add_bos(text: str, bos: str) -> str:
    return text if text.startswith(bos) else f"{bos}{text}"


def _ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str | None]) -> list[list[int] | None]:
    present = [text for text in texts if text is not None]
    encoded = iter(tokenizer(present, add_special_tokens=False, verbose=False)["input_ids"] if present else [])
    return [None if text is None else next(encoded) for text in texts]
