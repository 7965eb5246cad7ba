"""Each check against numbers whose truth is known: made by hand, or measured on runs of the embedded example."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rlhf.diagnosis.checks import CHECKS
from rlhf.diagnosis.findings import Finding, examine_stage, summarize_stage, worst
from rlhf.diagnosis.records import read_run
from rlhf.diagnosis.verdict import examine_run
from rlhf.report.page import render_report
from rlhf.reporting.rules import RULES
from tests.diagnosis.records import write_run

EVALUATED = [0, 10, 20, 50, 100, 150, 200]
TRUTH = {
    0.25: (
        [-0.85, 1.79, 3.13, 3.31, 3.45, 3.47, 3.46],
        [0, 0.4, 1.8, 1.2, 1.4, 1.3, 1.3],
        [44, 72, 83, 88, 94, 91, 91],
    ),
    0.1: ([-0.85, 1.78, 3.21, 3.58, 3.58, 3.65, 3.60], [0, 0.4, 2.0, 2.6, 2.9, 2.9, 2.9], [44, 70, 80, 79, 84, 85, 84]),
    0.05: (
        [-0.85, 1.67, 3.18, 3.60, 3.79, 3.92, 3.99],
        [0, 0.4, 1.9, 3.1, 5.6, 6.7, 7.4],
        [44, 70, 82, 86, 54, 44, 41],
    ),
    0.0: ([-0.85, 1.80, 3.26, 4.04, 4.26, 4.32, 4.33], [0, 0.4, 2.0, 28, 41, 40, 40], [44, 72, 83, 7, 0, 0, 0]),
}
"""Reward, KL and percent approved by the hidden judge at `EVALUATED`, for four `kl_coef` of the embedded example.

Measured on 128 held-out prompts; the first two stay good, the third decays slowly and the last one collapses.
"""


def examine(folder: Path, stage: str, numbers: dict[str, Any], **options: Any) -> dict[str, Finding]:
    """Return the findings about a stage with these numbers, by name."""
    run = write_run(folder / "run", {stage: numbers}, **options)
    return {finding.name: finding for finding in examine_stage(run, run.stages[0])}


def truth(kl_coef: float) -> dict[str, Any]:
    """The numbers of a run in `TRUTH`; the judge's score is the percentage."""
    reward, kl, approved = TRUTH[kl_coef]
    shares = [percent / 100 for percent in approved]
    return {
        "heldout_reward": reward,
        "heldout_kl": kl,
        "heldout_approved_share": shares,
        "heldout_judge_reward": approved,
    }


@pytest.mark.parametrize("kl_coef", TRUTH)
def test_over_optimized_runs_are_told_from_good_ones(tmp_path: Path, kl_coef: float) -> None:
    numbers, rows = truth(kl_coef), {}
    for step, reward, percent in zip(EVALUATED, numbers["heldout_reward"], numbers["heldout_judge_reward"]):
        approved = [place < percent for place in range(100)]
        made = completions([float(reward)] * 100, [9.0] * 100)
        rows[step] = [row | {"approved": good, "judge": 100.0 * good} for row, good in zip(made, approved)]
    found = examine(tmp_path, "ppo", numbers, steps=dict.fromkeys(numbers, EVALUATED), heldout={"ppo": rows})
    expected = "fine" if kl_coef >= 0.1 else "look here"
    assert {found[name].state for name in ("approval", "judge", "price of KL")} == {expected}
    for name in ("approval", "judge") if expected == "look here" else ():
        assert found[name].step == {0.05: 50, 0.0: 20}[kl_coef], "the best model by the judge"
        assert "ppo.kl_coef" in found[name].remedy


def test_price_of_kl_alone_is_enough_without_a_judge(tmp_path: Path) -> None:
    names = ("heldout_reward", "heldout_kl")
    numbers = {name: truth(0.05)[name] for name in names}
    found = examine(tmp_path, "ppo", numbers, steps=dict.fromkeys(names, EVALUATED))
    assert found["price of KL"].state == "look here" and not {"approval", "judge"} & found.keys()


