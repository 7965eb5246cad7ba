"""Rules about runs that go wrong: each holds beyond its limit and not within it, is said once, and names its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import build_config
from rlhf.reporting.health import HealthMonitor, HealthWarning, describe_rates, fill_keys
from rlhf.reporting.rules import RULES
from rlhf.utils.units import format_number

PPO = {
    "tokens": 640.0,
    "response_length": 10.0,
    "reward": 1.0,
    "reward_std": 1.0,
    "kl": -1e-6,
    "draw_gap": 4e-7,
    "update_gap": 0.0,
    "score_gap": 0.0,
    "direction": 0.5,
    "entropy": 2.0,
    "truncated_share": 0.1,
    "score_clip_fraction": 0.0,
    "explained_variance": 0.5,
    "grad_norm": 1.0,
}
SFT = {"loss": 2.0, "grad_norm": 1.0}
DPO = {"loss": 0.69, "grad_norm": 1.0, "chosen_log_prob": -20.0, "chosen_reward": 0.0}
WEIGHTS = {"changed_frozen_weights": 0.0, "unchanged_weights": 0.5, "unequal_weights": 0.0}
ROWS = {"wrong_targets": 0.0, "repeated_rows": 0.0, "score_gap": 0.0}
HEALTHY: dict[str, Any] = {
    "ppo": PPO | WEIGHTS,
    "sft": SFT | WEIGHTS | ROWS,
    "reward": SFT | WEIGHTS | ROWS,
    "dpo": DPO | WEIGHTS | ROWS,
}
# rule: (stage, numbers within the limit, numbers beyond it, steps until it is said, a key with its value)
STEPS: dict[str, Any] = {
    "kl": ("ppo", {"kl": 9.9}, {"kl": 10.1}, 1, "ppo.kl_coef (now 0.1)"),
    "collapsed entropy": ("ppo", {"entropy": 0.101}, {"entropy": 0.099}, 1, "ppo.optimizer.learning_rate (now 1e-05)"),
    "truncation": ("ppo", {"truncated_share": 0.5}, {"truncated_share": 0.51}, 1, "missing_eos_penalty (now empty)"),
    "equal scores": ("ppo", {"reward_std": 0.01}, {"reward_std": 0.0}, 3, "ppo.reward_functions"),
    "clipped scores": ("ppo", {"score_clip_fraction": 0.99}, {"score_clip_fraction": 1.0}, 1, "are clipped to ±5, so"),
    "useless critic": ("ppo", {"explained_variance": -0.9}, {"explained_variance": -1.1}, 10, "ppo.critic_optimizer."),
    "vanished gradient": ("ppo", {"grad_norm": 1e-4}, {"grad_norm": 1e-6}, 3, "ppo.optimizer.learning_rate"),
    "vanished gradient of fp16": (
        "sft",
        {"grad_norm": 9.0},
        {"grad_norm": float("inf")},
        10,
        "sft.optimizer.learning_rate",
    ),
    "loss": ("sft", {"loss": 3.9}, {"loss": 4.1}, 3, "sft.optimizer.learning_rate (now 1e-05)"),
    "loss of pairs": ("reward", {"loss": 3.9}, {"loss": 4.1}, 3, "reward.optimizer.learning_rate"),
    "drawing": ("ppo", {"draw_gap": 9e-6}, {"draw_gap": 1.1e-5}, 1, "please report this as a bug"),
    "reference": ("ppo", {"kl": 1e-9}, {"kl": 0.0}, 2, "compared with itself"),
    "first update": ("ppo", {"update_gap": 9e-4}, {"update_gap": 1.1e-3}, 1, "please report this as a bug"),
    "scoring": ("reward", {"score_gap": 9e-4}, {"score_gap": 1.1e-3}, 1, "please report this as a bug"),
    "direction": ("ppo", {"direction": -0.09}, {"direction": -0.11}, 1, "have the correlation -0.11"),
    "targets": ("sft", {}, {"wrong_targets": 1.0}, 1, "please report this as a bug"),
    "repeated rows": ("dpo", {}, {"repeated_rows": 2.0}, 1, "please report this as a bug"),
    "frozen weights": ("ppo", {}, {"changed_frozen_weights": 1.0}, 1, "please report this as a bug"),
    "trained weights": ("reward", {"unchanged_weights": 0.99}, {"unchanged_weights": 1.0}, 1, "although there are"),
    "ranks": ("dpo", {}, {"unequal_weights": 1.0}, 1, "please report this as a bug"),
    "forgotten replies": (
        # reference -20: chosen_log_prob - chosen_reward / beta
        *("dpo", {"chosen_log_prob": -39.0, "chosen_reward": -1.9}, {"chosen_log_prob": -41.0, "chosen_reward": -2.1}),
        *(1, "dpo.beta (now 0.1)"),
    ),
}


def say(monitor: HealthMonitor, first: dict[str, float], changed: dict[str, float], steps: int) -> list[int]:
    """Return the steps at which the monitor speaks, if `changed` numbers follow the first step."""
    assert monitor.judge_step(1, first) == []
    spoken = []
    for step in range(2, 2 + steps):
        spoken += [step] * len(monitor.judge_step(step, first | changed))
    return spoken


@pytest.mark.parametrize("name", STEPS)
def test_rule_is_said_once_beyond_its_limit_and_never_within(name: str) -> None:
    stage, within, beyond, after, key = STEPS[name]
    healthy = HealthMonitor(build_config({}), stage)
    assert say(healthy, HEALTHY[stage], within, 25) == [] and healthy.lines == {}
    ruined = HealthMonitor(build_config({}), stage)
    assert say(ruined, HEALTHY[stage], beyond, 25) == [1 + after]
    [line] = ruined.lines.values()
    [rule] = ruined.lines
    assert line.startswith(f"{rule}, step {1 + after}: ") and key in line and rule in name


def test_sudden_growth_of_kl_is_said_below_the_limit() -> None:
    slow, sudden = (HealthMonitor(build_config({}), "ppo") for _ in range(2))
    assert not any(slow.judge_step(step, PPO | {"kl": 0.3 * (step - 1)}) for step in range(1, 30))
    spoken = [len(sudden.judge_step(step, PPO | {"kl": kl})) for step, kl in enumerate([0.0, 0.3, 3.5], 1)]
    assert spoken == [0, 0, 0], "KL is 0 at first, and growth from 0 says nothing"
    for step in range(4, 14):
        sudden.judge_step(step, PPO | {"kl": 0.3})
    assert len(sudden.judge_step(14, PPO | {"kl": 3.5})) == 1


def test_kl_stays_0_after_a_rollout_that_teaches_nothing() -> None:
    """All completions of the first rollout have the same score, so that no weight moves."""
    monitor = HealthMonitor(build_config({}), "ppo")
    nothing, something = PPO | {"kl": 0.0, "grad_norm": 0.0}, PPO | {"kl": 0.0}
    assert monitor.judge_step(1, nothing) == monitor.judge_step(2, something) == []
    assert "compared with itself" in monitor.judge_step(3, something)[0].state


# rule: (stage, heldout rows, step, numbers of the evaluation, text)
EVALUATIONS: dict[str, Any] = {
    "repetition": ("ppo", 99, 5, {"distinct_2": 0.03}, "distinct_2 fell from 0.4 to 0.03"),
    "bad start": ("ppo", 99, 0, {"entropy": 5.5, "truncated_share": 0.2}, "entropy is 5.5 nats (88% of uniform)"),
    "few prompts": ("ppo", 7, 0, {}, "7 rows only; raise data.heldout_fraction (now 0.05)"),
    "hardly learned": ("sft", 99, None, {"perplexity": 67.0}, "perplexity is 67, that of random guessing 512"),
    "endless": ("sft", 99, None, {"truncated_share": 1.0}, "none of the greedy completions"),
    "few rows": ("reward", 13, None, {"accuracy": 1.0}, "accuracy 13 of 13 has the 95 % interval 77% to 100%"),
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluation_has_its_rules(name: str) -> None:
    stage, rows, step, numbers, text = EVALUATIONS[name]
    healthy = {"ppo": PPO | {"distinct_2": 0.4}, "sft": {"perplexity": 9.0, "truncated_share": 0.3}, "reward": {}}[
        stage
    ]

    def judge(numbers: dict[str, float], rows: int) -> list[HealthWarning]:
        monitor = HealthMonitor(build_config({}), stage)
        monitor.heldout_rows, monitor.vocabulary = rows, 512
        before = monitor.judge_evaluation(0, healthy if step != 0 else numbers)
        return (
            before
            if step == 0
            else monitor.judge_result(numbers)
            if step is None
            else monitor.judge_evaluation(step, numbers)
        )

    assert judge(healthy, 99) == []
    [warning] = judge(healthy | numbers, rows)
    assert text in warning.line


def test_every_rule_is_tried() -> None:
    tried = {name.partition(" of ")[0] for name in STEPS} | set(EVALUATIONS) | {"no gradient", "first KL"}
    assert {rule.name for rule in RULES} == tried


def test_page_lists_every_rule_by_its_name() -> None:
    page = Path(__file__).parents[2].joinpath("docs/reading-a-run.md").read_text(encoding="utf-8")
    table = page.partition("| name | warning |")[2].partition("\n\n")[0]
    names = [name.strip() for row in table.splitlines()[2:] for name in row.split("|")[1].split(",")]
    assert sorted(filter(None, names)) == sorted(rule.name for rule in RULES)


@pytest.mark.parametrize(
    ("precision", "kl", "gap", "rules"),
    [
        ("fp32", 9e-4, 9e-4, []),  # 10 tokens
        ("fp32", 1.1e-3, 1.1e-3, ["first KL", "drawing"]),
        ("bf16", 0.19, 0.09, []),
        ("bf16", -0.21, 0.11, ["first KL", "drawing"]),
    ],
)
def test_invariants_are_judged_from_the_first_step_by_precision(
    precision: str, kl: float, gap: float, rules: list[str]
) -> None:
    monitor = HealthMonitor(build_config({}), "ppo", precision=precision)
    warnings = monitor.judge_step(1, PPO | {"kl": kl, "draw_gap": gap})
    assert [warning.rule.name for warning in warnings if warning.rule.is_invariant] == [*monitor.lines] == rules


def test_gap_to_servers_is_judged_by_their_hand_over_alone() -> None:
    """A recorded rollout has none."""
    monitor = HealthMonitor(build_config({"ppo": {"rollout": {"where": ["http://a:1"]}}}), "ppo", precision="bf16")
    assert monitor.judge_step(1, PPO | {"draw_gap": 0.012}) == []
    assert monitor.judge_step(2, PPO | {"draw_gap": 0.012, "handover_gap": 0.011}) == []
    (warning,) = monitor.judge_step(3, PPO | {"draw_gap": 0.06, "handover_gap": 0.011})
    assert warning.rule.name == "drawing" and "handed over" in warning.state


def test_any_gap_of_an_exact_run_breaks_an_invariant() -> None:
    monitor = HealthMonitor(build_config({"ppo": {"generation_exact": True}}), "ppo")
    assert monitor.judge_step(1, PPO | {"draw_gap": 0.0}) == []
    warnings = monitor.judge_step(2, PPO | {"draw_gap": 1e-9, "update_gap": 1e-9})
    assert [warning.rule.name for warning in warnings] == ["drawing", "first update"]
    assert all("not exactly" in warning.state and warning.rule.is_invariant for warning in warnings)


def test_quantized_reference_may_differ_from_its_policy() -> None:
    config = build_config({"ppo": {}, "roles": {"reference": {"frozen": "int8"}}})
    monitor = HealthMonitor(config, "ppo")
    assert monitor.judge_step(1, PPO | {"kl": 0.5}) == []


def test_kl_of_a_later_step_breaks_no_invariant() -> None:
    monitor = HealthMonitor(build_config({}), "ppo")
    say(monitor, PPO, {"kl": 11.0}, 20)
    invariants = {rule.name for rule in RULES if rule.is_invariant}
    assert monitor.lines and not invariants & monitor.lines.keys()


def test_resumed_stage_repeats_nothing_and_remembers_its_start() -> None:
    first, resumed = (HealthMonitor(build_config({}), "ppo") for _ in range(2))
    say(first, PPO, {"kl": 11.0}, 1)
    resumed.load_state_dict(first.state_dict())
    [warning] = resumed.judge_step(3, PPO | {"kl": 11.0, "entropy": 0.01})
    assert "fell from 2 to 0.01" in warning.state


def test_invariants_are_judged_in_a_stage_whose_first_step_lacks_their_numbers() -> None:
    """It began with an earlier version of rlhf. A rule that compares with the first step says nothing."""
    monitor = HealthMonitor(build_config({}), "sft")
    assert monitor.judge_step(1, {"grad_norm": 1.0}) == []
    for step in range(2, 9):
        warnings = monitor.judge_step(step, {"grad_norm": 1.0, "repeated_rows": 3.0, "loss": 99.0 * step})
        assert [warning.rule.name for warning in warnings] == ["repeated rows"][: step == 2]


def test_gradient_of_zero_from_the_first_step_does_not_ask_for_a_lower_rate() -> None:
    monitor = HealthMonitor(build_config({}), "ppo")
    warnings = [warning for step in range(1, 9) for warning in monitor.judge_step(step, PPO | {"grad_norm": 0.0})]
    [line] = [warning.line for warning in warnings]
    assert line.startswith("no gradient, step 3: the model learns nothing: grad_norm is 0")
    assert "learning_rate" not in line


def test_remedy_names_max_steps_instead_of_epochs_if_it_is_set() -> None:
    config = build_config({"sft": {"epochs": 20, "max_steps": 6}})
    assert fill_keys("raise {sft.epochs}", config, "ppo") == "raise sft.max_steps (now 6)"
    assert fill_keys("raise {*.epochs}", build_config({"sft": {"epochs": 20}}), "sft") == "raise sft.epochs (now 20)"


def test_numbers_that_a_stage_lacks_break_no_rule() -> None:
    for stage in HEALTHY:
        assert HealthMonitor(build_config({}), stage).judge_step(1, {"rows": 1.0}) == []


def test_only_implausible_rates_get_a_line() -> None:
    config = build_config({"sft": {"optimizer": {"learning_rate": 5}}, "dpo": {"optimizer": {"learning_rate": 9e-3}}})
    [line] = describe_rates(config, ["sft", "reward", "dpo", "ppo"])
    assert line.startswith("sft.optimizer.learning_rate: 5 ") and describe_rates(config, ["reward", "ppo"]) == []


def test_huge_numbers_are_short() -> None:
    assert [format_number(value) for value in (1.014e304, 1234567.0, 2e12, -3e15)] == [
        *("1.014e+304", "1,234,567", "2e+12", "-3e+15")
    ]
