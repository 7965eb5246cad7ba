"""Rollouts one step ahead: which weights have drawn what, and where that ends, in a language with a known optimum."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerators import Accelerator
from rlhf.trainers.ppo.trainer import PPOTrainer
from tests.helpers import llama
from tests.optimum.language import (
    BEGINNINGS,
    BETA,
    PROMPT_COLUMNS,
    SIZES,
    WORDS,
    Distance,
    TableOfRewards,
    log_probabilities,
    optimum,
    table,
    tokenizer,
)
from tests.optimum.test_optimum import ALGORITHMS, OTHERS, build
from tests.serving.processes import Server

PADDING = {"padding": "a"}  # a server would add a token if the end were the padding too


@pytest.fixture
def server(forks: Any, tmp_path: Path) -> Iterator[Server]:
    """A rollout server with the language's first policy."""
    folder = tmp_path / "model"
    llama(len(WORDS), seed=0, **SIZES).save_pretrained(folder)
    tokenizer(**PADDING).save_pretrained(folder)
    started = Server(forks, folder, "--rollouts")
    yield started
    os.killpg(started.process.pid, signal.SIGKILL)
    started.process.communicate()


def settings(server: Server, correction: str = "tis", **changes: Any) -> dict[str, Any]:
    return {"rollout": {"where": [server.address], "staleness": 1, "correction": correction}, **changes}


def differences(ppo: PPOTrainer, choices: torch.Tensor) -> torch.Tensor:
    """Of each drawn token: the log-probability that came with it, minus that of the choices of a `table`."""
    rollout = ppo._contents.rollout
    assert rollout is not None and rollout.drawn_log_probs is not None
    found = []
    words = rollout.input_ids[:, PROMPT_COLUMNS:].tolist()
    lengths = rollout.attention_mask[:, PROMPT_COLUMNS:].sum(1).tolist()
    for row, length, drawn in zip(words, lengths, rollout.drawn_log_probs[:, -len(words[0]) :].tolist()):
        for at in range(length):
            found.append(drawn[at] - choices[BEGINNINGS.index(tuple(row[:at])), row[at]].item())
    return torch.tensor(found).abs()


def test_each_step_trains_on_what_the_weights_of_the_step_before_have_drawn(
    accelerator: Accelerator, tmp_path: Path, server: Server
) -> None:
    ppo = build(
        accelerator, tmp_path / "run", settings(server, batch_size=32, minibatch_size=16, steps=4), seed=0, **PADDING
    )
    before: list[torch.Tensor] = []  # what the weights choose before each step, by plain forward passes
    for index in range(4):
        before.append(table(ppo.actor.module))
        metrics = ppo.step(index)
        drew = max(index - 1, 0)
        assert differences(ppo, before[drew]).max() < 1e-5
        for other in set(range(index + 1)) - {drew}:
            assert differences(ppo, before[other]).mean() > 1e-3
        # The ratio, from plain numbers: that of the weights which are trained to those which drew.
        assert metrics["draw_gap"] == pytest.approx(differences(ppo, before[index]).mean().item(), abs=1e-5)
        assert (metrics["draw_gap"] > 1e-3) == (index > 0)


@pytest.mark.slow
@pytest.mark.parametrize("correction", ["tis", "mis"])
@pytest.mark.parametrize("name", ["ppo", "rloo", "rloo, k3"])  # the last has a penalty in the loss
def test_the_policy_becomes_the_known_one(
    accelerator: Accelerator, tmp_path: Path, server: Server, correction: str, name: str
) -> None:
    (algorithm,) = [each for each in (*ALGORITHMS, *OTHERS) if each.name == name]
    # Older completions make noisier steps: with 80, the last two end within 0.013 nat.
    changes = settings(server, correction, **algorithm.ppo, **({"steps": 120} if algorithm.update else {}))
    ppo = build(accelerator, tmp_path / "run", changes, seed=0, **PADDING)
    rewards = TableOfRewards(seed=0).rewards()
    known = optimum(log_probabilities(ppo.actor.module), rewards, BETA)
    if algorithm.update:
        known = algorithm.update.ended(table(ppo.actor.module), rewards)
    for index in range(ppo.settings.steps):
        ppo.step(index)
    after = Distance.between(log_probabilities(ppo.actor.module), known, rewards)
    assert max(after.forward, after.backward) < 0.01 and after.reward < 0.03, after