def test_policy_that_stands_still_has_no_price_of_kl(tmp_path: Path) -> None:
    """KL is then rounding, of either sign."""
    numbers = {"heldout_reward": [1.0] * 5, "heldout_kl": [-6e-8] * 5, "heldout_response_length": [9.0] * 5}
    found = examine(tmp_path, "ppo", numbers)
    assert found["price of KL"].state == "fine" and "KL has settled" in found["price of KL"].text


def test_kl_that_buys_nothing_is_a_signal(tmp_path: Path) -> None:
    numbers = {"heldout_reward": [100.0, 90.0, 80.0, 70.0, 60.0], "heldout_kl": [0.0, 1.0, 10.0, 30.0, 50.0]}
    found = examine(tmp_path, "ppo", numbers)
    assert found["price of KL"].state == "look here"
    assert "bought up to -0.80 of reward, and -0.50 from step 3 on" in found["price of KL"].text


START = {"kl": [1e-6, 0.4], "response_length": [12.0, 12.0]}


@pytest.mark.parametrize(
    ("kl", "precision", "state"),
    [
        (1e-6, "fp32", "fine"),
        (0.05, "fp32", "wrong"),
        (-0.05, "fp32", "wrong"),
        (0.05, "bf16", "fine"),
        (1, "bf16", "wrong"),
    ],
)
def test_kl_before_the_first_update_is_rounding_only(tmp_path: Path, kl: float, precision: str, state: str) -> None:
    found = examine(tmp_path, "ppo", START | {"kl": [kl, 0.4]}, precision=precision)
    assert found["first KL"].state == state


def test_kl_of_a_later_first_record_tells_nothing(tmp_path: Path) -> None:
    steps = {"kl": [10, 20], "response_length": [10, 20]}
    found = examine(tmp_path, "ppo", START | {"kl": [0.5, 0.6]}, steps=steps)
    assert found["first KL"].state == "cannot tell" and "step 10" in found["first KL"].text


def test_rollouts_of_stale_weights_are_found_in_the_second_step(tmp_path: Path) -> None:
    """In fp32 rounding is 4e-7; an update moves log-probabilities by 1e-4 and more."""
    numbers = {"draw_gap": [4e-7, 1e-3, 2e-3], "draw_gap_max": [3e-6, 0.1, 0.2]}
    found = examine(tmp_path, "ppo", numbers)["drawing"]
    assert (found.state, found.step) == ("wrong", 2) and "grew from 4e-07 to 0.001" in found.text
    numbers = {"draw_gap": [4e-7, 5e-7, 4e-7], "draw_gap_max": [3e-6, 4e-6, 3e-6]}
    assert examine(tmp_path / "b", "ppo", numbers)["drawing"].state == "fine"


@pytest.mark.parametrize(("precision", "state"), [("fp32", "wrong"), ("bf16", "fine")])
def test_gap_of_half_precision_is_no_fault(tmp_path: Path, precision: str, state: str) -> None:
    numbers = {"draw_gap": [0.013, 0.014, 0.012], "draw_gap_max": [0.3, 0.3, 0.4]}
    assert examine(tmp_path, "ppo", numbers, precision=precision)["drawing"].state == state


def test_old_runs_lack_what_an_invariant_needs(tmp_path: Path) -> None:
    found = examine(tmp_path, "ppo", START)
    assert found["drawing"].state == "cannot tell" and "draw_gap" in found["drawing"].text
    assert "critic" not in found, "a signal without its numbers says nothing"


@pytest.mark.parametrize("name", ["learning_rate", "grad_norm"])
def test_stage_that_learns_nothing_is_found(tmp_path: Path, name: str) -> None:
    numbers = {"learning_rate": [0.0, 1e-5, 1e-5], "grad_norm": [1.0, 0.5, 0.5]}
    assert worst([*examine(tmp_path, "sft", numbers).values()]) == "fine", "the rate of a warm-up's first step is 0"
    found = examine(tmp_path / "b", "sft", numbers | {name: [0.0, 0.0, 0.0]})
    assert found[{"learning_rate": "learning rate", "grad_norm": "no gradient"}[name]].state == "look here"


