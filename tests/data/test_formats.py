"""Nested columns, preference labels and margins: the column that decides is asked, and none is ignored."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from accelerators import ShapePolicy
from rlhf.config.loader import parse_yaml
from rlhf.config.schema import DataConfig, Stage, build_config
from rlhf.data.batches import collate_reward
from rlhf.data.load_sources import read_sources
from rlhf.data.records import Row
from rlhf.errors import ConfigError, DataError
from tests.data.rows import load, parse, prompt_of, write_jsonl


def read(folder: Path, rows: list[Any], stage: Stage = "sft", **dataset: Any) -> list[Row]:
    return parse(stage, path=write_jsonl(folder / "rows.jsonl", rows), **dataset).rows


def test_nested_column_is_reached_by_its_path(tmp_path: Path) -> None:
    rows = [{"question": {"full_text": "Who?", "id": 1}, "answers": [{"text": "Ann"}, {"text": "Bob"}]}]
    columns = {"prompt": "question.full_text", "response": "answers.1.text"}
    (row,) = read(tmp_path, rows, columns=columns)
    assert (row.prompt, row.response) == (prompt_of("Who?"), "Bob")
    rows = [{"q.text": "outer", "q": {"text": "inner"}, "response": "r"}]
    (row,) = read(tmp_path, rows, columns={"prompt": "q.text"})
    assert row.text == "outer", "a column of exactly that name has precedence"


def test_row_without_the_nested_column_lacks_only_its_value(tmp_path: Path) -> None:
    rows = [{"query": f"q {n}", "good": [{"text": "yes"}], "bad": [{"text": "no"}] * n} for n in range(2)]
    columns = {"prompt": "query", "chosen": "good.0.text", "rejected": "bad.0.text"}
    pairs = [(row.chosen, row.rejected) for row in read(tmp_path, rows, columns=columns)]
    assert pairs == [("yes", ""), ("yes", "no")]


@pytest.mark.parametrize(
    ("value", "path", "description"),
    [
        ({"id": 1, "full_text": "a"}, "question.text", "question has the keys id, full_text"),
        ({"a": {"b": "c"}}, "question.a.text", "question.a has the keys b"),
        (["a", "b"], "question.2", "question is a list of 2 (the first is 0)"),
        (["a", "b"], "question.text", "question is a list of 2 (the first is 0)"),
        ([], "question.0", "question is empty"),
        ("a", "question.text", "question is text"),
        ([{"text": 3}], "question.0.text.now", "question.0.text is a number"),
        ({str(n): n for n in range(15)}, "question.x", "10, 11 and 3 more"),
        ({"text": "a"}, "questions.text", "found: question, response"),
    ],
)
def test_missing_nested_column_error_describes_the_value(
    tmp_path: Path, value: Any, path: str, description: str
) -> None:
    with pytest.raises(DataError) as error:
        read(tmp_path, [{"question": value, "response": "r"}], columns={"prompt": path})
    assert f"rows.jsonl: no column '{path}' (columns.prompt); " in str(error.value)
    assert str(error.value).endswith(description)


PAIR = {"first": "a", "second": "b"}
BY_HAND = {"columns": {"chosen": "a", "rejected": "b"}}
A_WINS, B_WINS = ("A", "B", ""), ("B", "A", "")
NO_LABEL = (None, None, "no preference: the label matches neither reply")
NO_SCORE = (None, None, "no preference: a score is not a number")


def preferred(folder: Path, rows: list[dict[str, Any]], **dataset: Any) -> list[tuple[str | None, str | None, str]]:
    """Return (chosen, rejected, why neither) of each record; its replies are columns a and b."""
    rows = [{"prompt": f"p {n}", "a": "A", "b": "B"} | row for n, row in enumerate(rows)]
    return [(row.chosen, row.rejected, row.undecided) for row in read(folder, rows, "reward", **dataset)]


@pytest.mark.parametrize(
    ("prefer", "values"),
    [
        ({"first": 1}, [1, 0, 1]),
        ({"first": 1}, ["1", "0", " 1 "]),
        ({"first": "1"}, [1.0, 0.0, 1]),
        ({"first": 1.0}, ["1.0", "0.0", "1"]),
        ({"first": 12345678}, [12345678, 12345679, "12345678"]),
        ({"first": 0.5}, [0.5, 1.5, "0.5"]),
        ({"first": True}, [True, False, True]),
        ({"first": True}, ["True", "False", "TRUE"]),
        ({"first": "False"}, [False, True, "FALSE"]),
        ({"first": "true"}, [True, False, True]),
        ({"first": "A"}, ["A", "B", "A"]),
        ({"first": 0, "second": 1}, [0, 1, 0]),
    ],
)
def test_label_decides(tmp_path: Path, prefer: dict[str, Any], values: list[Any]) -> None:
    rows = [{"labels": value} for value in values]
    dataset = {"columns": PAIR, "prefer": {"label": "labels", **prefer}}
    assert preferred(tmp_path, rows, **dataset) == [A_WINS, B_WINS, A_WINS]


@pytest.mark.parametrize(
    ("prefer", "values", "expected"),
    [
        ({"first": 1, "second": 0}, (1, 0, "tie", None, [1]), [A_WINS, B_WINS, *[NO_LABEL] * 3]),
        ({"first": 1}, (1.0, float("nan"), None, " ", "nan"), [A_WINS, *[NO_LABEL] * 4]),
    ],
)
def test_labels_without_meaning_leave_no_preference(
    tmp_path: Path, prefer: dict[str, Any], values: tuple[Any, ...], expected: list[Any]
) -> None:
    rows = [{"x": value} for value in values]
    assert preferred(tmp_path, rows, columns=PAIR, prefer={"label": "x", **prefer}) == expected


def test_label_with_other_values_than_named_is_an_error(tmp_path: Path) -> None:
    rows = [{"labels": value} for value in ("a", "b", "tie")]
    with pytest.raises(DataError, match=r'"labels" has several .* than a; found: a, b, tie; set prefer.second'):
        preferred(tmp_path, rows, columns=PAIR, prefer={"label": "labels", "first": "a"})
    with pytest.raises(DataError, match=r'"labels" never equals x \(prefer.first\); found: a, b, tie;'):
        preferred(tmp_path, rows, columns=PAIR, prefer={"label": "labels", "first": "x"})


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ((0.5, -0.5), A_WINS),
        ((-0.5, 0.5), B_WINS),
        (("10", "9"), A_WINS),  # as numbers: as texts, 9 would be higher
        ((0.0, 0), (None, None, "no preference: equal scores")),
        ((None, 1), NO_SCORE),
        (("nan", 1), NO_SCORE),
        ((True, 0), NO_SCORE),
    ],
)
def test_higher_score_decides(tmp_path: Path, scores: tuple[Any, Any], expected: tuple[Any, ...]) -> None:
    rows = [{"s": {"a": scores[0]}, "t": scores[1]}]
    assert preferred(tmp_path, rows, columns=PAIR, prefer={"scores": ["s.a", "t"]}) == [expected]


def test_tie_is_dropped_but_its_prompt_serves_ppo(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"cow {n}", "a": "moo", "b": "baa", "x": n % 3, "y": 1} for n in range(90)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    dataset = {"path": path, "columns": PAIR, "prefer": {"scores": ["x", "y"]}}
    reports = {
        stage: load(tokenizer, dataset | {"stages": [stage]}, stage=stage).reports[0]
        for stage in ("sft", "reward", "ppo")
    }
    assert {stage: report.used for stage, report in reports.items()} == {"sft": 60, "reward": 60, "ppo": 90}
    assert reports["sft"].dropped == reports["reward"].dropped == {"no preference: equal scores": (30, "rows.jsonl:2")}


CERTAIN = ("labels", "label", "Preference", "winner", "score_0", "score_A", "better_response_id")
LIKELY = ("winner_model_a", "overall_preference", "scores", "rating", "isBetter", "safer_response_id", "b_rank")


@pytest.mark.parametrize("name", [*CERTAIN, *LIKELY])
def test_unused_preference_label_is_an_error(tmp_path: Path, name: str) -> None:
    """Columns called chosen and rejected rank the replies already: then only a certain name is an error."""
    with pytest.raises(DataError, match=rf'rows.jsonl: column "{name}" looks like .* `prefer` .* prefer: none'):
        preferred(tmp_path, [{name: 1}], **BY_HAND)
    assert preferred(tmp_path, [{name: 1}], **BY_HAND, prefer="none") == [A_WINS]
    ranked = [{"chosen": "A", "rejected": "B", name: 1, "labelling_model": "m"}]
    if name in LIKELY:
        assert preferred(tmp_path, ranked) == [A_WINS]
    else:
        with pytest.raises(DataError, match=f'"{name}" looks like'):
            preferred(tmp_path, ranked)


@pytest.mark.parametrize("name", ["choices", "labeled_by", "scoreboard", "model_a", "source", "restart"])
def test_column_that_only_resembles_a_label_is_ignored(tmp_path: Path, name: str) -> None:
    assert preferred(tmp_path, [{name: 1}], **BY_HAND) == [A_WINS]


def labelled(label: str, *values: Any, first: str = "answer_a", second: str = "answer_b") -> list[dict[str, Any]]:
    return [{"question": f"q {n}", first: "A", second: "B", label: value} for n, value in enumerate(values)]


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        (
            labelled("winner", "a", "b", "tie"),
            "columns: {first: answer_a, second: answer_b}, prefer: {label: winner, first: a, second: b}}, or",
        ),
        (
            labelled("winner", "model_b", "model_a"),
            "second: answer_b}, prefer: {label: winner, first: model_a, second: model_b}}, or",
        ),
        (
            labelled("better response", 2, 1, first="Response 1", second="Response 2"),
            'first: "Response 1", second: "Response 2"}, prefer: {label: "better response", first: 1, second: 2}}',
        ),
        (
            labelled("winner", 1, 0),
            "prefer: {label: winner, first: ..., second: ...}} with the values of winner in place of the dots",
        ),
        ([row | {"score_b": 2} for row in labelled("score_a", 1)], "prefer: {scores: [score_a, score_b]}}, or"),
        (labelled("note", "x"), "prefer: {label: ..., first: ..., second: ...}} with the column that says"),
    ],
)
def test_two_replies_are_an_error_with_the_lines_to_paste(
    tmp_path: Path, rows: list[dict[str, Any]], lines: str
) -> None:
    first = next(iter(list(rows[0])[1:]))
    for dataset in ({}, {"columns": {"response": first}}):
        with pytest.raises(DataError, match=re.escape(lines)) as error:
            read(tmp_path, rows, **dataset)
        assert "\n" not in str(error.value) and str(error.value).endswith("or prefer: none to ignore this")
    assert [row.response for row in read(tmp_path, rows, columns={"response": first}, prefer="none")] == ["A"] * len(
        rows
    )


def test_pasted_lines_train_on_winners_alone(tmp_path: Path) -> None:
    rows = labelled("winner", "b", "tie", "a")
    with pytest.raises(DataError) as error:
        read(tmp_path, rows)
    pasted = parse_yaml(str(error.value).partition("set data.datasets to ")[2].partition(", or prefer: none")[0])
    assert pasted.pop("path") == str(tmp_path / "rows.jsonl")
    assert [row.response for row in read(tmp_path, rows, **pasted)] == ["B", None, "A"]


@pytest.mark.parametrize("name", ["winner", "labels", "safer_response_id", "preferred"])
def test_choice_next_to_a_single_reply_is_an_error(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": "p", "text": "r", name: "x"}]
    with pytest.raises(DataError, match=f'column "{name}" looks as if it chooses .* SFT would imitate every "text"'):
        read(tmp_path, rows, columns={"response": "text"})
    assert [row.response for row in read(tmp_path, rows, columns={"response": "text"}, prefer="none")] == ["r"]


@pytest.mark.parametrize("name", ["answer_c", "score", "category", "option_a", "reference"])
def test_other_column_next_to_a_single_reply_is_ignored(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": "p", "answer": "r", name: "x", "option_b": "y"}]
    assert [row.response for row in read(tmp_path, rows)] == ["r"]


def test_column_with_another_use_is_no_label(tmp_path: Path) -> None:
    columns = {"chosen": "ranking.0", "rejected": "ranking.1"}
    assert preferred(tmp_path, [{"ranking": ["A", "B"]}], columns=columns) == [A_WINS]
    columns = {"prompt": "label", "chosen": "a", "rejected": "b"}
    assert preferred(tmp_path, [{"label": "what?"}], columns=columns) == [A_WINS]


@pytest.mark.parametrize(("values", "decides"), [((True, False), 1), (("True", "FALSE"), 1), ((1, 0), 0), ("ab", 0)])
def test_true_false_label_of_single_replies_is_an_error(tmp_path: Path, values: Any, decides: bool) -> None:
    """SFT would imitate the replies that are marked as bad."""
    rows = [{"prompt": "p", "completion": "r", "label": value} for value in values]
    if decides:
        with pytest.raises(DataError, match=r'rows.jsonl: column "label" looks as if .* prefer: none'):
            read(tmp_path, rows)
    assert [row.response for row in read(tmp_path, rows, prefer="none")] == ["r", "r"]
    if isinstance(values[0], str):
        assert [row.response for row in read(tmp_path, rows, columns={"response": "label"})] == list(values)


def test_fingerprint_depends_on_the_label(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "a": "A", "b": "B", "x": n, "y": 1 - n} for n in range(2)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)

    def fingerprints(**dataset: Any) -> dict[str, Any]:
        return read_sources(DataConfig(datasets=[{"path": path, **dataset}]), ["reward"], seed=0).fingerprints()

    digests = set()
    for label in ("x", "y"):
        ((name, fingerprint),) = fingerprints(columns=PAIR, prefer={"label": label, "first": 1}).items()
        assert f"prefer.label {label}" in name
        digests.add(fingerprint["digest"])
    assert len(digests) == 2
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "chosen": "A", "rejected": "B"}])
    assert fingerprints() == fingerprints(prefer="none")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"columns": {"first": "a"}}, "columns.second: a pair needs both columns.first and columns.second"),
        ({"columns": PAIR}, "prefer: missing; set prefer.label or prefer.scores"),
        ({"columns": PAIR | {"chosen": "c"}}, "columns.first: conflicts with columns.chosen and columns.rejected"),
        ({"prefer": {"label": "x"}}, "prefer.first: missing; set it to the label's value"),
        ({"prefer": {"first": 1}}, "prefer.label: missing; name the column"),
        ({"prefer": {"label": "x", "first": 1, "scores": ["y", "z"]}}, "label, scores and none exclude each other"),
        ({"prefer": {"label": "x", "first": 1, "second": "1"}}, "prefer.second: the same as prefer.first"),
        (
            {"prefer": {"label": "x", "first": 1}, "columns": {"prompt": "q"}},
            "prefer: compares columns.first and columns.second; name both",
        ),
        ({"prefer": "nonsense"}, "expected keys and values, got 'nonsense'"),
        ({"columns": {"text": "t", "prompt": "p"}}, "a text has no prompt and no replies"),
    ],
)
def test_settings_that_conflict_are_an_error(dataset: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_config({"data": {"datasets": [{"path": "rows.jsonl", **dataset}]}})
    assert message in str(error.value) and "\n" not in str(error.value)
    assert "data.datasets.0." in str(error.value)


def write_margins(folder: Path, values: list[Any]) -> dict[str, Any]:
    """Return a data set of pairs with these margins."""
    rows = [{"prompt": f"{n}", "chosen": "moo", "rejected": "baa", "by": {"much": by}} for n, by in enumerate(values)]
    path = write_jsonl(folder / "rows.jsonl", rows)
    return {"path": path, "columns": {"margin": "by.much"}}


def test_margin_is_the_number_of_its_column(tokenizer: Any, tmp_path: Path) -> None:
    dataset = write_margins(tmp_path, [1, 0.25, "2.5", 0, "0"])
    assert [row.margin for row in parse("reward", **dataset).rows] == [1, 0.25, 2.5, 0, 0]
    dataset = write_margins(tmp_path, [n / 4 for n in range(40)])
    pairs: Any = load(tokenizer, dataset | {"stages": ["reward"]}, stage="reward").train[:6]
    batch = collate_reward(pairs, policy=ShapePolicy("dynamic"), maximum=64, pad_token_id=0)
    assert batch["margins"].tolist() == [int(pair.row.text) / 4 for pair in pairs]


def test_unusable_margin_drops_the_row_for_the_reward_model(tokenizer: Any, tmp_path: Path) -> None:
    values = [None, "much", True, -0.5, float("nan"), float("inf"), [1]]
    dataset = write_margins(tmp_path, values)
    assert [row.margin for row in parse("reward", **dataset).rows] == [None] * len(values)
    with pytest.raises(DataError, match=r"7 margin is not a number of 0 or more .*; write the margins as numbers, or"):
        load(tokenizer, dataset | {"stages": ["reward"]}, stage="reward")
    dataset = write_margins(tmp_path, [n if n % 3 else "?" for n in range(90)])
    used = {
        stage: load(tokenizer, dataset | {"stages": [stage]}, stage=stage).reports[0].used
        for stage in ("sft", "reward", "ppo")
    }
    assert used == {"sft": 90, "reward": 60, "ppo": 90}


def test_fingerprint_depends_on_margins_other_than_0(tmp_path: Path) -> None:
    def digest(by: float, *, named: bool = True) -> object:
        dataset = write_margins(tmp_path, [by])
        return parse("reward", **(dataset if named else {"path": dataset["path"]})).fingerprint()["digest"]

    assert digest(1) != digest(2) != digest(2, named=False)
    assert digest(0) == digest(0, named=False)
