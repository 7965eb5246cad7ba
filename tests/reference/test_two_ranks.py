"""Steps of two ranks are those of the reference, which knows of none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.forks import Forks
from tests.helpers import assert_close_weights, mark_slow
from tests.reference import cases, expected, two_ranks

OFTEN = {
    "sft",
    "reward, offloaded at ZeRO 3",
    "dpo, adapters on sharded weights",
    "ppo, with all that it may be told",
    "ppo, one update, each model held in its own way",
    "ppo, GRPO",
}
"""Those that the default suite runs: every stage, LoRA, shards, offload, and estimators with and without a critic."""
EACH = mark_slow({name: name for name in two_ranks.CHANGES}, except_for=OFTEN)


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(name, rank) -> what a run left, of the runs whose tests were selected."""
    folder = tmp_path_factory.mktemp("two-ranks")
    items = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in items]
    forks.ranks(2, f"from tests.reference import two_ranks; two_ranks.main({str(folder)!r}, {names!r})")
    return lambda name, rank=0: torch.load(folder / f"{name}, rank {rank}", weights_only=False)


@pytest.mark.parametrize("name", [case for case in EACH if not case.id.startswith("ppo")])
def test_supervised_steps_are_those_of_the_reference(outcome, name):
    stage = name.partition(",")[0]
    config = cases.configuration(stage, **two_ranks.CHANGES[name])
    wanted = expected.supervised(stage, config, two_ranks.model(stage), two_ranks.ROWS[stage])
    cases.assert_same(outcome(name), wanted)


@pytest.mark.parametrize("name", [case for case in EACH if case.id.startswith("ppo")])
def test_ppo_steps_are_those_of_the_reference_on_both_ranks(outcome, name):
    config = cases.configuration("ppo", **two_ranks.CHANGES[name])
    actual, other = outcome(name), outcome(name, rank=1)
    assert any(step["updates"] < config.ppo.updates for step in actual.steps) == (config.ppo.kl_stop is not None)
    models = cases.Models.build(lora=bool(config.lora.rank))
    cases.assert_same(actual, expected.reinforced(config, models, actual.rollouts, actual.heldout)[0])
    for model, weights in actual.weights.items():
        assert_close_weights(other.weights[model], weights, atol=0)