def test_adapters_have_a_rate_that_counts(tmp_path: Path) -> None:
    numbers = {"learning_rate": [0.0, 0.0], "lora_learning_rate": [1e-4, 1e-4]}
    assert examine(tmp_path, "sft", numbers)["learning rate"].state == "fine"


def test_dpo_loss_that_stays_at_ln_2_is_found_once_the_stage_is_complete(tmp_path: Path) -> None:
    done = {"summaries": {"dpo": {"stage": "dpo", "title": "DPO"}}}
    stuck = [math.log(2) + 1e-5 * (step % 3) for step in range(25)]
    assert examine(tmp_path / "a", "dpo", {"loss": stuck}, **done)["DPO loss"].state == "look here"
    assert "DPO loss" not in examine(tmp_path / "b", "dpo", {"loss": stuck}), "a warm-up may take long"
    falling = [math.log(2) - 0.01 * step for step in range(25)]
    assert examine(tmp_path / "c", "dpo", {"loss": falling}, **done)["DPO loss"].state == "fine"
    found = examine(tmp_path / "d", "dpo", {"loss": stuck}, settings={"dpo": {"loss": "ipo"}}, **done)
    assert "DPO loss" not in found, "ipo has another loss at the start"


def test_problem_of_a_device_is_found(tmp_path: Path) -> None:
    fine = {"before": {}, "after": {}, "errors": {}, "problems": []}
    for folder, problems, state in (("a", [], "fine"), ("b", ["2 more uncorrected memory errors"], "look here")):
        summary = {"stage": "sft", "title": "SFT", "devices": [fine, fine | {"problems": problems}]}
        found = examine(tmp_path / folder, "sft", {"loss": [1.0]}, summaries={"sft": summary})["device"]
        assert found.state == state
    assert found.text == "devices reported problems: rank 1: 2 more uncorrected memory errors"
    assert "device" not in examine(tmp_path / "c", "sft", {"loss": [1.0]})


@pytest.mark.parametrize(
    ("values", "state"), [([99.0, 9.0, 5.0], "fine"), ([99.0, 5.0, 9.0], "look here"), ([9.0, 9.0], "look here")]
)
def test_perplexity_must_fall_and_stay_low(tmp_path: Path, values: list[float], state: str) -> None:
    assert examine(tmp_path, "sft", {"heldout_perplexity": values})["perplexity"].state == state


def test_perplexity_is_that_of_the_kept_model(tmp_path: Path) -> None:
    kept = {"sft": {"stage": "sft", "title": "SFT", "kept": {"step": 1}}}
    found = examine(tmp_path, "sft", {"heldout_perplexity": [9.0, 5.0, 6.0]}, summaries=kept)["perplexity"]
    assert found.state == "fine" and "from 9 to 5" in found.text


def test_heldout_pairs_are_those_of_the_kept_model(tmp_path: Path) -> None:
    rows = [{"chosen": 1.0, "rejected": 0.0, "chosen_tokens": 9.0, "rejected_tokens": 9.0}]
    heldout = {"reward": {0: rows * 100, 1: rows * 200, 2: rows * 300}}
    kept = {"reward": {"stage": "reward", "title": "reward model", "kept": {"step": 1}}}
    numbers = {"heldout_accuracy": [0.5, 0.9, 0.7]}
    found = examine(tmp_path, "reward", numbers, heldout=heldout, summaries=kept)["accuracy"]
    assert "90.0% of 200 pairs" in found.text


