"""PPO with other advantage estimators than GAE: several completions of a prompt, and no critic anywhere."""

import json

import pytest
import torch

from rlhf.config.schema import build_config
from rlhf.memory.advice import plan_stages
from rlhf.memory.environment import Environment
from rlhf.trainers.preflight import check
from tests.helpers import llama, models_of, sets
from tests.in_process import GivenModels, build_ppo, given, ppo_models, scalar_llama


def load_nothing(role):
    raise AssertionError(f"{role} was loaded")


@pytest.fixture
def build(accelerator, recipe, tokenizer, tmp_path):
    def ppo(critic=load_nothing, **changes):
        size = len(tokenizer)
        others = ppo_models(llama(size), llama(size), None, scalar_llama(size))
        models = GivenModels(lambda role: critic(role) if role == "critic" else others.causal_lm(role))
        changes = {"batch_size": 8, "minibatch_size": 4} | changes
        return build_ppo(accelerator, tmp_path, recipe, tokenizer, models, **changes)

    return ppo


@pytest.mark.parametrize("name", ["rloo", "grpo", "reinforce++"])
def test_a_step_is_taken_without_a_critic(build, name):
    ppo = build(estimator=name, completions_per_prompt=2)
    numbers = ppo.step(0)
    assert list(ppo.engines) == ["actor"] and ppo.critic is None
    assert set(ppo.context.models) == {"actor", "reference", "reward"}
    assert numbers["grad_norm"] > 0
    assert not {"value_loss", "critic_grad_norm"} & set(numbers)
    assert not ppo.experience.values.any()


def test_a_step_with_a_critic_loads_it(build, tokenizer):
    ppo = build(critic=given(scalar_llama(len(tokenizer))), completions_per_prompt=2)
    assert list(ppo.engines) == ["actor", "critic"] and ppo.step(0)["value_loss"] > 0


def test_completions_of_a_prompt_are_neighbours_and_differ(build):
    ppo = build(estimator="rloo", completions_per_prompt=4)
    prompts = ppo.prompts(0)
    first, second = (prompts["prompt_ids"][rows] for rows in (slice(4), slice(4, 8)))
    assert torch.equal(first, first[:1].expand_as(first)) and torch.equal(second, second[:1].expand_as(second))
    assert not torch.equal(first[0], second[0])
    completions = ppo.generate(prompts).input_ids[:, prompts["prompt_ids"].shape[1] :]
    assert len({tuple(row) for row in completions.tolist()}) == 8
    expected = [
        ppo.batches.collate(part, 2)["prompt_ids"] for part in (ppo.batches.examples(0), ppo.batches.examples(1))
    ]
    for index, pair in enumerate(expected):
        assert torch.equal(ppo.prompts(index)["prompt_ids"][::4], pair), "the next prompts follow in the next rollout"


@pytest.mark.parametrize("name", ["rloo", "grpo", "reinforce++"])
def test_the_plan_has_no_critic(recipe, name):
    """The critic's weights, master weights and moments are saved."""
    values = {**recipe, "model": {"path": "opt-1.3b"}, "ppo": {"batch_size": 32}}
    (four,) = plan_stages(build_config(values), ["ppo"], Environment())
    (three,) = plan_stages(
        build_config(values | {"ppo": {"batch_size": 32, "estimator": name}}), ["ppo"], Environment()
    )
    assert set(four.parameters) - set(three.parameters) == {"critic"}
    assert not any("critic" in (item.role, phase.name) for phase in three.phases for item in phase.items)
    assert all("critic" not in phase.name for phase in three.phases)
    weights, masters_and_moments = 2 * 1.3e9, 12 * 1.3e9
    saved = four.fullest.device - three.fullest.device
    assert saved == pytest.approx(weights + masters_and_moments, rel=0.3)


@pytest.mark.parametrize(("rows", "ranks", "ok"), [(8, 1, True), (8, 2, True), (12, 2, False), (8, 4, False)])
def test_a_rank_has_whole_groups(tmp_path, recipe, rows, ranks, ok):
    settings = {"estimator": "rloo", "completions_per_prompt": 4, "batch_size": rows}
    config = build_config({**recipe, "output": str(tmp_path / "run"), "ppo": settings})
    if ok:
        check(config, ["sft", "reward", "ppo"], ranks)
    else:
        with pytest.raises(Exception, match=r"ppo.batch_size: .* \(ppo.completions_per_prompt\)"):
            check(config, ["sft", "reward", "ppo"], ranks)


def test_a_user_s_run_needs_the_name_alone(rlhf, finished_run, tmp_path):
    """All through: the check before it, training, and what it leaves."""
    folder = tmp_path / "run"
    rlhf("ppo", "--output", folder, *sets(*models_of(finished_run), "ppo.estimator=grpo", "ppo.batch_size=8"))
    records = [json.loads(line) for line in (folder / "ppo" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "policy_loss" in record]
    assert len(steps) == 3 and all(record["kl_loss"] >= 0 and "value_loss" not in record for record in steps)
    summary = json.loads((folder / "ppo" / "stage.json").read_text())
    assert list(summary["parameters"]) == ["actor"] and "reward" in summary["after"]
