"""The policy that PPO ends with is the best one: in a language whose completions can all be listed, it is known.

A further algorithm, or another way of running this one, is one more row of `ALGORITHMS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from accelerators import Accelerator
from rlhf.data.rows import Message, Row
from rlhf.data.tokenization import Prompt, StageData
from rlhf.stages.ppo import PPO, Models
from tests.helpers import llama
from tests.optimum.language import (
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
from tests.stage_context import stage_context

BETA = 0.5


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


def tiny_llama(seed: int) -> Any:
    """Its first distributions are far from uniform, and every feature of its inputs is there from the start."""
    return llama(len(WORDS), seed=seed, initializer_range=0.2, tie_word_embeddings=False, eos_token_id=0)


def tiny_critic(seed: int) -> Any:
    from transformers import LlamaForSequenceClassification

    config = tiny_llama(seed).config
    config.num_labels = 1
    return LlamaForSequenceClassification(config)


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
    context = stage_context(
        accelerator, folder, "ppo", {"seed": seed, "precision": "fp32", "data": data, "ppo": settings}
    )
    models = Models(tiny_llama(seed), tiny_llama(seed), tiny_critic(seed + 100), TableOfRewards(seed=seed))
    prompts = [Prompt(PROMPT, Row((Message("user", "a b"),), "a b", None, None, None, ""))] * settings["batch_size"]
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
