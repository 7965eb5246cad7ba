"""Text to token ids: a row's prompt and a reply become prompt ids and completion ids.

With a chat template the ids are those of the template's own text. Without one, a prompt is its plain text
(`Row.text`), and the reply follows after a space unless the prompt ends in white space. Either way the
completion ends with a token that ends generation too, and a beginning-of-sequence token comes once, where the
tokenizer wants one. A text without a prompt is a completion, and no template has a part in it.

Tokenizers read the text of a control token (<|im_end|>) as that token. With a chat template only the template may
write control tokens: contents that hold one could end a reply or forge a turn. In a prompt it is taken apart, as
plain text; replies that hold one are recognized by `has_control_tokens`. Without a template a prompt is used as it is
written, control tokens included.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from rlhf.data.records import Message, Row, format_plain_prompt, format_transcript
from rlhf.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PromptFormat = Literal["template", "transcript", "plain"]
"""How a conversation becomes text: by the chat template, as `Human: ... Assistant:`, or a lone message as it is."""

_PROBE = "a"
_TAG = re.compile(r"</?\w+>")


def detect_prompt_format(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, chat_template: bool
) -> PromptFormat:
    """What the prompts of most `rows` look like to the model."""
    if uses_chat_template(tokenizer, chat_template):
        return "template"
    transcripts = sum(row.text == format_transcript(row.prompt) for row in rows)
    return "transcript" if 2 * transcripts > len(rows) else "plain"


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], form: PromptFormat
) -> list[int]:
    """Prompt ids of a conversation up to where the assistant replies, as rows of that form are trained.

    Raises:
        DataError: the tokenizer's chat template refuses these messages.
    """
    row = make_conversation_row(messages, form)
    ids = encode_prompts(tokenizer, [row], chat_template=form == "template")[0]
    if ids is None:
        roles = ", ".join(message.role for message in messages)
        raise DataError(
            f"the tokenizer's chat template refuses the roles {roles}; change them or set data.chat_template=false"
        )
    return ids


def make_conversation_row(messages: Sequence[Message], form: PromptFormat) -> Row:
    """A conversation that no data set holds, as a row of that form."""
    text = format_transcript(messages) if form == "transcript" else format_plain_prompt(messages)
    return Row(tuple(messages), text, None, None, None, "")


def _apart(found: re.Match[str]) -> str:
    """The text of a control token with a space in it, which makes it plain text; of one character, the space alone."""
    token = found[0]
    return f"{token[0]} {token[1:]}" if len(token) > 1 else " "


def _disarmed(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], chat_template: bool) -> Sequence[Row]:
    """The rows, control tokens that someone has written in their prompts taken apart where a template writes these."""
    if not uses_chat_template(tokenizer, chat_template):
        return rows
    control = compile_control_tokens(tokenizer)
    return [
        replace(row, prompt=tuple(Message(m.role, control.sub(_apart, m.content)) for m in row.prompt)) for row in rows
    ]


def uses_chat_template(tokenizer: PreTrainedTokenizerBase, wanted: bool) -> bool:
    """Whether prompts are written by a chat template: one is wanted, and the tokenizer has it."""
    return wanted and bool(tokenizer.chat_template)


def compile_control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches what a tokenizer reads as a control token.

    Those are its special tokens, and other added ones that its template writes (DeepSeek's <｜User｜>); but not tags
    like <think>, which belong to the contents and are no special tokens.
    """
    template = str(tokenizer.chat_template or "")
    names = set(tokenizer.all_special_tokens)
    for token in tokenizer.added_tokens_decoder.values():
        if token.special or (token.content in template and not _TAG.fullmatch(token.content)):
            names.add(token.content)
    longest_first = sorted((name for name in names if name.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def has_control_tokens(replies: Sequence[str], control: re.Pattern[str], *, templated: bool) -> bool:
    """Whether replies hold control tokens where they must not.

    Without a template a reply may end with them: data that was formatted beforehand has its end there.
    """
    if templated:
        return any(map(control.search, replies))
    return any(part.strip() for reply in replies for part in control.split(reply)[1:])


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, chat_template: bool
) -> list[list[int] | None]:
    """Prompt ids of each row; None where the chat template refuses its messages."""
    rows = _disarmed(tokenizer, rows, chat_template)
    return _ids(tokenizer, [_prompt(tokenizer, row, chat_template) for row in rows])


def encode_replies(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    replies: Sequence[str],
    prompts: Sequence[list[int] | None],
    *,
    chat_template: bool,
    end_ids: Sequence[int] | None = None,
) -> list[list[int] | None]:
    """Completion ids of a reply to each row, up to and including the first of `end_ids`.

    `prompts` are the rows' prompt ids. Prompt and completion ids together are the tokens of the whole text,
    unless the tokenizer would merge across their border: then the reply is tokenized alone, because
    generation starts from the prompt ids as they are.

    `end_ids` are the tokens that end generation (default: the end-of-sequence token). Where a reply has none, the
    end-of-sequence token is added; what a template writes after the first (Gemma: <end_of_turn>, then nothing of the
    reply), generation would never come to.
    """
    rows = _disarmed(tokenizer, rows, chat_template)
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
        completions.append(_ended(completion, end_ids or [tokenizer.eos_token_id], tokenizer.eos_token_id))
    return completions


def encode_documents(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts that stand alone: each with its beginning, where the tokenizer wants one, and one end."""
    found = tokenizer([_begun(tokenizer, text) for text in texts], add_special_tokens=False, verbose=False)["input_ids"]
    eos = tokenizer.eos_token_id
    return [ids if ids[-1:] == [eos] else [*ids, eos] for ids in found]


def _ended(ids: list[int], ends: Sequence[int], eos: int) -> list[int]:
    """The ids up to and including the first of `ends`; with `eos` where there is none."""
    first = next((position for position, token in enumerate(ids) if token in ends), None)
    return [*ids, eos] if first is None else ids[: first + 1]


def _prompt(tokenizer: PreTrainedTokenizerBase, row: Row, chat_template: bool) -> str | None:
    if row.prompt and uses_chat_template(tokenizer, chat_template):
        return _render(tokenizer, row.prompt, add_generation_prompt=True)
    return _begun(tokenizer, row.text)


def _whole(tokenizer: PreTrainedTokenizerBase, row: Row, reply: str, chat_template: bool) -> str | None:
    if row.prompt and uses_chat_template(tokenizer, chat_template):
        text = _render(tokenizer, [*row.prompt, Message("assistant", reply)], add_generation_prompt=False)
        return text and text.rstrip()  # what a template puts after the end-of-sequence token is no part of the reply
    space = "" if not row.text or row.text[-1:].isspace() else " "
    return _begun(tokenizer, f"{row.text}{space}{reply}")


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
