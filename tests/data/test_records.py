"""Every known format becomes the same canonical row; records that cannot are rejected with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.config.schema import ColumnsConfig
from rlhf.data.formats import ColumnMapping, recognize_columns
from rlhf.data.records import Message, RejectedRecordError, Row, format_plain_prompt, format_transcript, parse_record
from rlhf.data.report import find_remedy
from rlhf.errors import DataError

USER, ASSISTANT = "user", "assistant"


def row_of(record: dict[str, Any], **columns: str) -> Row:
    return parse_record(
        record, recognize_columns(record.keys(), ColumnsConfig(**columns), "rows.jsonl"), "rows.jsonl:1"
    )


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": (USER, ASSISTANT)[n % 2], "content": content} for n, content in enumerate(contents)]


def prompt_of(*contents: str) -> tuple[Message, ...]:
    return tuple(Message(turn["role"], turn["content"]) for turn in turns(*contents))


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Hi", "response": "Hello"},
        {"prompt": "Hi", "completion": " Hello"},
        {"question": "Hi", "answer": "Hello"},
        {"instruction": "Hi", "output": "Hello"},
        {"instruction": "Hi", "input": "", "output": "Hello"},
        {"prompt": turns("Hi"), "completion": [{"role": ASSISTANT, "content": "Hello"}]},
        {"messages": turns("Hi", "Hello")},
        {"prompt": "Hi", "prompt_id": "7", "messages": turns("Hi", "Hello")},
    ],
)
def test_demonstrations_are_recognized_by_their_columns(record: dict[str, Any]) -> None:
    row = row_of(record)
    assert (row.prompt, row.response, row.chosen) == (prompt_of("Hi"), "Hello", None)
    assert row.source == "rows.jsonl:1"


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
        {
            "prompt": "Hi",
            "chosen": turns("Hi", "Hello"),
            "rejected": turns("Hi", "No"),
            "messages": turns("Hi", "Hello"),
        },
        {"prompt": turns("Hi"), "chosen": turns("", "Hello")[1:], "rejected": turns("", "No")[1:]},
        {"chosen": turns("Hi", "Hello"), "rejected": turns("Hi", "No")},
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: No"},
        {"prompt": "\n\nHuman: Hi\n\nAssistant:", "response": " Hello", "chosen": " Hello", "rejected": " No"},
    ],
)
def test_preferences_are_recognized_by_their_columns(record: dict[str, Any]) -> None:
    row = row_of(record)
    assert (row.prompt, row.chosen, row.rejected) == (prompt_of("Hi"), "Hello", "No")
    assert row.response == "Hello", "the preferred reply serves as demonstration"


def test_a_preference_may_have_a_demonstration_of_its_own() -> None:
    assert row_of({"prompt": "Hi", "response": "Hm", "chosen": "Hello", "rejected": "No"}).response == "Hm"


def test_a_lone_prompt_is_a_row_without_replies() -> None:
    row = row_of({"prompt": "Hi"})
    assert (row.response, row.chosen, row.rejected) == (None, None, None)


def test_the_input_of_an_instruction_follows_after_a_blank_line() -> None:
    assert row_of({"instruction": "Translate.", "input": "Hallo", "output": "Hello"}).text == "Translate.\n\nHallo"


def test_only_the_last_assistant_turn_is_the_reply() -> None:
    text = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\nd\n\nAssistant: "
    row = row_of({"chosen": text + "e", "rejected": text + "f"})
    assert row.prompt == prompt_of("a", "b", "c\nd")
    assert (row.chosen, row.rejected) == ("e", "f")


def test_messages_that_end_with_the_user_are_a_prompt() -> None:
    assert row_of({"messages": turns("Hi")}).response is None


def test_a_lone_prompt_keeps_its_text_and_a_conversation_becomes_a_transcript() -> None:
    assert row_of({"prompt": "Once upon a time "}).text == "Once upon a time "
    assert row_of({"prompt": "\n\nHuman: Hi\n\nAssistant:"}).text == "Human: Hi\n\nAssistant:"
    assert row_of({"messages": turns("Hi", "Hello")}).text == "Human: Hi\n\nAssistant:"


def test_transcripts_name_the_speakers() -> None:
    messages = (Message("system", "Be kind."), *prompt_of("a", "b", "c"))
    assert format_transcript(messages) == "Be kind.\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    assert format_plain_prompt(prompt_of("a")) == "a"


def test_named_columns_win_over_the_usual_ones() -> None:
    row = row_of({"prompt": "x", "q": "Hi", "good": "Hello", "bad": "No"}, prompt="q", chosen="good", rejected="bad")
    assert (row.text, row.chosen, row.rejected) == ("Hi", "Hello", "No")


def test_a_named_conversation_wins_over_other_columns() -> None:
    row = row_of({"prompt": "x", "talk": turns("Hi", "Hello")}, messages="talk")
    assert (row.prompt, row.response) == (prompt_of("Hi"), "Hello")


def test_a_named_column_that_is_missing_is_an_error_that_lists_those_found() -> None:
    with pytest.raises(DataError, match=r"no column 'q' \(columns.prompt\); found: a, b$"):
        recognize_columns(["b", "a"], ColumnsConfig(prompt="q"), "rows.csv")


def test_unknown_columns_are_an_error_that_lists_them_and_the_known_formats() -> None:
    with pytest.raises(DataError, match=r"rows.csv: .*found: body, title; known: .*prompt/chosen/rejected.*messages"):
        recognize_columns(["title", "body"], ColumnsConfig(), "rows.csv")


def test_half_a_preference_is_an_error_that_names_the_other_half() -> None:
    with pytest.raises(DataError, match="needs a column 'rejected' too"):
        recognize_columns(["prompt", "chosen"], ColumnsConfig(), "rows.csv")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "", "response": "a"}, "empty prompt"),
        ({"prompt": " \n", "response": "a"}, "empty prompt"),
        ({"prompt": None, "response": "a"}, "empty prompt"),
        ({"messages": turns("")}, "empty prompt"),
        ({"messages": []}, "empty prompt"),
        ({"prompt": 3, "response": "a"}, "prompt is a number, not text"),
        ({"prompt": True, "response": "a"}, "prompt is true or false, not text"),
        ({"prompt": {"text": "a"}, "response": "a"}, "prompt is an object, not text"),
        ({"prompt": ["a"], "response": "b"}, "prompt: a turn is not an object of role and content"),
        ({"prompt": "a", "response": ["b"]}, "response: a turn is not an object of role and content"),
        ({"instruction": "a", "input": 2.5, "output": "b"}, "input is a number, not text"),
        ({"question": "half a smile \ud83d", "response": "b"}, "half a character (surrogate)"),
        ({"prompt": "a", "response": "\ud83d"}, "half a character (surrogate)"),
        ({"instruction": "a", "input": "\ude00", "output": "b"}, "half a character (surrogate)"),
        ({"messages": turns("a", "\ud83d")}, "half a character (surrogate)"),
        ({"chosen": "Human: a\n\nAssistant: \ud83d", "rejected": "Human: a"}, "half a character (surrogate)"),
        ({"messages": 3}, "messages is a number, not a list of turns"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages: unknown role 'tool'"),
        ({"messages": [{"role": "wizard " * 9, "content": "a"}]}, "messages: unknown role 'wizard wizard wizard...'"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages: unknown role a list"),
        ({"messages": [{"content": "a"}]}, "messages: a turn is not an object of role and content"),
        ({"messages": [{"from": "human"}]}, "messages: a turn is not an object of role and content"),
        ({"conversations": [{"from": "bing", "value": "a"}]}, "conversations: unknown role 'bing'"),
        ({"messages": [{"role": USER, "content": [{"text": "a"}]}]}, "messages: content is a list, not text"),
        (
            {"chosen": "Human: a\n\nAssistant: b", "rejected": "Human: x\n\nAssistant: c"},
            "prompts of chosen and rejected differ",
        ),
        ({"chosen": "Human: a", "rejected": "Human: a"}, "chosen does not end with the assistant's turn"),
        ({"prompt": "a", "response": turns("b")}, "response does not end with the assistant's turn"),
    ],
)
def test_unusable_records_are_rejected_with_a_reason(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(RejectedRecordError) as rejected:
        row_of(record)
    assert rejected.value.reason == reason
    assert find_remedy(reason)


def test_a_text_alone_says_what_can_be_done() -> None:
    with pytest.raises(DataError, match=r"where its prompt ends; give .*, or set columns.text to train"):
        recognize_columns(["text"], ColumnsConfig(), "rows.json")
    assert recognize_columns(["text", "prompt"], ColumnsConfig(), "rows.json").prompt == "prompt"


def test_rows_of_mixed_columns_are_told_from_rows_that_lack_a_value() -> None:
    """Readers of tables give None for a column that a row has not."""
    columns = ColumnMapping(prompt="prompt", response="response", chosen="chosen", rejected="rejected")
    question: dict[str, Any] = {"question": "Hi", "answer": "Hello"}
    for absent in ({}, dict.fromkeys(("prompt", "response", "chosen", "rejected"))):
        with pytest.raises(
            RejectedRecordError, match=r"other columns than the source's \(answer, question\)"
        ) as rejected:
            parse_record(absent | question, columns, "")
        assert find_remedy(rejected.value.reason)
        demonstration = parse_record(absent | {"prompt": "Hi", "response": "Hello"}, columns, "")
        assert (demonstration.response, demonstration.chosen, demonstration.rejected) == ("Hello", None, None)
        preference = parse_record(absent | {"prompt": "Hi", "chosen": "Hello", "rejected": "No"}, columns, "")
        assert (preference.response, preference.chosen, preference.rejected) == ("Hello", "Hello", "No")
        with pytest.raises(RejectedRecordError, match="empty prompt"):
            parse_record(absent | {"response": "Hello"}, columns, "")
    assert parse_record({"prompt": "Hi", "chosen": None, "rejected": "No"}, columns, "").chosen == ""


def test_a_record_without_its_reply_has_an_empty_one() -> None:
    assert parse_record({"prompt": "a"}, ColumnMapping(prompt="prompt", response="response"), "").response == ""
    assert row_of({"chosen": "Human: a\n\nAssistant:", "rejected": "Human: a\n\nAssistant: b"}).chosen == ""
