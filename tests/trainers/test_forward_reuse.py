"""With one update a rollout, policy and critic are scored by the passes that are trained (`ppo.reuse_forward`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerators import Memory, Precision
from rlhf.errors import ConfigError
from rlhf.trainers import context as stage
from rlhf.trainers.context import StageContext
from rlhf.trainers.ppo.trainer import PPOTrainer
from tests.engine.engines import accepted_fp16
from tests.helpers import llama
from tests.in_process import build_ppo, ppo_models
from tests.trainers.test_ppo import gpt2, scalar

ONE = {"batch_size": 6, "minibatch_size": None, "micro_batch_size": 2, "ppo_epochs": 1, "kl_target": None}


@pytest.fixture
def build(accelerator, recipe, tokenizer, tmp_path, monkeypatch):
    """Build PPO, and return it with the lines that it logged."""

    def ppo(
        model: Any = llama, *, zero_stage=1, precision="fp32", lora=None, **changes: Any
    ) -> tuple[PPOTrainer, list[str]]:
        lines, size = [], len(tokenizer)
        monkeypatch.setattr(StageContext, "say", lambda _, line: lines.append(line))
        reference = None if lora else model(size, seed=5)
        models = ppo_models(model(size), reference, scalar(model(size)), scalar(model(size)))
        accelerator.seed(0)
        precision = precision if isinstance(precision, Precision) else accelerator.precision(precision)
        options = {"engine": {"zero_stage": zero_stage}, "lora": lora, "precision": precision, **ONE, **changes}
        return build_ppo(accelerator, tmp_path, recipe, tokenizer, models, **options), lines

    return ppo


def dropping(vocabulary: int, seed: int = 0) -> Any:
    return gpt2(vocabulary)


def passes(ppo: PPOTrainer, index: int) -> dict[str, int]:
    """Forward passes of the policy and of the critic in a step, but for those that draw and those of `first_step`."""
    ppo._check_first_step = lambda uses_settings_reward: {}
    return all_passes(ppo, index)


def all_passes(ppo: PPOTrainer, index: int) -> dict[str, int]:
    """Forward passes of the policy and of the critic in a step, but for those that draw."""
    counts = dict.fromkeys(ppo.engines, 0)

    def count(name: str) -> Any:
        def hook(*_: Any) -> None:
            counts[name] += 1

        return hook

    handles = [engine.engine.register_forward_hook(count(name)) for name, engine in ppo.engines.items()]
    ppo.step(index)
    for handle in handles:
        handle.remove()
    return counts


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 3),
        ({"micro_batch_size": None}, 1),
        ({"micro_batch_size": None, "zero_stage": 3}, 1),
        ({"reuse_forward": False}, 6),
        ({"ppo_epochs": 2}, 9),
    ],
)
def test_a_row_passes_once_through_policy_and_critic(build, changes, count):
    ppo, _ = build(**changes)
    assert [passes(ppo, index) for index in range(2)] == 2 * [{"actor": count, "critic": count}]


def test_first_rollout_is_scored_once_more_after_its_update(build):
    ppo, _ = build()
    assert [all_passes(ppo, index) for index in range(2)] == [{"actor": 3 + 3, "critic": 3}, {"actor": 3, "critic": 3}]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": dropping, "dropout": 0.1}, "the actor is trained with dropout or noise"),
        ({"model": dropping, "dropout": None}, "the actor is trained with dropout or noise"),
        ({"model": dropping, "critic_dropout": 0.1}, "the critic is trained with dropout or noise"),
        ({"minibatch_size": 2}, "3 updates follow a rollout (ppo.ppo_epochs, ppo.minibatch_size)"),
        ({"zero_stage": 3}, "at ZeRO-3 DeepSpeed gathers the actor's weights in the order of one micro-batch after "),
        ({"reuse_forward": False}, "ppo.reuse_forward is false"),
    ],
)
def test_reason_for_separate_passes_is_logged(build, changes, why):
    _, lines = build(**changes)
    (line,) = (line for line in lines if "separate passes" in line)
    assert line.startswith("ppo: rollouts are scored in separate passes, not in those of the update: " + why)


@pytest.mark.parametrize("changes", [{"lora": {"rank": 2, "dropout": 0.5}}, {"model": dropping}])
def test_reused_passes_log_nothing(build, changes):
    _, lines = build(**changes)
    assert not [line for line in lines if "separate passes" in line]


@pytest.mark.parametrize(
    ("rows", "part"),
    [(2, "activations of 3 micro-batches of each model"), (None, "activations of one micro-batch of each model")],
)
def test_short_memory_needs_separate_passes(build, accelerator, monkeypatch, rows, part):
    """On any rank; there all micro-batches' activations would have to be kept at one time."""
    monkeypatch.setattr(accelerator, "memory", lambda: Memory(allocated=2**28, peak=2**28, total=2**28))
    ppo, lines = build(micro_batch_size=rows)
    assert [line for line in lines if part in line and "would hardly fit in memory (ppo.micro_batch_size)" in line]
    assert passes(ppo, 0)["actor"] == 2 * (3 if rows else 1)


