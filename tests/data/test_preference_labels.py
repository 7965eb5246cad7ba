"""Which reply of a pair is preferred is what the label or the scores say; and no such column is left unasked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accelerators import ShapePolicy
from rlhf.config.schema import ConfigError, DataConfig, Stage, build_config
from rlhf.data.batches import collate_reward
from rlhf.data.load_sources import read_sources
from rlhf.data.stage_dataset import StageData, load_stage
from rlhf.errors import DataError

PAIR = {"first": "a", "second": "b"}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def preferred(path: Path, rows: list[dict[str, Any]], **dataset: Any) -> list[tuple[str | None, str | None, str]]:
    """(chosen, rejected, why neither) of each record, whose replies are `good` and `bad` where nothing else is said."""
    path = Path(write(path, [{"prompt": f"p {n}", "a": "A", "b": "B"} | row for n, row in enumerate(rows)]))
    config = DataConfig(datasets=[{"path": str(path), **dataset}])
    (found,) = read_sources(config, ["reward"], seed=0)._read.values()
    return [(row.chosen, row.rejected, row.undecided) for row in found.rows]


A_WINS, B_WINS = ("A", "B", ""), ("B", "A", "")


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
def test_a_label_decides(tmp_path: Path, prefer: dict[str, Any], values: list[Any]) -> None:
    rows = [{"labels": value} for value in values]
    dataset = {"columns": PAIR, "prefer": {"label": "labels", **prefer}}
    assert preferred(tmp_path / "rows.jsonl", rows, **dataset) == [A_WINS, B_WINS, A_WINS]


def test_labels_that_say_nothing_are_counted_and_leave_no_preference(tmp_path: Path) -> None:
    rows = [{"labels": value} for value in (1, 0, "tie", None, [1])]
    prefer = {"label": "labels", "first": 1, "second": 0}
    reason = "no preference: the label matches neither reply"
    neither = (None, None, reason)
    expected = [A_WINS, B_WINS, neither, neither, neither]
    assert preferred(tmp_path / "rows.jsonl", rows, columns=PAIR, prefer=prefer) == expected


def test_without_the_second_value_a_label_has_two(tmp_path: Path) -> None:
    rows = [{"labels": value} for value in ("a", "b", "tie")]
    with pytest.raises(DataError, match=r'"labels" has several .* than a; found: a, b, tie; set prefer.second'):
        preferred(tmp_path / "rows.jsonl", rows, columns=PAIR, prefer={"label": "labels", "first": "a"})
    with pytest.raises(DataError, match=r'"labels" never equals x \(prefer.first\); found: a, b, tie;'):
        preferred(tmp_path / "rows.jsonl", rows, columns=PAIR, prefer={"label": "labels", "first": "x"})


def test_an_empty_cell_is_no_second_label(tmp_path: Path) -> None:
    rows = [{"x": value} for value in (1.0, float("nan"), None, " ", "nan")]
    found = preferred(tmp_path / "rows.jsonl", rows, columns=PAIR, prefer={"label": "x", "first": 1})
    assert found == [A_WINS, *[(None, None, "no preference: the label matches neither reply")] * 4]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ((0.5, -0.5), A_WINS),
        ((-0.5, 0.5), B_WINS),
        (("10", "9"), A_WINS),  # as numbers: as texts, 9 were higher
        ((0.0, 0), (None, None, "no preference: equal scores")),
        ((None, 1), (None, None, "no preference: a score is not a number")),
        (("nan", 1), (None, None, "no preference: a score is not a number")),
        ((True, 0), (None, None, "no preference: a score is not a number")),
    ],
)
def test_the_higher_score_decides(tmp_path: Path, scores: tuple[Any, Any], expected: tuple[Any, ...]) -> None:
    rows = [{"s": {"a": scores[0]}, "t": scores[1]}]
    found = preferred(tmp_path / "rows.jsonl", rows, columns=PAIR, prefer={"scores": ["s.a", "t"]})
    assert found == [expected]


def test_a_tie_is_left_out_with_its_reason_and_its_prompt_is_one_to_answer(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"cow {n}", "a": "moo", "b": "baa", "x": n % 3, "y": 1} for n in range(90)]
    path = write(tmp_path / "rows.jsonl", rows)
    dataset = {"path": path, "columns": PAIR, "prefer": {"scores": ["x", "y"]}}

    def load(stage: Stage) -> StageData:
        config = DataConfig(datasets=[dataset | {"stages": [stage]}])
        return load_stage(config, stage, tokenizer, seed=0)

    for stage in ("sft", "reward"):
        (report,) = load(stage).reports  # type: ignore[arg-type]
        assert report.used == 60
        assert report.dropped == {"no preference: equal scores": (30, "rows.jsonl:2")}
    assert load("ppo").reports[0].used == 90


@pytest.mark.parametrize(
    "name", ["labels", "label", "Preference", "winner", "score_0", "score_A", "better_response_id"]
)
def test_what_looks_like_deciding_is_never_ignored(tmp_path: Path, name: str) -> None:
    by_hand = {"columns": {"chosen": "a", "rejected": "b"}}
    with pytest.raises(DataError, match=rf'column "{name}" looks like a preference label .* `prefer` .* prefer: none'):
        preferred(tmp_path / "rows.jsonl", [{name: 1}], **by_hand)
    with pytest.raises(DataError, match=f'"{name}" looks like'):
        preferred(tmp_path / "rows.jsonl", [{"chosen": "A", "rejected": "B", name: 1}])
    assert preferred(tmp_path / "rows.jsonl", [{name: 1}], **by_hand, prefer="none") == [A_WINS]


@pytest.mark.parametrize(
    "name", ["winner_model_a", "overall_preference", "scores", "rating", "isBetter", "safer_response_id", "b_rank"]
)
def test_where_the_columns_do_not_say_which_is_better_another_that_may_is_not_ignored(
    tmp_path: Path, name: str
) -> None:
    by_hand = {"columns": {"chosen": "a", "rejected": "b"}}
    with pytest.raises(DataError, match=rf'rows.jsonl: column "{name}" looks like a preference label .* prefer: none'):
        preferred(tmp_path / "rows.jsonl", [{name: 1}], **by_hand)
    assert preferred(tmp_path / "rows.jsonl", [{name: 1}], **by_hand, prefer="none") == [A_WINS]
    said = [{"chosen": "A", "rejected": "B", name: 1, "labelling_model": "m"}]
    assert preferred(tmp_path / "rows.jsonl", said) == [A_WINS]


@pytest.mark.parametrize("name", ["choices", "labeled_by", "scoreboard", "model_a", "source", "restart"])
def test_what_only_sounds_like_deciding_is_left_alone(tmp_path: Path, name: str) -> None:
    by_hand = {"columns": {"chosen": "a", "rejected": "b"}}
    assert preferred(tmp_path / "rows.jsonl", [{name: 1}], **by_hand) == [A_WINS]


def test_what_holds_the_replies_decides_nothing(tmp_path: Path) -> None:
    columns = {"chosen": "ranking.0", "rejected": "ranking.1"}
    assert preferred(tmp_path / "rows.jsonl", [{"ranking": ["A", "B"]}], columns=columns) == [A_WINS]


def test_a_column_that_is_read_as_something_else_decides_nothing(tmp_path: Path) -> None:
    columns = {"prompt": "label", "chosen": "a", "rejected": "b"}
    assert preferred(tmp_path / "rows.jsonl", [{"label": "what?"}], columns=columns) == [A_WINS]
    path = write(tmp_path / "rows.jsonl", [{"prompt": "p", "label": "r"}])
    config = DataConfig(datasets=[{"path": path, "columns": {"response": "label"}}])
    (found,) = read_sources(config, ["sft"], seed=0)._read.values()
    assert found.rows[0].response == "r"


@pytest.mark.parametrize(("values", "decides"), [((True, False), 1), (("True", "FALSE"), 1), ((1, 0), 0), ("ab", 0)])
def test_a_label_of_single_replies_is_not_ignored(tmp_path: Path, values: Any, decides: bool) -> None:
    """Half of what SFT would imitate is there as what it should not do."""
    rows = [{"completion": "r", "label": value} for value in values]

    def replies(columns: dict[str, str], **prefer: str) -> list[str | None]:
        path = write(tmp_path / "rows.jsonl", [{"prompt": "p"} | row for row in rows])
        dataset = {"path": path, "columns": columns, **prefer}
        (found,) = read_sources(DataConfig(datasets=[dataset]), ["sft"], seed=0)._read.values()
        return [row.response for row in found.rows]

    if decides:
        with pytest.raises(DataError, match=r'rows.jsonl: column "label" looks as if .* prefer: none'):
            replies({})
    assert replies({}, prefer="none") == ["r", "r"]
    if isinstance(values[0], str):
        assert replies({"response": "label"}) == list(values)


def test_another_label_gives_another_fingerprint(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "p", "a": "A", "b": "B", "x": n, "y": 1 - n} for n in range(2)])

    def digest(label: str) -> object:
        dataset = {"path": path, "columns": PAIR, "prefer": {"label": label, "first": 1}}
        (found,) = read_sources(DataConfig(datasets=[dataset]), ["reward"], seed=0).fingerprints().items()
        assert f"prefer.label {label}" in found[0]
        return found[1]["digest"]

    assert digest("x") != digest("y")


def test_that_nothing_decides_is_no_part_of_a_fingerprint(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "p", "chosen": "A", "rejected": "B"}])
    found = [
        read_sources(DataConfig(datasets=[{"path": path, **prefer}]), ["reward"], seed=0).fingerprints()
        for prefer in ({}, {"prefer": "none"})
    ]
    assert found[0] == found[1]


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
def test_settings_that_do_not_fit_together_are_one_line(dataset: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_config({"data": {"datasets": [{"path": "rows.jsonl", **dataset}]}})
    assert message in str(error.value) and "\n" not in str(error.value)
    assert "data.datasets.0." in str(error.value)


def margins(path: Path, values: list[Any], **dataset: Any) -> list[float | None]:
    """What is read of a column `by` with these values."""
    rows = [{"prompt": f"p {n}", "chosen": "A", "rejected": "B", "by": {"much": by}} for n, by in enumerate(values)]
    config = DataConfig(datasets=[{"path": write(path, rows), "columns": {"margin": "by.much"}, **dataset}])
    (found,) = read_sources(config, ["reward"], seed=0)._read.values()
    return [row.margin for row in found.rows]


def test_a_margin_is_the_number_of_its_column(tmp_path: Path) -> None:
    assert margins(tmp_path / "rows.jsonl", [1, 0.25, "2.5", 0, "0"]) == [1, 0.25, 2.5, 0, 0]


def test_a_margin_that_is_no_number_costs_the_reward_model_its_row_and_no_other_stage(
    tokenizer: Any, tmp_path: Path
) -> None:
    bad = [None, "much", True, -0.5, float("nan"), float("inf"), [1]]
    assert margins(tmp_path / "rows.jsonl", bad) == [None] * len(bad)
    rows = [{"prompt": f"cow {n}", "chosen": "moo", "rejected": "baa", "by": n if n % 3 else "?"} for n in range(90)]
    dataset = {"path": write(tmp_path / "some.jsonl", rows), "columns": {"margin": "by"}}
    used = {}
    for stage in ("sft", "reward", "ppo"):
        found = load_stage(DataConfig(datasets=[dataset | {"stages": [stage]}]), stage, tokenizer, seed=0)
        used[stage] = found.reports[0].used
    assert used == {"sft": 90, "reward": 60, "ppo": 90}
    for row in rows:
        row["by"] = "?"
    none = dataset | {"path": write(tmp_path / "none.jsonl", rows), "stages": ["reward"]}
    config = DataConfig(datasets=[none])
    with pytest.raises(DataError, match=r"90 margin is not a number of 0 or more .*; write the margins as numbers, or"):
        load_stage(config, "reward", tokenizer, seed=0)


def test_a_margin_reaches_the_batch_of_its_pair(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"cow {n}", "chosen": "moo", "rejected": "baa", "by": n / 4} for n in range(40)]
    dataset = {"path": write(tmp_path / "rows.jsonl", rows), "columns": {"margin": "by"}, "stages": ["reward"]}
    pairs: Any = load_stage(DataConfig(datasets=[dataset]), "reward", tokenizer, seed=0).train[:6]
    batch = collate_reward(pairs, policy=ShapePolicy("dynamic"), maximum=64, pad_token_id=0)
    assert batch["margins"].tolist() == [int(pair.row.text.split()[1]) / 4 for pair in pairs]


def test_other_margins_are_another_fingerprint_and_margins_of_0_are_none(tmp_path: Path) -> None:
    def fingerprint(by: float, **dataset: Any) -> Any:
        path = write(tmp_path / "rows.jsonl", [{"prompt": "p", "chosen": "A", "rejected": "B", "by": by}])
        (found,) = read_sources(DataConfig(datasets=[{"path": path, **dataset}]), ["reward"], seed=0)._read.values()
        return found.fingerprint()["digest"]

    named = {"columns": {"margin": "by"}}
    assert fingerprint(1, **named) != fingerprint(2, **named) != fingerprint(2)
    assert fingerprint(0, **named) == fingerprint(0)
