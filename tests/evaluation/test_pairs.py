"""`rlhf evaluate --pairs` says of a reward model what plain transformers and a count by hand say."""

from __future__ import annotations

import gc
import json
import math
import random
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.evaluation.models import load_reward_model
from rlhf.evaluation.reward_scores import (
    PairScores,
    bin_by_confidence,
    brier_score,
    calibration_error,
    fit_temperature,
    log_loss,
    sigmoid,
    summarize_pairs,
)
from tests.evaluation.conftest import Evaluate, by_transformers, documented_keys, lines, printed_json, reward_model

PAIRS = [
    ("cow", "please moo", "go away"),
    ("dog or owl", "woof", "no no no red green blue thanks"),
    ("owl", "hoot hoot thanks", "moo"),
    ("red", "blue", "green"),
    ("please", "thanks owl", "no"),
    ("go", "away", "cow cow"),
]
ROWS = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in PAIRS]


def test_numbers_are_those_of_transformers_and_a_count_by_hand(
    evaluate: Evaluate, judge_folder: tuple[Path, Any], tokenizer: Any, tmp_path: Path
) -> None:
    folder, model = judge_folder
    file = lines(tmp_path / "pairs.jsonl", [*ROWS, {"prompt": "cow", "chosen": "", "rejected": "no"}])
    document = printed_json(evaluate(folder, "--pairs", file, "--json", "--rows", "--bins", 4, "--batch-size", 4))
    assert (document["kind"], document["accelerator"], document["precision"]) == ("pairs", "cpu", "fp32")
    (numbers,) = document["models"]
    assert numbers.keys() == documented_keys("pairs")
    expected = [[by_transformers(model, tokenizer, prompt, reply) for reply in both] for prompt, *both in PAIRS]
    assert [entry["source"] for entry in numbers["each"]] == [f"pairs.jsonl:{number}" for number in range(1, 7)]
    assert [[entry["chosen"], entry["rejected"]] for entry in numbers["each"]] == [
        pytest.approx(both, abs=1e-4) for both in expected
    ]
    margins = [chosen - rejected for chosen, rejected in expected]
    right = sum(margin > 0 for margin in margins)
    assert 0 < right < 6 and numbers["left_out"] == {"empty response": 1}
    assert (numbers["pairs"], numbers["accuracy"], numbers["ties"]) == (6, right / 6, 0)
    assert numbers["chosen_score"] == pytest.approx(sum(chosen for chosen, _ in expected) / 6, abs=1e-4)
    assert numbers["rejected_score"] == pytest.approx(sum(rejected for _, rejected in expected) / 6, abs=1e-4)
    assert numbers["margin"] == pytest.approx(sum(margins) / 6, abs=1e-4)
    claimed = [1 / (1 + math.exp(-margin)) for margin in margins]
    assert numbers["log_loss"] == pytest.approx(-sum(map(math.log, claimed)) / 6, abs=1e-4)
    assert numbers["brier"] == pytest.approx(sum((1 - p) ** 2 for p in claimed) / 6, abs=1e-4)
    # Bins of width 0.125 from 0.5; each pair's confidence is that of the reply with the higher score.
    bins: dict[int, list[tuple[float, bool]]] = {}
    for p in claimed:
        confidence = max(p, 1 - p)
        bins.setdefault(min(int((confidence - 0.5) / 0.125), 3), []).append((confidence, p > 0.5))
    error = sum(abs(sum(sure for sure, _ in pairs) - sum(right for _, right in pairs)) for pairs in bins.values()) / 6
    assert numbers["calibration_error"] == pytest.approx(error, abs=1e-4)
    assert [entry["pairs"] for entry in numbers["bins"]] == [len(bins[place]) for place in sorted(bins)]
    # Wilson's score interval: where |share - p| is 1.96 deviations of p.
    for bound in numbers["accuracy_interval"]:
        assert abs(right / 6 - bound) == pytest.approx(1.959964 * math.sqrt(bound * (1 - bound) / 6), rel=1e-5)


