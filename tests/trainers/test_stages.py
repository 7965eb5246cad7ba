"""Whole runs through the command line: what they leave, and that neither ranks nor ZeRO nor a restart changes it."""

import json

import pytest
import torch

from tests.helpers import assert_same_weights

ZERO_AND_RANKS = [(0, 1), (2, 1), (3, 1), (0, 2), (2, 2), (3, 2)]


@pytest.mark.parametrize(("zero_stage", "ranks"), ZERO_AND_RANKS)
def test_all_stages_run_and_the_supervised_ones_learn_the_same(rlhf, finished_run, tmp_path, zero_stage, ranks):
    output = tmp_path / "run"
    rlhf("--output", output, "--ranks", ranks, "--set", f"engine.zero_stage={zero_stage}")
    for stage in ("sft", "reward"):
        assert_same_weights(output / stage / "model", finished_run / stage / "model", atol=2e-5)
    summary = json.loads((output / "ppo" / "stage.json").read_text())
    assert summary["steps"] == 3 and summary["after"]["response_length"] > 0


@pytest.mark.parametrize("stage", ["sft", "reward"])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 2), (2, 1), (2, 2)])
def test_the_split_over_ranks_and_micro_batches_changes_no_weight(rlhf, finished_run, tmp_path, stage, ranks, micro):
    output = tmp_path / "run"
    start = ["--set", f"reward.model={finished_run / 'sft' / 'model'}"]
    rlhf(stage, "--output", output, "--ranks", ranks, "--set", f"{stage}.micro_batch_size={micro}", *start)
    assert_same_weights(output / stage / "model", finished_run / stage / "model", atol=2e-5)


def test_one_seed_gives_identical_weights(rlhf, finished_run, tmp_path):
    output = tmp_path / "run"
    rlhf("--output", output)
    for stage in ("sft", "reward", "ppo"):
        assert_same_weights(output / stage / "model", finished_run / stage / "model")


def test_another_seed_gives_other_weights(rlhf, finished_run, tmp_path):
    output = tmp_path / "run"
    rlhf("sft", "--output", output, "--seed", 1)
    with pytest.raises(AssertionError):
        assert_same_weights(output / "sft" / "model", finished_run / "sft" / "model")


def test_the_policy_loads_with_plain_transformers_and_talks(finished_run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished_run / "ppo" / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "red cow"}], return_tensors="pt", return_dict=True)
    assert model.generate(**ids, max_new_tokens=4).shape[1] > ids["input_ids"].shape[1]


def test_the_reward_model_scores_the_last_real_token_as_plain_transformers_does(finished_run):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from rlhf.models.forward import ScalarHead, last_token_scores

    folder = finished_run / "reward" / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = [[5, 6, 7, 8, tokenizer.eos_token_id], [9, tokenizer.eos_token_id], [5, 9, 6]]  # ended, ended, cut off
    pad = tokenizer.pad_token_id
    ids = torch.tensor([row + [pad] * (6 - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (6 - len(row)) for row in rows])
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits[:, 0]
        found = last_token_scores(ScalarHead(model)(ids, mask), mask)
    torch.testing.assert_close(found, expected)


def test_metrics_and_events_hold_every_step(finished_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = [json.loads(line) for line in (finished_run / "ppo" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "policy_loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
    measured = {"reward", "kl", "entropy", "clip_fraction", "value_loss", "response_length", "tokens_per_second"}
    assert measured <= steps[0].keys()
    assert any(record.get("tag") == "sample_0" for record in records)
    events = EventAccumulator(str(finished_run / "ppo" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("ppo/reward")] == [1, 2, 3]


def test_the_first_ratio_of_new_to_old_policy_is_one(finished_run):
    """Before its first update the policy is the one that acted: no ratio is clipped and the KL is 0."""
    record = next(
        json.loads(line)
        for line in (finished_run / "ppo" / "metrics.jsonl").read_text().splitlines()
        if '"policy_loss"' in line
    )
    assert record["step"] == 1 and abs(record["kl"]) < 1e-4


def test_an_adaptive_coefficient_moves_with_the_kl(rlhf, finished_run, tmp_path):
    output = tmp_path / "run"
    models = [f"ppo.actor={finished_run / 'sft' / 'model'}", f"ppo.reward_model={finished_run / 'reward' / 'model'}"]
    keys = [*models, "ppo.kl_target=1000", "ppo.kl_horizon=40"]  # the KL stays far below: the coefficient falls
    rlhf("ppo", "--output", output, *(part for key in keys for part in ("--set", key)))
    records = [json.loads(line) for line in (output / "ppo" / "metrics.jsonl").read_text().splitlines()]
    found = [record["kl_coef"] for record in records if "kl_coef" in record]
    assert found == pytest.approx([0.1, 0.1 * 0.98, 0.1 * 0.98**2])


def test_every_stage_records_how_its_prompts_are_written(finished_run):
    for stage in ("sft", "reward", "ppo"):
        assert json.loads((finished_run / stage / "stage.json").read_text())["prompt_format"] == "template"
