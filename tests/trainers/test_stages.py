"""Whole runs through the command line: what they leave, and that neither ranks nor ZeRO nor a restart changes it."""

import json

import pytest
import torch

from tests.helpers import assert_same_weights, models_of, sets, weights

SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in [(0, 1), (3, 1), (0, 2), (2, 2), (3, 2)]]


@pytest.mark.parametrize(("zero_stage", "ranks"), [(2, 1), *SLOW])
def test_all_stages_run_and_the_supervised_ones_learn_the_same(rlhf, finished_run, tmp_path, zero_stage, ranks):
    output = tmp_path / "run"
    rlhf("--output", output, "--ranks", ranks, *sets(f"engine.zero_stage={zero_stage}", "ppo.steps=2"))
    for stage in ("sft", "reward"):
        assert_same_weights(output / stage / "model", finished_run / stage / "model", atol=2e-5)
    summaries = [json.loads((output / stage / "stage.json").read_text()) for stage in ("sft", "reward", "ppo")]
    assert [summary["prompt_format"] for summary in summaries] == ["template"] * 3
    assert summaries[-1]["steps"] == 2 and summaries[-1]["after"]["response_length"] > 0


@pytest.mark.parametrize(
    ("stage", "ranks", "micro"),
    [
        *[("sft", 2, 1), ("reward", 1, 2)],
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("sft", 1, 2), ("sft", 2, 2), ("reward", 2, 1), ("reward", 2, 2)]
        ),
    ],
)
def test_ranks_and_micro_batches_change_no_weight(rlhf, finished_run, tmp_path, stage, ranks, micro):
    output = tmp_path / "run"
    keys = sets(f"{stage}.micro_batch_size={micro}", f"reward.model={finished_run / 'sft' / 'model'}")
    rlhf(stage, "--output", output, "--ranks", ranks, *keys)
    assert_same_weights(output / stage / "model", finished_run / stage / "model", atol=2e-5)


@pytest.mark.slow
def test_ppo_on_two_ranks_is_ppo_on_one(rlhf, finished_run, tmp_path):
    """Both draw the same completions, in training and in evaluation, and both take their updates over the same rows."""
    keys = sets(*models_of(finished_run), "ppo.minibatch_size=4", "ppo.eval_every=2")
    for ranks in (1, 2):
        rlhf("ppo", "--output", tmp_path / f"{ranks}", "--ranks", ranks, *keys)
    one, two = tmp_path / "1" / "ppo", tmp_path / "2" / "ppo"
    assert (one / "heldout.jsonl").read_text().count("\n") == 3
    for line, other in zip(*((folder / "heldout.jsonl").read_text().splitlines() for folder in (one, two))):
        completions = [[row["completion"] for row in json.loads(text)["rows"]] for text in (line, other)]
        assert completions[0] == completions[1] and len(set(completions[0])) > 1
    assert_same_weights(two / "model", one / "model", atol=2e-5)
    assert_same_weights(two / "critic", one / "critic", atol=2e-5)


def test_another_seed_changes_the_weights(rlhf, finished_run, tmp_path):
    """The same seed gives the same weights: tests/preflight/test_before_training.py repeats the run."""
    rlhf("sft", "--output", tmp_path, "--seed", 1)
    with pytest.raises(AssertionError):
        assert_same_weights(tmp_path / "sft" / "model", finished_run / "sft" / "model")


def test_a_later_ppo_starts_with_the_critic_of_another(rlhf, finished_run, tmp_path):
    """One step that moves almost nothing."""
    critic, reward = finished_run / "ppo/critic", finished_run / "reward/model"
    with pytest.raises(AssertionError):  # it has learned
        assert_same_weights(critic, reward, atol=1e-4)
    assert weights(critic).keys() == weights(reward).keys()
    keys = ("ppo.steps=1", "ppo.eval_rows=2", "ppo.critic_optimizer.learning_rate=1.0e-12", f"ppo.critic={critic}")
    rlhf("ppo", "--output", tmp_path / "run", *sets(*models_of(finished_run), *keys))
    assert_same_weights(tmp_path / "run/ppo/critic", critic, atol=1e-6)


def test_the_policy_loads_with_plain_transformers_and_talks(finished_run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished_run / "ppo" / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "red cow"}], return_tensors="pt", return_dict=True)
    assert model.generate(**ids, max_new_tokens=4).shape[1] > ids["input_ids"].shape[1]


def test_reward_model_scores_as_plain_transformers(finished_run):
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
        scores = last_token_scores(ScalarHead(model)(ids, mask), mask)
    torch.testing.assert_close(scores, expected)


def test_model_with_more_outputs_than_tokens_is_judged_by_its_outputs(rlhf, tmp_path):
    """A model that has learned nothing guesses among 4,096; its perplexity is above that of the tokenizer's tokens."""
    keys = ("model.vocabulary_multiple=4096", "sft.max_steps=1")
    done = rlhf("sft", "--output", tmp_path / "run", *(word for key in keys for word in ("--set", key)))
    assert "SFT has hardly learned" in done.stdout and "random guessing 4,096" in " ".join(done.stdout.split())