def test_models_stand_side_by_side_and_a_pipe_gets_tabs(
    evaluate: Evaluate, judge_folder: tuple[Path, Any], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One model is in memory at a time."""
    reward_model(tmp_path / "other", tokenizer, "opt")
    loaded: list[Any] = []

    def load(*arguments: Any, **options: Any) -> Any:
        gc.collect()
        assert [model() for model in loaded] == [None] * len(loaded)
        judge = load_reward_model(*arguments, **options)
        loaded.append(weakref.ref(judge.module))
        return judge

    monkeypatch.setattr("rlhf.cli.evaluate.load_reward_model", load)
    names = [judge_folder[0], tmp_path / "other"]
    file = lines(tmp_path / "pairs.jsonl", ROWS)
    expected = [printed_json(evaluate(name, "--pairs", file, "--json"))["models"][0] for name in names]
    assert expected[0]["margin"] != expected[1]["margin"] and "each" not in expected[0]
    printed = [line.split("\t") for line in evaluate(*names, "--pairs", file, "--tsv").stdout.splitlines()]
    assert len(loaded) == 4
    assert printed[:2] == [["pairs", *map(str, names)], ["pairs", "6", "6"]]
    accuracies = [numbers["accuracy"] for numbers in expected]
    assert printed[2][0] == "accuracy" and list(map(float, printed[2][1:])) == pytest.approx(accuracies, abs=1e-4)
    assert printed[12] == ["confidence", "pairs", "mean confidence", "accuracy"]


def test_a_source_is_what_data_datasets_takes(
    evaluate: Evaluate, judge_folder: tuple[Path, Any], tmp_path: Path
) -> None:
    plain = lines(tmp_path / "plain.jsonl", ROWS)
    renamed = [{"prompt": row["prompt"], "good": row["chosen"], "bad": row["rejected"]} for row in ROWS]
    other = lines(tmp_path / "other.jsonl", renamed)
    columns = {"prompt": "prompt", "chosen": "good", "rejected": "bad"}
    mapping = json.dumps({"path": str(other), "columns": columns})
    wanted = printed_json(evaluate(judge_folder[0], "--pairs", plain, "--json"))["models"]
    assert printed_json(evaluate(judge_folder[0], "--pairs", mapping, "--json"))["models"] == wanted


@pytest.mark.parametrize("prompt_format", ["no {prompt} :", "transcript"])
def test_bare_prompts_are_written_as_in_training(
    evaluate: Evaluate, judge_folder: tuple[Path, Any], tokenizer: Any, tmp_path: Path, prompt_format: str
) -> None:
    """Prompts that have a form already keep it."""
    folder, model = judge_folder
    trained = Path(shutil.copytree(folder, tmp_path / "reward" / "model"))
    summary = {"stage": "reward", "prompt_format": prompt_format, "end_ids": [tokenizer.eos_token_id]}
    (tmp_path / "reward" / "stage.json").write_text(json.dumps(summary))
    text = prompt_format if "{prompt}" in prompt_format else "Human: {prompt}\n\nAssistant:"
    expected = [[plain_score(model, tokenizer, text, prompt, reply) for reply in both] for prompt, *both in PAIRS]
    other = [[plain_score(model, tokenizer, "go {prompt}", prompt, reply) for reply in both] for prompt, *both in PAIRS]
    file = lines(tmp_path / "pairs.jsonl", ROWS)
    mapping = json.dumps({"path": str(file), "template": "go {prompt}"})
    for source, scores in ((file, expected), (mapping, other)):
        (numbers,) = printed_json(evaluate(trained, "--pairs", source, "--json", "--rows"))["models"]
        assert [[entry["chosen"], entry["rejected"]] for entry in numbers["each"]] == [
            pytest.approx(both, abs=1e-4) for both in scores
        ]


def plain_score(model: Any, tokenizer: Any, template: str, prompt: str, reply: str) -> float:
    text = f"{template.replace('{prompt}', prompt)} {reply}"
    ids = torch.tensor([[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]])
    with torch.no_grad():
        return float(model(ids).logits[0, 0])


def test_template_of_rows_for_a_chat_model_is_an_error(
    evaluate: Evaluate, judge_folder: tuple[Path, Any], tmp_path: Path
) -> None:
    source = json.dumps({"path": str(lines(tmp_path / "pairs.jsonl", ROWS)), "template": "go {prompt}"})
    done = evaluate(judge_folder[0], "--pairs", source)
    assert "data.datasets.0.template: the tokenizer's chat template writes the prompts" in str(done.exception)


def test_pair_longer_than_the_model_allows_is_left_out(
    evaluate: Evaluate, judge_folder: tuple[Path, Any], tmp_path: Path
) -> None:
    """Its room is 128 tokens, for prompt and reply together; settings may ask for less of either."""
    long = {"prompt": "cow" + " cow" * 40, "chosen": "moo" + " moo" * 40, "rejected": "no"}
    file = lines(tmp_path / "pairs.jsonl", [*ROWS, long])
    (numbers,) = printed_json(evaluate(judge_folder[0], "--pairs", file, "--json"))["models"]
    assert (numbers["pairs"], numbers["left_out"]) == (6, {"completion too long": 1})
    limit = ("--set", "data.max_completion_length=3")
    (numbers,) = printed_json(evaluate(judge_folder[0], "--pairs", file, "--json", *limit))["models"]
    assert numbers["pairs"] < 6 and numbers["left_out"] == {"completion too long": 7 - numbers["pairs"]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"rows.jsonl: no usable row: it is empty"),
        ([{"prompt": "cow", "response": "moo"}], r"no row that .* can use: 1 no preference"),
    ],
)
def test_rows_without_pairs_are_an_error(
    evaluate: Evaluate, judge_folder: tuple[Path, Any], tmp_path: Path, rows: list[Any], message: str
) -> None:
    done = evaluate(judge_folder[0], "--pairs", lines(tmp_path / "rows.jsonl", rows))
    assert done.exception is not None
    with pytest.raises(type(done.exception), match=message):
        raise done.exception
    assert not done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pairs", "absent.jsonl"], "absent.jsonl: no such file or folder; check --pairs"),
        (["--pairs", "heldout"], "--pairs heldout: no recipe says what is held out"),
        (["--pairs", "heldout", "--seed", "1"], "--seed"),  # it would hold out rows that the model was trained on
        (["--pairs", "a.jsonl", "--text", "a.jsonl"], "--pairs and --text: "),
        (["--prompt", "a"], "--prompt and --reply: "),
        (["--pairs", "world", "--rows"], "--rows: "),
        (["{judge}", "--pairs", "world"], "is named twice"),
    ],
)
def test_mistake_is_named(
    evaluate: Evaluate, judge_folder: tuple[Path, Any], arguments: list[str], message: str
) -> None:
    done = evaluate(judge_folder[0], *(argument.format(judge=judge_folder[0]) for argument in arguments))
    assert done.exit_code and message in done.output + str(done.exception)


def test_equal_scores_are_ties_and_not_right() -> None:
    numbers = summarize_pairs([PairScores("a", 1.0, 1.0), PairScores("b", 2.0, 1.0), PairScores("c", 0.0, 1.0)], 10)
    assert (numbers["ties"], numbers["accuracy"]) == (1, 1 / 3)
    assert numbers["bins"][0]["pairs"] == 1 and numbers["bins"][0]["accuracy"] == 0


# calibration against counts by hand and closed forms


def margin(probability: float) -> float:
    """The difference of scores by which a model claims that probability of the first reply."""
    return math.log(probability / (1 - probability))


def test_sigmoid_is_finite_at_any_size() -> None:
    assert sigmoid(math.log(3)) == pytest.approx(0.75) and sigmoid(-math.log(3)) == pytest.approx(0.25)
    assert (sigmoid(1e4), sigmoid(-1e4)) == (1, 0)


def test_the_table_by_hand() -> None:
    # Five bins from 0.5 to 1: widths of 0.1. The model is sure of 0.55 (right), 0.58 (wrong: of the rejected one),
    # 0.95 three times (right, right, wrong), and once of all (right).
    margins = [margin(0.55), -margin(0.58), margin(0.95), margin(0.95), -margin(0.95), 50.0]
    low, high = bin_by_confidence(margins, 5)
    assert (low.low, low.high, low.pairs, low.accuracy) == (0.5, pytest.approx(0.6), 2, 0.5)
    assert low.confidence == pytest.approx((0.55 + 0.58) / 2)
    assert (high.low, high.high, high.pairs, high.accuracy) == (pytest.approx(0.9), 1, 4, 0.75)
    assert high.confidence == pytest.approx((3 * 0.95 + 1) / 4)
    by_hand = 2 / 6 * abs(0.5 - 0.565) + 4 / 6 * abs(0.75 - 0.9625)
    assert calibration_error([low, high]) == pytest.approx(by_hand)
    claimed = [0.55, 0.42, 0.95, 0.95, 0.05, 1]
    assert brier_score(margins) == pytest.approx(sum((1 - p) ** 2 for p in claimed) / 6)
    assert log_loss(margins) == pytest.approx(-sum(map(math.log, claimed)) / 6)


def test_lower_bound_belongs_to_its_bin() -> None:
    (first,) = bin_by_confidence([0.0], 2)
    assert (first.low, first.pairs, first.confidence, first.accuracy) == (0.5, 1, 0.5, 0)
    (second,) = bin_by_confidence([margin(0.75) + 1e-12], 2)
    assert (second.low, second.high) == (0.75, 1)
    (whole,) = bin_by_confidence([1.0, -3.0], 1)
    assert (whole.low, whole.high, whole.pairs, whole.accuracy) == (0.5, 1, 2, 0.5)


def test_a_model_that_claims_what_is_so_has_no_error() -> None:
    margins = [margin(0.8)] * 80 + [-margin(0.8)] * 20
    assert calibration_error(bin_by_confidence(margins, 10)) == pytest.approx(0)
    assert fit_temperature(margins) == pytest.approx(1)
    assert log_loss(margins) == pytest.approx(-0.8 * math.log(0.8) - 0.2 * math.log(0.2))


@pytest.mark.parametrize("scale", [0.2, 3.0, 40.0])
def test_the_temperature_undoes_a_scale(scale: float) -> None:
    margins = [margin(0.8)] * 80 + [-margin(0.8)] * 20
    assert fit_temperature([scale * value for value in margins]) == pytest.approx(scale)


def test_no_temperature_near_it_has_less_log_loss() -> None:
    rng = random.Random(0)
    margins = [rng.gauss(1, 2) for _ in range(300)]
    temperature = fit_temperature(margins)
    assert temperature is not None
    losses = {
        by: log_loss([margin / (temperature * by) for margin in margins]) for by in (0.5, 0.9, 0.999, 1, 1.001, 1.1, 2)
    }
    assert min(losses, key=losses.__getitem__) == 1


def test_temperature_of_a_perfect_or_random_model_is_none() -> None:
    assert fit_temperature([0.5, 2.0]) is None
    assert fit_temperature([1.0, -1.0]) is None
    assert fit_temperature([1.0, -2.0]) is None
