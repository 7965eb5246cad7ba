"""The policy that an algorithm ends with is the known one: in a language whose completions can all be listed.

With the KL penalty in the reward (k1) that is the best policy of all, known in closed form. In the loss, a penalty is
that of each token; where it ends is computed from the definition (`language.Update`), and is not the same place.

A further algorithm, or another way of running one, is one more row of `ALGORITHMS`.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from accelerators import Accelerator
from rlhf.data.stage_dataset import StageData
from rlhf.trainers.ppo.trainer import PPOTrainer
from tests.helpers import llama
from tests.in_process import ppo_models, scalar_llama, stage_context
from tests.optimum.language import (
    BETA,
    LENGTH,
    PROMPT,
    PROMPT_COLUMNS,
    SIZES,
    WORDS,
    Distance,
    TableOfRewards,
    Update,
    log_probabilities,
    of_words,
    optimum,
    table,
    tokenizer,
)


class Algorithm(NamedTuple):
    """How to run, where that ends if it is not the best policy, and how near it must come."""

    name: str
    ppo: dict[str, Any]  # settings that differ from those of `build`
    update: Update | None = None
    nats: float = 0.01  # KL either way
    reward: float = 0.03  # 0.01 nat would allow about 0.1


_FEWER_ROWS = {"steps": 60, "batch_size": 512, "minibatch_size": 256}
ALGORITHMS = [
    Algorithm("ppo", _FEWER_ROWS),
    Algorithm("rloo", {"estimator": "rloo"}),
    # A group of three is the largest whose members are quickly listed.
    Algorithm(
        "grpo",
        {"estimator": "grpo", "completions_per_prompt": 3},
        Update("k3", BETA, "sequence", group=3, divided=True),
    ),
    Algorithm("reinforce++", {"estimator": "reinforce++"}),
]
_UNSCALED = {"whiten_advantages": False, "kl_in": "loss"}  # a penalty beside whitened advantages would be another
OTHERS = [
    Algorithm("ppo at another temperature", {"sampling": {"temperature": 1.5}}),
    Algorithm(
        "grpo, not divided by deviations",
        {"estimator": "grpo", "group_std": False},
        Update("k3", BETA, "sequence", group=8),
    ),
    # k2's gradient is noisier than k3's, so the run is longer: of four seeds, 80 steps end at 0.006 to 0.012 nat.
    Algorithm(
        "rloo, k2", {"estimator": "rloo", "kl_in": "loss", "kl_estimator": "k2", "steps": 120}, Update("k2", BETA)
    ),
    Algorithm("rloo, k3", {"estimator": "rloo", "kl_in": "loss", "kl_estimator": "k3"}, Update("k3", BETA)),
    Algorithm("rloo, mean over tokens", {"estimator": "rloo", "loss_mean": "token"}),
    Algorithm(
        "rloo, mean over sequences",
        {"estimator": "rloo", "loss_mean": "sequence"},
        Update("k1", BETA, "sequence"),
    ),
    Algorithm(
        "Dr. GRPO",
        {"estimator": "grpo", "group_std": False, "loss_mean": "constant"},
        Update("k3", BETA, "constant", group=8),
    ),
    Algorithm(
        "Dr. GRPO, k1",
        {"estimator": "grpo", "group_std": False, "loss_mean": "constant", "kl_in": "reward", "kl_estimator": "k1"},
    ),
    # In a pair every advantage is +-1/sqrt(2), however far apart the rewards are. A penalty of BETA would keep the
    # policy within 0.33 nat of the first one, so it is weaker; two completions are a noisy group, so the run is longer.
    Algorithm(
        "grpo, k2",
        {
            "estimator": "grpo",
            "kl_estimator": "k2",
            "completions_per_prompt": 2,
            "kl_coef": 0.7 * BETA,
            "steps": 120,
        },
        Update("k2", 0.7 * BETA, "sequence", group=2, divided=True),
    ),
    Algorithm("reinforce++, k2", {"estimator": "reinforce++", "kl_estimator": "k2", **_UNSCALED}, Update("k2", BETA)),
    Algorithm("reinforce++, k3", {"estimator": "reinforce++", "kl_estimator": "k3", **_UNSCALED}, Update("k3", BETA)),
    Algorithm("ppo, several completions of a prompt", {"completions_per_prompt": 4}),
    # With lambda 1 what a critic knows is a baseline only, and how well it does not matter.
    Algorithm("ppo, k2", {"kl_estimator": "k2", "lam": 1.0, **_UNSCALED}, Update("k2", BETA)),
    Algorithm("ppo, k3", {"kl_estimator": "k3", "lam": 1.0, **_UNSCALED}, Update("k3", BETA)),
]
"""The same in other ways."""


def build(
    accelerator: Accelerator, folder: Path, changes: dict[str, Any], seed: int, *, padding: str = "<end>"
) -> PPOTrainer:
    adamw = {"learning_rate": 4e-3, "warmup": 0.02, "min_lr_ratio": 0.0}
    settings = {
        "batch_size": 768,
        "minibatch_size": 384,
        "ppo_epochs": 2,
        "steps": 80,
        "kl_coef": BETA,
        "score_clip": 100.0,
        "optimizer": adamw,
        "critic_optimizer": adamw,
        **changes,
    }
    data = {"max_prompt_length": PROMPT_COLUMNS, "max_completion_length": LENGTH}
    context = stage_context(accelerator, folder, "ppo", {"seed": seed, "data": data, "ppo": settings})
    actor, reference = (llama(len(WORDS), seed=seed, **SIZES) for _ in range(2))
    critic = scalar_llama(len(WORDS), seed=seed, **SIZES)
    models = ppo_models(actor, reference, critic, TableOfRewards(seed=seed))
    prompts = [PROMPT] * context.config.ppo.batch_size
    accelerator.seed(seed)
    return PPOTrainer(context, models, tokenizer(padding=padding), StageData(prompts, prompts[:1], []))


@pytest.mark.slow  # in the default suite, tests/reference compares their steps
@pytest.mark.parametrize("algorithm", [pytest.param(each, id=each.name) for each in (*ALGORITHMS, *OTHERS)])
def test_the_policy_becomes_the_known_one(algorithm: Algorithm, accelerator: Accelerator, tmp_path: Path) -> None:
    ppo = build(accelerator, tmp_path, algorithm.ppo, seed=0)
    rewards = TableOfRewards(seed=0).rewards()

    def measure() -> torch.Tensor:
        return log_probabilities(ppo.actor.module, ppo.settings.sampling.temperature)

    known = optimum(measure(), rewards, BETA)
    if algorithm.update:
        known = algorithm.update.ended(table(ppo.actor.module, ppo.settings.sampling.temperature), rewards)
    before = Distance.between(measure(), known, rewards)
    assert min(before.forward, before.backward) > 0.4, "there is nothing to learn"
    for index in range(ppo.settings.steps):
        ppo.step(index)
    after = Distance.between(measure(), known, rewards)
    assert max(after.forward, after.backward) < algorithm.nats, (before, after)
    assert after.reward < algorithm.reward, (before, after)


def test_update_with_k1_in_the_reward_ends_at_the_optimum() -> None:
    """The solver against the closed form; and the forms in the loss end elsewhere, so that they can be told apart."""
    rewards, choices = TableOfRewards(seed=0).rewards(), table(llama(len(WORDS), seed=0, **SIZES))
    best = optimum(of_words(choices).sum(1), rewards, BETA)
    for group in (3, math.inf):
        ended = Distance.between(Update("k1", BETA, group=group).ended(choices, rewards), best, rewards)
        assert max(abs(ended.forward), abs(ended.backward), ended.reward) < 1e-8
    ends = [Update(kl, BETA, mean).ended(choices, rewards) for kl in ("k2", "k3") for mean in ("token", "sequence")]
    for first, second in itertools.combinations([best, *ends], 2):
        assert Distance.between(first, second, rewards).forward > 0.005
