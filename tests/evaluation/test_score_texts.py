"""The user's sentences: read from lines and arguments, and scored as plain transformers scores them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rlhf.cli.evaluate import _converse
from rlhf.config.schema import Config
from rlhf.errors import DataError
from rlhf.evaluation.models import EvaluationDevice
from rlhf.evaluation.reward_scores import best_reply_probabilities, read_line
from tests.evaluation.conftest import Evaluate, by_transformers, printed_json, reward_model


@pytest.mark.parametrize(
    ("line", "prompt", "replies"),
    [
        ("cow\tmoo\n", "cow", ("moo",)),
        ("a cow\tmoo moo\tno\tgo\r\n", "a cow", ("moo moo", "no", "go")),
        ('{"prompt": "cow", "reply": "moo"}', "cow", ("moo",)),
        ('{"prompt": "cow", "replies": ["moo", "no\\nno"]}', "cow", ("moo", "no\nno")),
        ('{"prompt": "cow", "chosen": "moo", "rejected": "no"}', "cow", ("moo", "no")),
    ],
)
def test_lines_are_read(line: str, prompt: str, replies: tuple[str, ...]) -> None:
    question = read_line(line, "line 1")
    assert [(message.role, message.content) for message in question.prompt] == [("user", prompt)]
    assert question.replies == replies


def test_prompt_may_be_a_conversation() -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": content} for role, content in turns]
    for prompt in (messages, "Human: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"):
        reply_set = read_line(json.dumps({"prompt": prompt, "reply": "d"}), "line 1")
        assert [(message.role, message.content) for message in reply_set.prompt] == turns


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a prompt alone", "line 7: a reply is missing"),
        ("\tmoo", "line 7: empty prompt"),
        ('{"prompt": "a", "reply": 3}', "line 7: a reply is missing, or not a text"),
        ('{"prompt": "a", "replies": []}', "line 7: a reply is missing"),
        ('{"prompt": 3, "reply": "a"}', "line 7: prompt is a number, not text"),
        ('{"prompt": "a", "reply"', "line 7: not readable as JSON"),
    ],
)
def test_a_line_of_no_known_form_is_named(line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_line(line, "line 7")


def test_scores_are_those_of_transformers(
    evaluate: Evaluate, judge_folder: tuple[Path, Any], tokenizer: Any, tmp_path: Path
) -> None:
    other = reward_model(tmp_path / "other", tokenizer, "opt")
    models = {str(judge_folder[0]): judge_folder[1], str(tmp_path / "other"): other}
    given = 'cow\tmoo please\tgo away\n\n{"prompt": "owl", "reply": "hoot"}\n'
    document = printed_json(evaluate(*models, "--json", given=given))
    asked = [("cow", ["moo please", "go away"]), ("owl", ["hoot"])]
    assert document["kind"] == "sentences" and len(document["questions"]) == 2
    for (prompt, replies), question in zip(asked, document["questions"], strict=True):
        assert question["prompt"] == [{"role": "user", "content": prompt}]
        assert [answer["reply"] for answer in question["replies"]] == replies
        for name, model in models.items():
            expected = [by_transformers(model, tokenizer, prompt, reply) for reply in replies]
            assert [answer["scores"][name] for answer in question["replies"]] == pytest.approx(expected, abs=1e-4)
            total = sum(map(math.exp, expected))
            best = [math.exp(score) / total for score in expected]
            assert [answer["best"][name] for answer in question["replies"]] == pytest.approx(best, abs=1e-4)


def test_arguments_are_a_question_too_and_tsv_has_scores(
    evaluate: Evaluate, judge_folder: tuple[Path, Any], tokenizer: Any
) -> None:
    folder, model = judge_folder
    expected = [by_transformers(model, tokenizer, "cow", reply) for reply in ("moo", "no")]
    head, *rows = evaluate(folder, "--prompt", "cow", "--reply", "moo", "--reply", "no", "--tsv").stdout.splitlines()
    assert head.split("\t") == ["prompt", "reply", "score", "P(best)"]
    cells = [row.split("\t") for row in rows]
    assert [row[:2] for row in cells] == [["cow", "moo"], ["cow", "no"]]
    assert [float(row[2]) for row in cells] == pytest.approx(expected, abs=1e-3)
    assert float(cells[0][3]) == pytest.approx(1 / (1 + math.exp(expected[1] - expected[0])), abs=1e-3)
    head, row = evaluate(folder, "--tsv", given="cow\tmoo\n").stdout.splitlines()
    assert head.split("\t") == ["prompt", "reply", "score"] and float(row.split("\t")[2]) == pytest.approx(
        expected[0], abs=1e-3
    )


def test_line_that_cannot_be_scored_is_an_error(
    evaluate: Evaluate, judge_folder: tuple[Path, Any], model_folder: Path
) -> None:
    assert "standard input is empty" in str(evaluate(judge_folder[0], given="\n").exception)
    long = str(evaluate(judge_folder[0], given="cow\tmoo\ncow\t" + "moo " * 200).exception)
    assert "standard input:2: prompt and reply have" in long and "accepts 128" in long
    assert "its weights lack score.weight" in str(evaluate(model_folder, given="cow\tmoo").exception)


def test_chances_are_finite_whatever_the_scores() -> None:
    assert best_reply_probabilities([1000.0, 999.0]) == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e)])
    assert best_reply_probabilities([-1e6, 1e6]) == [0, 1]


def test_a_terminal_is_asked_for_prompts_and_replies(
    device: EvaluationDevice,
    judge_folder: tuple[Path, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    typed = iter(["cow", "moo please", "go", "", "", "owl", "moo " * 200, "", "dog", "woof", ""])

    def answer(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", answer)
    _converse(device, Config(), [str(judge_folder[0])])
    printed = capsys.readouterr().out
    rows = [line.split("│")[1:3] for line in printed.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [["cow", "moo please"], ["cow", "go"], ["dog", "woof"]]
    assert "(prompt: prompt and reply have" in printed
