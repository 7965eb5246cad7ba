"""The policy that PPO ends with is the best one: in a language whose completions can all be listed, it is known.

A further algorithm, or another way of running this one, is one more row of `ALGORITHMS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from accelerators import Accelerator
from rlhf.data.tokenization import StageData
from rlhf.rl.trainer import PPO, Models
from tests.helpers import llama
from tests.in_process import given, scalar_llama, stage_context
from tests.optimum.language import (
    END,
    LENGTH,
    PROMPT,
    PROMPT_COLUMNS,
    WORDS,
    Distance,
    TableOfRewards,
    log_probabilities,
    optimum,
    tokenizer,
)

BETA = 0.5
# First distributions that are far from uniform, and features of every input from the start.
SIZES = {"initializer_range": 0.2, "tie_word_embeddings": False, "eos_token_id": END}


class Algorithm(NamedTuple):
    """How to run, and how near the best policy it must come."""

    name: str
    ppo: dict[str, Any]  # settings that differ from those of `build`
    nats: float = 0.01  # KL either way
    reward: float = 0.01


ALGORITHMS = [
    Algorithm("ppo", {}),
    Algorithm("ppo at another temperature", {"sampling": {"temperature": 1.5}}),
]


def build(accelerator: Accelerator, folder: Path, changes: dict[str, Any], seed: int) -> PPO:
    adamw = {"learning_rate": 3e-3, "warmup": 0.02, "min_lr_ratio": 0.0}
    settings = {
        "batch_size": 256,
        "minibatch_size": 128,
        "ppo_epochs": 2,
        "steps": 100,
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
    models = Models(*map(given, (actor, reference, critic, TableOfRewards(seed=seed))))
    prompts = [PROMPT] * context.config.ppo.batch_size
    accelerator.seed(seed)
    return PPO(context, models, tokenizer(), StageData(prompts, prompts[:1], []))


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.name)
def test_the_policy_becomes_the_best_one(algorithm: Algorithm, accelerator: Accelerator, tmp_path: Path) -> None:
    ppo = build(accelerator, tmp_path, algorithm.ppo, seed=0)
    rewards = TableOfRewards(seed=0).rewards()

    def found() -> torch.Tensor:
        return log_probabilities(ppo.actor.module, ppo.settings.sampling.temperature)

    best = optimum(found(), rewards, BETA)
    before = Distance.between(found(), best, rewards)
    assert min(before.forward, before.backward) > 0.5, "there is nothing to learn"
    for index in range(ppo.settings.steps):
        ppo.step(index)
    after = Distance.between(found(), best, rewards)
    assert max(after.forward, after.backward) < algorithm.nats, (before, after)
    assert after.reward < algorithm.reward, (before, after)
