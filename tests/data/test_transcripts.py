"""Conversations in every form become the same turns, and text that only speaks of "Assistant:" stays whole."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.data.formats import ColumnMapping
from rlhf.data.records import Message, parse_record

PROMPT = ColumnMapping(prompt="prompt", response="response", chosen="chosen", rejected="rejected")


def prompt_of(*contents: str) -> tuple[Message, ...]:
    return tuple(Message(("user", "assistant")[n % 2], content) for n, content in enumerate(contents))


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("Human: I have a question. Assistant:", ["I have a question."]),
        (" Human: Hi Assistant: ", ["Hi"]),
        ("Human: a Assistant: b Human: c Assistant:", ["a", "b", "c"]),
        ("Human: a\nAssistant: b\nHuman: c\nAssistant:", ["a", "b", "c"]),
        ("\n\nHuman: a\n\nAssistant: b\n\nHuman: c Assistant:", ["a", "b", "c"]),
        ("USER: a ASSISTANT:", ["a"]),
        ("USER: a ASSISTANT: b</s>USER: c ASSISTANT:", ["a", "b", "c"]),
        ("USER: a\nASSISTANT: b\nUSER: c\nASSISTANT: ", ["a", "b", "c"]),
        # Not told apart: the last turn is the user's, and so is all that it says.
        ("Human: What does Assistant: mean? Assistant:", ["What does Assistant: mean?"]),
        ("Human: Write Human: twice Assistant:", ["Write Human: twice"]),
        # With blank lines between turns, those alone tell them apart.
        ("\n\nHuman: a\n\nAssistant: say Human: b\n\nHuman: c\n\nAssistant:", ["a", "say Human: b", "c"]),
        ("Human: Who says Assistant: here?\n\nAssistant:", ["Who says Assistant: here?"]),
        ("Human: Who says Assistant: here?", ["Who says Assistant: here?"]),
        # No transcript at all.
        ("Please end with Assistant:", ["Please end with Assistant:"]),
        ("USER: a name in capitals", ["USER: a name in capitals"]),
        ("USER: no such Assistant:", ["USER: no such Assistant:"]),
    ],
)
def test_a_prompt_is_read_as_turns(text: str, turns: list[str]) -> None:
    row = parse_record({"prompt": text, "response": "r"}, PROMPT, "")
    assert row.prompt == prompt_of(*turns)


def test_line_ends_of_windows_tell_turns_apart_too() -> None:
    lines = "Human: a\n\nAssistant: say Assistant: b\nc\n\nHuman: d\n\nAssistant:"
    rows = [
        parse_record(
            {"chosen": text + " e", "rejected": text + " f"}, ColumnMapping(chosen="chosen", rejected="rejected"), ""
        )
        for text in (lines, lines.replace("\n", "\r\n"))
    ]
    assert rows[0] == rows[1] and rows[0].prompt == prompt_of("a", "say Assistant: b\nc", "d")
    assert parse_record({"prompt": lines.replace("\n", "\r\n"), "response": "r"}, PROMPT, "").prompt == rows[0].prompt


def test_no_second_name_of_the_assistant_is_added() -> None:
    row = parse_record({"prompt": "Human: I have a question. Assistant:", "response": "r"}, PROMPT, "")
    assert row.text == "Human: I have a question.\n\nAssistant:"


@pytest.mark.parametrize("prompt", ["Human: Hi", "\n\nHuman: Hi\n\n", "Human: Hi\n", "USER: x ASSISTANT: y"])
def test_replies_that_bring_the_name_which_the_prompt_lacks_lose_it(prompt: str) -> None:
    record = {"prompt": prompt, "chosen": "Assistant: Hello Assistant: you", "rejected": "\nAssistant:No"}
    row = parse_record(record, PROMPT, "")
    if prompt.startswith("USER"):  # it ends with a reply, and is no transcript that waits for one
        assert (row.chosen, row.rejected) == ("Assistant: Hello Assistant: you", "Assistant:No")
    else:
        assert (row.prompt, row.chosen, row.rejected) == (prompt_of("Hi"), "Hello Assistant: you", "No")
        assert row.response == "Hello Assistant: you"


def test_an_inline_prompt_without_its_end_is_read_as_turns_where_the_replies_bring_it() -> None:
    record = {"prompt": "Human: a Assistant: b Human: c", "chosen": "Assistant: d", "rejected": "Assistant: e"}
    row = parse_record(record, PROMPT, "")
    assert (row.prompt, row.chosen, row.rejected) == (prompt_of("a", "b", "c"), "d", "e")


@pytest.mark.parametrize(
    ("prompt", "replies"),
    [
        ("\n\nHuman: Write a dialogue.\n\nAssistant:", ("Assistant: hi", "Assistant: no")),
        ("Write a dialogue.", ("Assistant: hi", "Assistant: no")),
        ("Human: Write a dialogue.", ("Assistant: hi", "no")),
    ],
)
def test_other_replies_keep_what_they_begin_with(prompt: str, replies: tuple[str, str]) -> None:
    row = parse_record({"prompt": prompt, "chosen": replies[0], "rejected": replies[1]}, PROMPT, "")
    assert (row.chosen, row.rejected) == replies


def test_where_all_replies_of_a_source_begin_with_the_name_none_keeps_it() -> None:
    record = {"prompt": "Hi", "chosen": "Assistant: a", "rejected": "Assistant: b"}
    row = parse_record(
        record, ColumnMapping(prompt="prompt", chosen="chosen", rejected="rejected", speaker_in_replies=True), ""
    )
    assert (row.prompt, row.chosen, row.rejected) == (prompt_of("Hi"), "a", "b")


def test_a_reply_in_a_transcript_is_not_cut_where_it_speaks_of_turns() -> None:
    text = "\n\nHuman: Show me.\n\nAssistant: So: Human: hi Assistant:"
    row = parse_record(
        {"chosen": text, "rejected": f"{text} no"}, ColumnMapping(chosen="chosen", rejected="rejected"), ""
    )
    assert (row.chosen, row.rejected) == ("So: Human: hi Assistant:", "So: Human: hi Assistant: no")


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_turns_of_sharegpt_are_turns(column: str) -> None:
    turns: list[dict[str, Any]] = [{"from": "system", "value": "Be kind."}, {"from": "human", "value": "Hi"}]
    row = parse_record({column: [*turns, {"from": "gpt", "value": "Hello"}]}, ColumnMapping(messages=column), "")
    assert row.prompt == (Message("system", "Be kind."), Message("user", "Hi"))
    assert row.response == "Hello"
