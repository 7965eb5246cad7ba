"""Records of every known format and conversations in every form become the same rows, or have a reason why not."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.config.schema import ColumnsConfig
from rlhf.data.formats import ColumnMapping, recognize_columns
from rlhf.data.records import (
    Message,
    RejectedRecordError,
    Row,
    format_plain_prompt,
    format_transcript,
    format_with_template,
    parse_record,
)
from rlhf.data.report import find_remedy
from rlhf.errors import DataError
from tests.data.rows import prompt_of, turns

PAIR = ColumnMapping(prompt="prompt", response="response", chosen="chosen", rejected="rejected")
TRANSCRIPTS = ColumnMapping(chosen="chosen", rejected="rejected")


def row_of(record: dict[str, Any], **columns: str) -> Row:
    mapping = recognize_columns(record.keys(), ColumnsConfig(**columns), "rows.jsonl")
    return parse_record(record, mapping, "rows.jsonl:1")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Hi", "response": "Hello"},
        {"prompt": "Hi", "completion": " Hello"},
        {"question": "Hi", "answer": "Hello"},
        {"instruction": "Hi", "output": "Hello"},
        {"instruction": "Hi", "input": "", "output": "Hello"},
        {"prompt": turns("Hi"), "completion": [{"role": "assistant", "content": "Hello"}]},
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


def test_row_fields_follow_from_the_columns() -> None:
    assert row_of({"prompt": "Hi", "response": "Hm", "chosen": "Hello", "rejected": "No"}).response == "Hm"
    row = row_of({"prompt": "Hi"})
    assert (row.response, row.chosen, row.rejected) == (None, None, None)
    assert row_of({"messages": turns("Hi")}).response is None
    assert row_of({"instruction": "Translate.", "input": "Hallo", "output": "Hello"}).text == "Translate.\n\nHallo"


def test_only_the_last_assistant_turn_is_the_reply() -> None:
    text = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\nd\n\nAssistant: "
    row = row_of({"chosen": text + "e", "rejected": text + "f"})
    assert row.prompt == prompt_of("a", "b", "c\nd")
    assert (row.chosen, row.rejected) == ("e", "f")


def test_single_message_keeps_its_text_unlike_a_conversation() -> None:
    assert row_of({"prompt": "Once upon a time "}).text == "Once upon a time "
    assert row_of({"prompt": "\n\nHuman: Hi\n\nAssistant:"}).text == "Human: Hi\n\nAssistant:"
    assert row_of({"messages": turns("Hi", "Hello")}).text == "Human: Hi\n\nAssistant:"
    messages = (Message("system", "Be kind."), *prompt_of("a", "b", "c"))
    assert format_transcript(messages) == "Be kind.\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    assert format_plain_prompt(prompt_of("a")) == "a"


def test_named_columns_override_the_usual_ones() -> None:
    row = row_of({"prompt": "x", "q": "Hi", "good": "Hello", "bad": "No"}, prompt="q", chosen="good", rejected="bad")
    assert (row.text, row.chosen, row.rejected) == ("Hi", "Hello", "No")
    row = row_of({"prompt": "x", "talk": turns("Hi", "Hello")}, messages="talk")
    assert (row.prompt, row.response) == (prompt_of("Hi"), "Hello")
    assert row_of({"text": "x", "prompt": "Hi"}).text == "Hi"


@pytest.mark.parametrize(
    ("present", "columns", "message"),
    [
        (["b", "a"], {"prompt": "q"}, r"no column 'q' \(columns.prompt\); found: a, b$"),
        (["title", "body"], {}, r"rows.csv: .*found: body, title; known: .*prompt/chosen/rejected.*messages"),
        (["prompt", "chosen"], {}, "needs a column 'rejected' too"),
        (["text"], {}, r"where its prompt ends; give .*, or set columns.text to train"),
    ],
)
def test_unknown_columns_are_an_error(present: list[str], columns: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        recognize_columns(present, ColumnsConfig(**columns), "rows.csv")


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
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages: content is a list, not text"),
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
    assert str(rejected.value) == reason
    assert find_remedy(reason)


def test_row_of_other_columns_differs_from_a_missing_value() -> None:
    """Readers of tables give None for a column that a row has not."""
    question: dict[str, Any] = {"question": "Hi", "answer": "Hello"}
    for absent in ({}, dict.fromkeys(("prompt", "response", "chosen", "rejected"))):
        reason = r"other columns than the source's \(answer, question\)"
        with pytest.raises(RejectedRecordError, match=reason) as rejected:
            parse_record(absent | question, PAIR, "")
        assert find_remedy(str(rejected.value))
        demonstration = parse_record(absent | {"prompt": "Hi", "response": "Hello"}, PAIR, "")
        assert (demonstration.response, demonstration.chosen, demonstration.rejected) == ("Hello", None, None)
        preference = parse_record(absent | {"prompt": "Hi", "chosen": "Hello", "rejected": "No"}, PAIR, "")
        assert (preference.response, preference.chosen, preference.rejected) == ("Hello", "Hello", "No")
        with pytest.raises(RejectedRecordError, match="empty prompt"):
            parse_record(absent | {"response": "Hello"}, PAIR, "")
    assert parse_record({"prompt": "Hi", "chosen": None, "rejected": "No"}, PAIR, "").chosen == ""


def test_missing_reply_is_an_empty_text() -> None:
    assert parse_record({"prompt": "a"}, ColumnMapping(prompt="prompt", response="response"), "").response == ""
    assert row_of({"chosen": "Human: a\n\nAssistant:", "rejected": "Human: a\n\nAssistant: b"}).chosen == ""


@pytest.mark.parametrize(
    ("text", "contents"),
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
def test_transcript_prompt_is_split_into_turns(text: str, contents: list[str]) -> None:
    row = parse_record({"prompt": text, "response": "r"}, PAIR, "")
    assert row.prompt == prompt_of(*contents)


def test_windows_line_ends_separate_turns_too() -> None:
    lines = "Human: a\n\nAssistant: say Assistant: b\nc\n\nHuman: d\n\nAssistant:"
    for text in (lines, lines.replace("\n", "\r\n")):
        row = parse_record({"chosen": f"{text} e", "rejected": f"{text} f"}, TRANSCRIPTS, "")
        assert row.prompt == prompt_of("a", "say Assistant: b\nc", "d")
        assert parse_record({"prompt": text, "response": "r"}, PAIR, "").prompt == row.prompt


def test_assistant_name_is_not_added_twice() -> None:
    row = parse_record({"prompt": "Human: I have a question. Assistant:", "response": "r"}, PAIR, "")
    assert row.text == "Human: I have a question.\n\nAssistant:"


@pytest.mark.parametrize(
    ("prompt", "replies", "contents", "expected"),
    [
        *(
            (prompt, ("Assistant: Hello Assistant: you", "\nAssistant:No"), ["Hi"], ("Hello Assistant: you", "No"))
            for prompt in ("Human: Hi", "\n\nHuman: Hi\n\n", "Human: Hi\n")
        ),
        # An inline prompt is read as turns if the replies bring the name at its end.
        ("Human: a Assistant: b Human: c", ("Assistant: d", "Assistant: e"), ["a", "b", "c"], ("d", "e")),
        # Other replies keep the name.
        ("USER: x ASSISTANT: y", ("Assistant: a", "\nAssistant:b"), ["USER: x ASSISTANT: y"], None),
        ("\n\nHuman: A dialogue.\n\nAssistant:", ("Assistant: hi", "Assistant: no"), ["A dialogue."], None),
        ("A dialogue.", ("Assistant: hi", "Assistant: no"), ["A dialogue."], None),
        ("Human: A dialogue.", ("Assistant: hi", "no"), ["A dialogue."], None),
    ],
)
def test_replies_lose_the_name_that_the_prompt_lacks(
    prompt: str, replies: tuple[str, str], contents: list[str], expected: tuple[str, str] | None
) -> None:
    row = parse_record({"prompt": prompt, "chosen": replies[0], "rejected": replies[1]}, PAIR, "")
    assert row.prompt == prompt_of(*contents)
    assert (row.chosen, row.rejected) == (expected or tuple(reply.strip() for reply in replies))


def test_replies_lose_the_name_if_all_of_the_source_have_it() -> None:
    columns = ColumnMapping(prompt="prompt", chosen="chosen", rejected="rejected", speaker_in_replies=True)
    row = parse_record({"prompt": "Hi", "chosen": "Assistant: a", "rejected": "Assistant: b"}, columns, "")
    assert (row.prompt, row.chosen, row.rejected) == (prompt_of("Hi"), "a", "b")


def test_transcript_reply_may_mention_turns() -> None:
    text = "\n\nHuman: Show me.\n\nAssistant: So: Human: hi Assistant:"
    row = parse_record({"chosen": text, "rejected": f"{text} no"}, TRANSCRIPTS, "")
    assert (row.chosen, row.rejected) == ("So: Human: hi Assistant:", "So: Human: hi Assistant: no")


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_sharegpt_turns_are_messages(column: str) -> None:
    sharegpt: list[dict[str, Any]] = [{"from": "system", "value": "Be kind."}, {"from": "human", "value": "Hi"}]
    row = parse_record({column: [*sharegpt, {"from": "gpt", "value": "Hello"}]}, ColumnMapping(messages=column), "")
    assert row.prompt == (Message("system", "Be kind."), Message("user", "Hi"))
    assert row.response == "Hello"


def test_conversation_has_the_template_around_each_question() -> None:
    messages = [Message("system", "Be {kind}."), *prompt_of("{prompt}?", "Fig.", "More?")]
    text = format_with_template(messages, "Q: {prompt} A:")
    assert text == "Be {kind}.\n\nQ: {prompt}? A: Fig.\n\nQ: More? A:"
    assert format_with_template(prompt_of("a", "b", "c"), "Human: {prompt}\n\nAssistant:") == format_transcript(
        prompt_of("a", "b", "c")
    )
    assert format_with_template(prompt_of("a", "b"), "{prompt}\n") == "a\nb"


@pytest.mark.parametrize(
    "prompt", ["One more?", "Human: One more?\n\nAssistant:", [{"role": "user", "content": "One more?"}]]
)
def test_template_replaces_the_names_of_a_transcript(prompt: Any) -> None:
    row = parse_record(
        {"q": prompt, "a": " Plum."}, ColumnMapping(prompt="q", response="a", template="Q: {prompt} A:"), ""
    )
    assert (row.text, row.prompt, row.response) == ("Q: One more? A:", prompt_of("One more?"), "Plum.")
