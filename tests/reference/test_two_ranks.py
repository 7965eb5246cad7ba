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
    "ppo, GRPO",
    "distill, sharded and offloaded",
}
"""Those that the default suite runs: every stage, LoRA, shards, offload, and estimators with and without a critic."""
EACH = mark_slow({name: name for name in two_ranks.CHANGES}, except_for=OFTEN)


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(name, rank) -> what a run left, of the runs whose tests were selected."""
    folder = tmp_path_factory.mktemp("two-ranks")
    items = [item for item in request.session.items if item.path == request.path]
    selected = [item.callspec.params["name"] for item in items if hasattr(item, "callspec")]
    names = list(dict.fromkeys([two_ranks.RESUMED, *selected]))
    forks.ranks(2, f"from tests.reference import two_ranks; two_ranks.main({str(folder)!r}, {names!r})")
    return lambda name, rank=0: torch.load(folder / f"{name}, rank {rank}", weights_only=False)


@pytest.mark.parametrize("name", [case for case in EACH if not case.id.startswith(("ppo", "distill"))])
def test_supervised_steps_are_those_of_the_reference(outcome, name):
    stage = name.partition(",")[0]
    config = cases.configuration(stage, **two_ranks.CHANGES[name])
    model, kind = two_ranks.model(stage), config.engine.frozen
    if kind == "auto":
        wanted = expected.supervised(stage, config, model, two_ranks.ROWS[stage])
    else:
        rounded = cases.round_linears(model, kind)
        wanted = expected.supervised(stage, config, rounded, two_ranks.ROWS[stage])
        add_rounding(wanted.weights["model"], model, rounded)
    cases.assert_same(outcome(name), wanted)


@pytest.mark.parametrize("name", [case for case in EACH if case.id.startswith("ppo")])
def test_ppo_steps_are_those_of_the_reference_on_both_ranks(outcome, name):
    config = cases.configuration("ppo", **two_ranks.CHANGES[name])
    actual, other = outcome(name), outcome(name, rank=1)
    assert any(step["updates"] < config.ppo.updates for step in actual.steps) == (config.ppo.kl_stop is not None)
    models, kind = cases.Models.build(lora=bool(config.lora.rank)), config.engine.frozen
    rounded = models if kind == "auto" else models.rounded(kind)
    wanted = expected.reinforced(config, rounded, actual.rollouts, actual.heldout)[0]
    add_rounding(wanted.weights["saved"], models.actor, rounded.actor)
    cases.assert_same(actual, wanted)
    for model, weights in actual.weights.items():
        assert_close_weights(other.weights[model], weights, atol=0)


@pytest.mark.parametrize("name", [case for case in EACH if case.id.startswith("distill")])
def test_distillation_steps_are_those_of_the_reference_on_both_ranks(outcome, name):
    actual, other = outcome(name), outcome(name, rank=1)
    config = cases.configuration("distill", **two_ranks.CHANGES[name])
    cases.assert_same(actual, expected.distilled(config, *two_ranks.distill_models(), actual.rollouts, actual.heldout))
    assert other.rollouts == actual.rollouts
    assert_close_weights(other.weights["model"], actual.weights["model"], atol=0)


def test_resumed_run_takes_the_later_steps_on_both_ranks(outcome):
    for rank in (0, 1):
        whole, resumed = outcome(two_ranks.RESUMED, rank), outcome("resumed", rank)
        assert resumed.rollouts == whole.rollouts[1:]
        for model, weights in whole.weights.items():
            assert_close_weights(resumed.weights[model], weights, atol=0)


def test_evaluation_judges_completions_of_each_ranks_prompts(outcome):
    """Rank 0 has the first four rows of each batch of eight, rank 1 the others; both sample for themselves."""
    judged, *generated = outcome("evaluated")[0], *(outcome("evaluated", rank)[1] for rank in (0, 1))
    prompts = [tuple(row.prompt_ids) for row in two_ranks.heldout()]
    completions = [generated[number % 8 // 4][prompt] for number, prompt in enumerate(prompts)]
    expected = [(row.row.text, " ".join(map(str, ids))) for row, ids in zip(two_ranks.heldout(), completions)]
    assert judged == outcome("evaluated", 1)[0] == expected
    assert prompts[:4] == prompts[4:8] and completions[:4] != completions[4:8]


def add_rounding(saved: cases.Weights, model: Any, rounded: Any) -> None:
    """Adapters are merged into the numbers of the checkpoint, not into those that they were rounded to."""
    weights, rounded_weights = model.state_dict(), rounded.state_dict()
    for name in saved:
        saved[name] = saved[name] + weights[name] - rounded_weights[name]
