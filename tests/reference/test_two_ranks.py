"""Steps of two ranks are those of the reference, which knows of none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.forks import Forks
from tests.helpers import assert_close_weights
from tests.reference import cases, expected, two_ranks


@pytest.fixture(scope="module")
def left(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(stage, rank) -> what it left."""
    folder = tmp_path_factory.mktemp("two-ranks")
    forks.ranks(2, f"from tests.reference import two_ranks; two_ranks.main({str(folder)!r})")
    return lambda stage, rank=0: torch.load(folder / f"{stage}, rank {rank}", weights_only=False)


def named(stage: str) -> list[str]:
    return [name for name in two_ranks.CHANGES if name.startswith(stage)]


@pytest.mark.parametrize("name", [*named("sft"), *named("reward"), *named("dpo")])
def test_supervised_steps_are_those_of_the_reference(left, name):
    stage = name.partition(",")[0]
    config = cases.configuration(stage, **two_ranks.CHANGES[name])
    wanted = expected.supervised(stage, config, two_ranks.model(stage), two_ranks.ROWS[stage])
    cases.assert_same(left(name), wanted)


@pytest.mark.parametrize("name", named("ppo"))
def test_ppo_steps_are_those_of_the_reference_on_both_ranks(left, name):
    config = cases.configuration("ppo", **two_ranks.CHANGES[name])
    found, other = left(name), left(name, rank=1)
    assert any(step["updates"] < config.ppo.updates for step in found.steps) == (config.ppo.kl_stop is not None)
    models = cases.Models.build(lora=bool(config.lora.rank))
    cases.assert_same(found, expected.reinforced(config, models, found.rollouts, found.heldout)[0])
    for model, weights in found.weights.items():
        assert_close_weights(other.weights[model], weights, atol=0)
