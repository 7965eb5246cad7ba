"""Steps of PPO are those of the plain reference: rollout statistics, losses, gradients' norms, weights, coefficient."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import mark_slow
from tests.reference import cases, expected, real

LORA = cases.LORA | {"learning_rate": 5e-3}
LATE = {"schedule": "linear", "warmup": 0.4, "min_lr_ratio": 0.2}
DEFAULTS = {"lam": 0.95, "gamma": 1.0, "value_clip": 0.2}  # what is not read is not to be said
ENDED_EARLY = "scores of all rollouts scaled, updates that end early"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ZeRO 1, a batch of two epochs": ("llama", {}),
    "ZeRO 0, LoRA": ("llama", {"engine": {"zero_stage": 0}, "lora": LORA}),
    "ZeRO 0, GPT-2": ("gpt2", {"engine": {"zero_stage": 0}, "steps": 1}),
    "GPT-2, LoRA": ("gpt2", {"lora": LORA}),
    "gradient checkpointing": ("llama", {"model": {"gradient_checkpointing": True}, "steps": 1}),
    "one minibatch, no whitening, a fixed coefficient, dynamic shapes": (
        "llama",
        {
            "engine": {"zero_stage": 0, "shapes": "dynamic"},
            "minibatch_size": None,
            "micro_batch_size": None,
            "ppo_epochs": 1,
            "steps": 3,
            "whiten_advantages": False,
            "kl_target": None,
            "optimizer": cases.OPTIMIZER | LATE,
        },
    ),
    "one update of four micro-batches, ZeRO 1": ("llama", cases.ONE_UPDATE | {"steps": 3}),
    "one update of four micro-batches, ZeRO 2, LoRA, checkpoints, entropy, raw text": (
        "llama",
        cases.ONE_UPDATE
        | {"engine": {"zero_stage": 2}, "lora": LORA, "model": {"gradient_checkpointing": True}}
        | {"entropy_coef": 0.05, **cases.PTX},
    ),
    "one update, ZeRO 3": (
        "llama",
        cases.ONE_UPDATE
        | {"micro_batch_size": None, "engine": {"zero_stage": 3, "zero_persistence_threshold": 0}, "steps": 3},
    ),
    "RLOO, one update of two micro-batches": (
        "llama",
        DEFAULTS
        | cases.ONE_UPDATE
        | {"estimator": "rloo", "micro_batch_size": 4, "kl_in": "loss"}
        | {"kl_estimator": "k3"},
    ),
    "k2 in the loss, scores of a rollout scaled, a penalty without an end": (
        "llama",
        {"kl_in": "loss", "kl_estimator": "k2", "normalize_scores": "batch", "missing_eos_penalty": 0.7}
        | {"score_clip": 0.6},
    ),
    "k3 in the loss, a fixed coefficient, scores of all rollouts scaled, a bonus for entropy, LoRA": (
        "llama",
        {"kl_in": "loss", "kl_estimator": "k3", "normalize_scores": "running", "entropy_coef": 0.05}
        | {"kl_target": None, "lora": LORA},
    ),
    "k2 in the reward": ("llama", {"kl_estimator": "k2", "steps": 1}),
    "k3 in the reward": ("llama", {"kl_estimator": "k3", "steps": 1}),
    ENDED_EARLY: (
        "llama",
        {"normalize_scores": "running", "kl_stop": 0.002, "steps": 3, "optimizer": cases.PPO["optimizer"] | LATE}
        | {"critic_optimizer": cases.CRITIC_OPTIMIZER | LATE},
    ),
    "RLOO, three rollouts": ("llama", DEFAULTS | {"estimator": "rloo", "steps": 3}),
    "RLOO, LoRA, two of each prompt, a mean over tokens": (
        "llama",
        DEFAULTS | {"estimator": "rloo", "completions_per_prompt": 2, "loss_mean": "token", "lora": LORA, "steps": 1},
    ),
    "GRPO, four of each prompt": ("llama", DEFAULTS | {"estimator": "grpo", "completions_per_prompt": 4}),
    "Dr. GRPO": (
        "llama",
        DEFAULTS
        | {"estimator": "grpo", "completions_per_prompt": 4, "group_std": False, "loss_mean": "constant", "steps": 1},
    ),
    "REINFORCE++": ("llama", DEFAULTS | {"estimator": "reinforce++", "gamma": 0.9}),
    "two of each prompt, a mean over sequences": (
        "llama",
        {"completions_per_prompt": 2, "loss_mean": "sequence", "steps": 1, "engine": {"shapes": "dynamic"}},
    ),
}
OFTEN = {
    "ZeRO 1, a batch of two epochs",
    "GPT-2, LoRA",
    "one minibatch, no whitening, a fixed coefficient, dynamic shapes",
    "one update of four micro-batches, ZeRO 2, LoRA, checkpoints, entropy, raw text",
    "one update, ZeRO 3",
    "k2 in the loss, scores of a rollout scaled, a penalty without an end",
    "k3 in the loss, a fixed coefficient, scores of all rollouts scaled, a bonus for entropy, LoRA",
    "k3 in the reward",
    ENDED_EARLY,
    "RLOO, LoRA, two of each prompt, a mean over tokens",
    "Dr. GRPO",
    "REINFORCE++",
}
"""Those that the default suite runs."""
ROWS = 14  # two rows of the second batch of 8 come from the next epoch


@pytest.fixture(scope="module")
def ran(accelerator, tmp_path_factory):
    """name -> (configuration, what the run left, what it should have left, the reference's algorithm)."""
    known: dict[str, Any] = {}

    def run(name: str) -> Any:
        if name not in known:
            kind, changes = CASES[name]
            config = cases.configuration("ppo", **changes)
            models = cases.Models.build(kind, lora=bool(config.lora.rank))
            actual = real.reinforced(accelerator, config, models, ROWS, tmp_path_factory.mktemp("run"))
            known[name] = config, actual, *expected.reinforced(config, models, actual.rollouts, actual.heldout)
        return known[name]

    return run


@pytest.mark.parametrize("name", mark_slow({name: name for name in CASES}, except_for=OFTEN))
def test_steps_are_those_of_the_reference(ran, name):
    config, actual, wanted, _ = ran(name)
    assert len(actual.steps) == config.ppo.steps
    cases.assert_same(actual, wanted)


def test_these_steps_bring_every_limit_to_bear(ran):
    """Otherwise the comparison would not see a mistake in one; where sampling changes, choose other settings."""
    config, _, wanted, reference = ran("ZeRO 1, a batch of two epochs")
    settings = config.ppo
    rows, updates = [row for rollout in reference.rollouts for row in rollout], reference.updates
    assert [len(rollout) for rollout in reference.rollouts] == [8, 8]
    assert {1, cases.COMPLETION} < {len(row.completion) for row in rows}
    assert len({len(row.prompt) for row in rows}) > 3
    clipped = [abs(row.score) > settings.score_clip for row in rows]
    assert any(clipped) and not all(clipped)
    assert updates[0]["clip_fraction"] == updates[0]["value_clip_fraction"] == 0
    assert 0 < updates[2]["clip_fraction"] < 1 and 0 < updates[2]["value_clip_fraction"] < 1
    assert sum(update["grad_norm"] > settings.optimizer.max_grad_norm for update in updates) > len(updates) / 2
    assert all(update["critic_grad_norm"] > settings.critic_optimizer.max_grad_norm for update in updates)
    error = wanted.steps[0]["kl"] / settings.kl_target - 1
    assert 0 < abs(error) < 0.2


def test_steps_end_early_and_scale_clip_and_penalize_some_scores(ran):
    config, actual, wanted, _ = ran(ENDED_EARLY)
    assert {step["updates"] for step in wanted.steps} & {2.0, 3.0}, [step["updates"] for step in wanted.steps]
    rates = [step["learning_rate"] for step in actual.steps]
    peak = config.ppo.optimizer.learning_rate
    # 12 updates in all, of which round(0.4 * 12) rise; then the line falls from the peak to a fifth of it in 7 steps.
    assert rates == pytest.approx([peak / 6, peak * 5 / 6, peak * (1 - 0.8 * 3 / 6)])
    for name in (name for name in CASES if "in the loss" in name):
        config, _, _, reference = ran(name)
        rows = [row for rollout in reference.rollouts for row in rollout]
        limits = {config.ppo.score_clip, -config.ppo.score_clip}
        ended = [row for row in rows if row.completion[-1] in reference.ends]
        assert 0 < len(ended) < len(rows)
        assert any(row.rewards[-1] in limits for row in ended) and any(row.rewards[-1] not in limits for row in ended)


def test_every_pass_visits_every_row_once_in_an_order_of_its_own(ran):
    _, actual, *_ = ran("ZeRO 1, a batch of two epochs")
    orders = [[row for part in minibatches for row in part] for step in actual.rollouts for minibatches in step.passes]
    assert [sorted(order) for order in orders] == [list(range(8))] * 4
    assert len({tuple(order) for order in orders}) == 4


def test_first_update_starts_from_the_policy_that_acted(ran):
    """With one update a step, every ratio is 1: nothing is clipped, however large the learning rate."""
    _, actual, *_ = ran("one minibatch, no whitening, a fixed coefficient, dynamic shapes")
    assert [step["clip_fraction"] for step in actual.steps] == [0, 0, 0]


RESUMED = {
    "ZeRO 1": "ZeRO 1, a batch of two epochs",
    "LoRA": "GPT-2, LoRA",
    "no critic": "REINFORCE++",
    ENDED_EARLY: ENDED_EARLY,
    "RLOO": "RLOO, three rollouts",
    "raw text": "one update of four micro-batches, ZeRO 2, LoRA, checkpoints, entropy, raw text",
}


@pytest.mark.parametrize("name", mark_slow(RESUMED, except_for=RESUMED.keys() - {"RLOO"}))
def test_resumed_run_takes_the_second_step_of_the_reference(accelerator, ran, tmp_path, name):
    """Its rollouts, records and weights are those of a run without a break."""
    config, whole, wanted, _ = ran(name)
    kind, _ = CASES[name]
    models = cases.Models.build(kind, lora=bool(config.lora.rank))
    with pytest.raises(real.StopError):
        real.reinforced(accelerator, config, models, ROWS, tmp_path, stop_before=1)
    resumed = real.reinforced(accelerator, config, models, ROWS, tmp_path)
    assert resumed.rollouts == whole.rollouts[1:]
    cases.assert_same(resumed, wanted)