@pytest.mark.parametrize(("pairs", "state"), [(20, "look here"), (400, "fine")])
def test_accuracy_is_judged_by_its_interval(tmp_path: Path, pairs: int, state: str) -> None:
    """60 % of 20 pairs may be chance, 60 % of 400 are not."""
    rows = [{"chosen": 1.0, "rejected": 0.0, "chosen_tokens": 9.0, "rejected_tokens": 9.0}] * pairs
    numbers = {"heldout_accuracy": [0.5, 0.6]}
    found = examine(tmp_path, "reward", numbers, heldout={"reward": {0: rows, 1: rows}})
    assert found["accuracy"].state == state and f"{pairs} pairs" in found["accuracy"].text


def test_reward_model_that_scores_length_is_found(tmp_path: Path) -> None:
    def pairs(longer_wins: float) -> list[dict[str, float]]:
        """Half of the chosen replies are longer; of the longer ones `longer_wins` are right, of the others the rest."""
        rows = []
        for number in range(200):
            longer, right = number % 2 == 0, (number // 2) % 10 < 10 * longer_wins
            right = right if longer else not right
            tokens = (12.0, 8.0) if longer else (8.0, 12.0)
            scores = (1.0, 0.0) if right else (0.0, 1.0)
            rows.append(dict(zip(("chosen", "rejected", "chosen_tokens", "rejected_tokens"), scores + tokens)))
        return rows

    for folder, share, state in (("a", 0.9, "look here"), ("b", 0.5, "fine")):
        heldout = {"reward": {0: pairs(0.5), 1: pairs(share)}}
        found = examine(tmp_path / folder, "reward", {"heldout_accuracy": [0.5, 0.7]}, heldout=heldout)
        assert found["length bias"].state == state


PLUMBING: dict[str, Any] = {
    "first update": ("ppo", {"update_gap": [0.0, 4e-7, 0.002]}, 3, "the gap is 0.002 nats per token"),
    "scoring": ("dpo", {"score_gap": [0.5]}, 1, "differ from those computed again from the same rows"),
    "repeated rows": ("reward", {"repeated_rows": [0.0, 3.0]}, 2, "3 rows were read more than once in an epoch"),
    "targets": ("sft", {"wrong_targets": [0.0, 7.0]}, 2, "7 rows learn other tokens than those of their examples"),
    "trained weights": ("reward", {"unchanged_weights": [1.0]}, 1, "no trained weight"),
    "frozen weights": ("dpo", {"changed_frozen_weights": [3.0]}, 1, "3 tensors of frozen weights have changed"),
    "ranks": ("sft", {"unequal_weights": [0.0, 2.0]}, 2, "2 tensors of weights differ between ranks"),
}
"""Invariant: stage, numbers of a run in which it does not hold, the step that shows it, and what is said."""


@pytest.mark.parametrize("name", PLUMBING)
def test_invariant_holds_or_the_run_is_wrong(tmp_path: Path, name: str) -> None:
    stage, numbers, step, text = PLUMBING[name]
    found = examine(tmp_path / "a", stage, numbers)[name]
    assert (found.state, found.step) == ("wrong", step) and text in found.text
    healthy = {key: [0.0] * len(values) for key, values in numbers.items()}
    assert examine(tmp_path / "b", stage, healthy)[name].state == "fine"
    assert examine(tmp_path / "c", stage, {"loss": [1.0]})[name].state == "cannot tell"


def completions(rewards: list[float], tokens: list[float], texts: list[str] | None = None) -> list[dict[str, Any]]:
    texts = texts or [f"reply {number} is this" for number in range(len(rewards))]
    return [
        {"prompt": "p", "completion": text, "reward": reward, "kl": 0.1, "tokens": count, "ended": 1.0}
        for text, reward, count in zip(texts, rewards, tokens)
    ]


@pytest.mark.parametrize(
    ("kl", "drawn", "earned", "state", "text"),
    [
        # KL of the best of 4: log 4 - 3 / 4 = 0.64. Of rewards 0, 1, 2, 3 the best of 4 is 3, and of 2 the mean of the
        # higher of two: (1 + 2 + 2 + 3 + 3 + 3) / 6 = 2.33, at log 2 - 1 / 2 = 0.19.
        (0.7, [0.0, 1.0, 2.0, 3.0], 2.0, "look here", "the best of 4 completions before training earns 3.00"),
        (0.7, [0.0, 1.0, 2.0, 3.0], 3.5, "fine", "at a KL of at most 0.64"),
        (0.2, [0.0, 1.0, 2.0, 3.0], 2.0, "look here", "the best of 2 completions before training earns 2.33"),
        (0.2, [0.0, 1.0, 2.0, 3.0], 2.5, "fine", "at a KL of at most 0.19"),
        (9.0, [0.0, 1.0], 0.5, "look here", "the best of 2 completions before training earns 1.00"),
    ],
)
def test_reward_is_compared_with_the_best_of_n(
    tmp_path: Path, kl: float, drawn: list[float], earned: float, state: str, text: str
) -> None:
    before = [row | {"rewards": drawn} for row in completions([drawn[0]] * 12, [9.0] * 12)]
    rows = {0: before, 1: completions([earned] * 12, [9.0] * 12)}
    numbers = {"heldout_kl": [0.0, kl], "heldout_reward": [drawn[0], earned]}
    found = examine(tmp_path, "ppo", numbers, heldout={"ppo": rows})["best of n"]
    assert found.state == state and text in found.text
    without = examine(tmp_path / "b", "ppo", numbers, heldout={"ppo": {0: rows[1], 1: rows[1]}})
    assert "best of n" not in without


def test_kept_model_is_judged_not_the_last(tmp_path: Path) -> None:
    """The judge's score has fallen since step 1, whose model is kept."""
    rows = {
        step: [row | {"judge": score} for row in completions([float(step)] * 12, [9.0] * 12)]
        for step, score in enumerate([0.0, 2.0, 1.0])
    }
    numbers = {"heldout_judge_reward": [0.0, 2.0, 1.0], "heldout_reward": [0.0, 1.0, 2.0]}
    for kept, state in ((1, "fine"), (2, "look here")):
        folder = tmp_path / str(kept)
        found = examine(
            folder, "ppo", numbers, heldout={"ppo": rows}, summaries={"ppo": {"stage": "ppo", "kept": {"step": kept}}}
        )
        assert found["judge"].state == state


def test_gain_that_length_explains_is_found(tmp_path: Path) -> None:
    """Before, a token more was worth 0.1; 30 tokens more explain a gain of 3, and a tenth of one of 30."""
    tokens = [float(count) for count in range(10, 40)]
    before = completions([0.1 * count for count in tokens], tokens)
    for folder, gain, state in (("a", 3.0, "look here"), ("b", 30.0, "fine")):
        after = completions([0.1 * count + gain for count in tokens], [count + 30 for count in tokens])
        found = examine(
            tmp_path / folder, "ppo", {"heldout_reward": [0.0, gain]}, heldout={"ppo": {0: before, 1: after}}
        )
        assert found["length"].state == state
        assert f"{3 / gain:.0%}" in found["length"].text


def test_gain_is_judged_over_the_same_prompts(tmp_path: Path) -> None:
    """Prompts differ by far more than the gain, which is still sure, because each is compared with itself."""
    tokens = [9.0] * 20
    before = [float(10 * number) for number in range(20)]
    after = [value + 1 + 0.1 * (number % 3) for number, value in enumerate(before)]
    heldout = {"ppo": {0: completions(before, tokens), 1: completions(after, tokens)}}
    numbers = {"heldout_reward": [sum(before) / 20, sum(after) / 20]}
    assert examine(tmp_path, "ppo", numbers, heldout=heldout)["reward"].state == "fine"
    mixed = [value + (5 if number % 2 else -5) for number, value in enumerate(before)]
    heldout = {"ppo": {0: completions(before, tokens), 1: completions(mixed, tokens)}}
    assert examine(tmp_path / "b", "ppo", numbers, heldout=heldout)["reward"].state == "look here"


def test_same_opening_of_most_completions_is_found(tmp_path: Path) -> None:
    rewards, tokens = [float(number) for number in range(40)], [9.0] * 40
    alike = [f"Happy to help, {number}" for number in range(40)]
    heldout = {"ppo": {0: completions(rewards, tokens), 1: completions(rewards, tokens, alike)}}
    found = examine(tmp_path, "ppo", {"heldout_reward": [0.0, 1.0]}, heldout=heldout)["openings"]
    assert found.state == "look here" and "100%" in found.text and "Happy to help," in found.text


@pytest.mark.parametrize("weight", [1.0, 10.0])
def test_scores_beyond_those_of_the_pairs_are_found(tmp_path: Path, weight: float) -> None:
    """Pairs score from -2.9 to 2.9; half of the completions score 5. PPO's scores have `ppo.reward_weight`."""
    pairs = [
        {"chosen": number / 10, "rejected": -number / 10, "chosen_tokens": 9.0, "rejected_tokens": 9.0}
        for number in range(30)
    ]
    tokens = [9.0] * 20
    for folder, high, state in (("a", 5.0, "look here"), ("b", 2.0, "fine")):
        rewards = [weight * high] * 10 + [weight] * 10
        run = write_run(
            tmp_path / folder,
            {"reward": {"heldout_accuracy": [0.5, 0.9]}, "ppo": {"heldout_reward": [0.0, 3.0]}},
            heldout={
                "reward": {0: pairs, 1: pairs},
                "ppo": {0: completions([0.0] * 20, tokens), 1: completions(rewards, tokens)},
            },
            settings={"ppo": {"reward_weight": weight}},
        )
        found = {finding.name: finding for finding in examine_stage(run, run.stages[1])}["score range"]
        assert found.state == state and found.text.startswith("50%" if state == "look here" else "0%")


@pytest.mark.parametrize("approved", [(20, 12), (20, 19)])
def test_fall_of_approval_must_be_sure(tmp_path: Path, approved: tuple[int, int]) -> None:
    """Of 20 prompts, 8 that lose approval are sure (McNemar: 8 / sqrt(8) = 2.8 is not, 12 would be); one is chance."""
    rows = []
    for count in (5, *approved):
        rewards, tokens = [float(count)] * 20, [9.0] * 20
        made = completions(rewards, tokens)
        rows.append([row | {"approved": number < count} for number, row in enumerate(made)])
    numbers = {
        "heldout_reward": [0.0, 1.0, 2.0],
        "heldout_approved_share": [5 / 20, *(count / 20 for count in approved)],
    }
    found = examine(tmp_path, "ppo", numbers, heldout={"ppo": dict(enumerate(rows))})
    assert found["approval"].state == "fine", "not sure"
    fewer = [row | {"approved": number < 8} for number, row in enumerate(rows[2])]
    numbers["heldout_approved_share"][2] = 8 / 20
    found = examine(tmp_path / "b", "ppo", numbers, heldout={"ppo": {0: rows[0], 1: rows[1], 2: fewer}})
    assert found["approval"].state == "look here", "12 of 20 have lost it"


NOTHING = {"prompt": "p", "completion": "", "reward": None, "kl": None, "tokens": 1.0, "ended": 1.0}


@pytest.mark.parametrize(
    "heldout",
    [
        {0: [NOTHING] * 30, 2: [NOTHING] * 30},
        {2: completions([1.0] * 30, [9.0] * 30)},
        {0: completions([1.0] * 30, [9.0] * 30), 2: []},
        {0: [{}] * 30, 2: [{"reward": "text"}] * 30},
    ],
    ids=["numbers that are not finite", "no evaluation before training", "no rows", "rows of another version"],
)
def test_rows_that_lack_numbers_end_nothing(tmp_path: Path, heldout: Any) -> None:
    numbers = {"heldout_reward": [0.0, 1.0, 2.0], "heldout_kl": [0.0, 1.0, 2.0], "kl": [1e-9, 1.0]}
    run = write_run(tmp_path / "run", {"ppo": numbers | {"response_length": [9.0, 9.0]}}, heldout={"ppo": heldout})
    report = examine_run(run)
    assert report.state in ("fine", "look here")
    assert "<!DOCTYPE html>" in render_report([report])


def test_parts_of_the_reward_that_fall_are_found(tmp_path: Path) -> None:
    """Weights 1 and 0.5: parts that both rise, one that stays, one that falls; and a fall without a gain in the sum."""
    functions = [{"function": "m:length", "weight": 0.5}, {"function": "m:idle", "weight": 0}]
    settings, found = {"ppo": {"reward_functions": functions}}, {}
    for folder, model, length in (("a", 0.5, 1.0), ("b", 0.0, 2.0), ("c", -0.5, 3.0), ("d", -1.0, 1.0)):
        gains = {"reward": model + length / 2, "reward_model": model, "reward/length": length, "reward/idle": -9.0}
        numbers = {f"heldout_{name}": [2.0, 2.0 + gain] for name, gain in gains.items()}
        found[folder] = examine(tmp_path / folder, "ppo", numbers, settings=settings).get("reward parts")
    assert found["d"] is None
    states = {folder: finding.state for folder, finding in found.items() if finding}
    assert states == {"a": "fine", "b": "fine", "c": "look here"}
    text = "gain in held-out reward by part: reward/length +1.50, reward_model -0.50; some"
    assert found["c"].text.startswith(text)  # type: ignore[union-attr]


def test_parts_of_a_gain_that_is_not_significant_say_nothing(tmp_path: Path) -> None:
    settings = {"ppo": {"reward_functions": [{"function": "m:length", "weight": 1}]}}
    numbers = {"heldout_reward": [0.0, 0.5], "heldout_reward_model": [0.0, -1.0], "heldout_reward/length": [0.0, 1.5]}
    for folder, last, is_found in (("a", [2.0, -1.0], False), ("b", [0.6, 0.4], True)):
        rows = {step: completions(rewards, [9.0] * 20) for step, rewards in enumerate(([0.0] * 20, last * 10))}
        found = examine(tmp_path / folder, "ppo", numbers, settings=settings, heldout={"ppo": rows})
        assert ("reward parts" in found) == is_found


@pytest.mark.parametrize("recorded", [{"draw_gap": [4e-7], "draw_gap_max": [3e-6]}, {}])
def test_invariant_that_broke_in_training_is_wrong_whatever_is_recorded(
    tmp_path: Path, recorded: dict[str, list[float]]
) -> None:
    """As when `alarms.stop` ended the run, or records have a step between them."""
    run = write_run(tmp_path / "run", {"ppo": START | recorded})
    line = {
        "stage": "ppo",
        "step": 3,
        "time": 1.0,
        "tag": "warning",
        "rule": "drawing",
        "text": "step 3: stale; old; report it",
        "state": "stale; old",
        "remedy": "report it",
    }
    with run.stages[0].directory.metrics.open("a") as file:
        file.write(json.dumps(line) + "\n")
    run = read_run(run.path)
    found = {finding.name: finding for finding in examine_stage(run, run.stages[0])}
    assert found["drawing"] == Finding("drawing", "plumbing", "wrong", "stale; old", 3, "report it")
    assert worst([*found.values()]) == "wrong"


@pytest.mark.parametrize(
    ("rule", "state"), [("finite gradients", "wrong"), ("left-out step", "look here"), ("", "fine")]
)
def test_step_that_was_not_taken_is_found(tmp_path: Path, rule: str, state: str) -> None:
    run = write_run(tmp_path / "run", {"sft": {"grad_norm": [1.0, 2.0], "learning_rate": [1e-5, 1e-5]}})
    line = {
        "stage": "sft",
        "step": 3,
        "time": 1.0,
        "tag": "warning",
        "rule": rule,
        "text": "t",
        "state": "NaN in layer 7",
    }
    if rule:
        with run.stages[0].directory.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
    run = read_run(run.path)
    findings = examine_stage(run, run.stages[0])
    assert worst(findings) == state
    found = {finding.name: finding for finding in findings}
    assert found["finite gradients"].state == ("wrong" if rule == "finite gradients" else "fine")
    if rule:
        assert (found[rule].text, found[rule].step) == ("NaN in layer 7", 3)
    assert summarize_stage(run, run.stages[0], findings) == "NaN in layer 7" or not rule


def test_checks_and_rules_of_one_name_have_one_condition() -> None:
    """Because the warning replaces the check."""
    shared = {check.name for check in CHECKS} & {rule.name for rule in RULES}
    assert shared == {rule.name for rule in RULES if rule.is_invariant} | {"no gradient"}


def test_gap_without_the_first_step_is_judged_by_its_absolute_limit(tmp_path: Path) -> None:
    steps = {"draw_gap": [10, 20], "draw_gap_max": [10, 20]}
    for folder, gap, state in (("a", 0.5, "wrong"), ("b", 1e-3, "cannot tell")):
        numbers = {"draw_gap": [gap, gap], "draw_gap_max": [gap, gap]}
        assert examine(tmp_path / folder, "ppo", numbers, steps=steps)["drawing"].state == state


def test_unknown_precision_tells_nothing(tmp_path: Path) -> None:
    for folder, precision in (("a", "auto"), ("b", None)):
        found = examine(tmp_path / folder, "ppo", START, precision=precision)["first KL"]
        assert (found.state, found.text) == ("cannot tell", "not recorded: the precision of training")


@pytest.mark.parametrize(
    ("key", "good", "bad", "settings"),
    [
        ("equal_group_share", [0.1, 0.2], [0.1, 0.9], {}),
        ("explained_variance", [-3.0, 0.5], [0.5, -0.1], {}),
        ("entropy", [2.0, 1.0], [2.0, 0.1], {}),
        ("clip_fraction", [0.1, 0.1], [0.1, 0.5], {"ppo": {"ppo_epochs": 2}}),
        ("skipped_steps", [1.0] * 10 + [0.0] * 10, [0.0, 1.0], {}),
    ],
)
def test_signal_fires_at_the_end_of_bad_runs_only(
    tmp_path: Path, key: str, good: list[float], bad: list[float], settings: dict[str, Any]
) -> None:
    names = {check.needs[0]: check.name for check in CHECKS if check.needs}
    for folder, values, state in (("a", good, "fine"), ("b", bad, "look here")):
        assert examine(tmp_path / folder, "ppo", {key: values}, settings=settings)[names[key]].state == state


def test_verdict_is_the_worst_finding(tmp_path: Path) -> None:
    numbers = START | {"kl": [6.0, 7.0], "entropy": [2.0, 0.1], "learning_rate": [1e-5, 1e-5]}
    run = write_run(tmp_path / "run", {"ppo": numbers})
    findings = examine_stage(run, run.stages[0])
    assert worst(findings) == "wrong"
    assert summarize_stage(run, run.stages[0], findings).startswith("the policy differs from its reference")
    assert worst([finding for finding in findings if finding.state == "cannot tell"]) == "cannot tell"
    assert worst([]) == "cannot tell", "a stage that nothing was said of is not called fine"


def test_numbers_are_in_the_order_of_their_records(tmp_path: Path) -> None:
    names = [
        f"heldout_{name}" for name in ("perplexity", "truncated_share", "distinct_2", "loss", "accuracy", "margin")
    ]
    run = write_run(tmp_path / "run", {"sft": {name: [1.0] for name in names}})
    assert [*run.stages[0].curves] == names, "a verdict of no check lists the first ones"


def test_every_check_is_tried_here_and_explained_in_the_docs() -> None:
    root = Path(__file__).parents[2]
    page, tests = (root / "docs/diagnosis.md").read_text(encoding="utf-8"), Path(__file__).read_text(encoding="utf-8")
    for check in CHECKS:
        assert f"| {check.name} |" in page
        assert f'"{check.name}"' in tests or (check.needs and f'"{check.needs[0]}"' in tests), check.name