@pytest.mark.parametrize(("rows", "count"), [(2, 6), (None, 1)])
def test_unknown_shape_keeps_the_passes_of_one_micro_batch(build, monkeypatch, rows, count):
    def unknown(*_: Any) -> Any:
        raise ConfigError("actor: the plan does not know the shapes of model type 'ctrl'")

    monkeypatch.setattr(stage, "shape_from", unknown)
    ppo, lines = build(micro_batch_size=rows)
    assert passes(ppo, 0)["actor"] == count
    reason = "is unknown: actor: the plan does not know"
    assert [line for line in lines if "separate passes" in line] == [line for line in lines if rows and reason in line]
    assert [line for line in lines if reason in line] or not rows


def state(ppo: PPOTrainer) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, engine in ppo.engines.items():
        with engine.whole_weights() as module:
            tensors |= {f"{name} {key}": tensor.detach().clone() for key, tensor in module.state_dict().items()}
    return tensors


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"zero_stage": 0, "lora": {"rank": 2}, "estimator": "rloo", "completions_per_prompt": 2},
        {"zero_stage": 2, "entropy_coef": 0.1},
        {"zero_stage": 3, "micro_batch_size": None},
        {"precision": "bf16"},
        {"precision": "bf16", "zero_stage": 0},
        pytest.param({"precision": "bf16", "zero_stage": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_steps_are_those_of_two_passes(build, changes):
    """To the bit: of dropout there is none, so that evaluation and training compute the same."""
    runs = []
    for once in (True, False):
        ppo, _ = build(reuse_forward=once, **changes)
        numbers = [ppo.step(index) for index in range(2)]
        runs.append((numbers, state(ppo)))
    (ours, weights), (theirs, expected) = runs
    assert ours == theirs
    assert all(numbers["approx_kl"] == numbers["clip_fraction"] == 0 for numbers in ours)
    assert weights.keys() == expected.keys()
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []


@pytest.mark.parametrize(("zero_stage", "rows"), [(0, 2), (1, 2), (3, None)])
def test_with_loss_scaling_too(build, zero_stage, rows):
    """Both models' gradients are there before either steps."""
    runs = []
    with accepted_fp16() as precision:
        for once in (True, False):
            ppo, _ = build(reuse_forward=once, zero_stage=zero_stage, micro_batch_size=rows, precision=precision)
            assert passes(ppo, 0)["actor"] == (3 if rows else 1) * (1 if once else 2)
            runs.append((ppo.step(1), state(ppo)))
    (ours, weights), (theirs, expected) = runs
    assert ours == theirs
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []


def test_scores_that_are_asked_for_leave_nothing_behind(build):
    """The scoring of `session.score` and of evaluations makes no training passes."""
    ppo, _ = build()
    (prompts,) = ppo.batches.step(0)
    scored = ppo.score(ppo.generate(prompts))
    assert scored.passes == ()
    tensors = [value for value in vars(scored).values() if isinstance(value, torch.Tensor)]
    assert tensors and not any(tensor.requires_grad for tensor in tensors)
