"""A completion's score: the weighted sum of what the reward model and the functions say, each kept by its name."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accelerators import Accelerator, ShapePolicy
from rlhf.config.data import DataConfig
from rlhf.config.schema import build_config
from rlhf.data.batches import Batches, collate_ppo
from rlhf.data.examples import Prompt
from rlhf.data.load_sources import read_sources
from rlhf.data.stage_dataset import load_stage
from rlhf.errors import RewardError
from rlhf.trainers.ppo.experience import Rollout, Scores
from rlhf.trainers.ppo.metrics import mean_score, rollout_means, rollout_sums
from rlhf.trainers.ppo.rewards import WeightedRewards
from tests.optimum.language import COMPLETIONS, WORDS, Distance, log_probabilities, optimum, prompt, tokenizer
from tests.optimum.test_optimum import BETA, build

FUNCTIONS = """
def words(prompt, completion, row): return float(len(completion.split()))
def echoes(prompt, completion, row): return float(completion.startswith(prompt.split()[0]))
def exact(prompt, completion, row): return float(completion == row["answer"]) if "answer" in row else -1.0
def taste(prompt, completion, row): return completion.count("a") - 0.7 * completion.count("c") + 0.3 * len(completion)
"""
IDS = torch.tensor([[1, 2, 3, 1, 0], [0, 1, 2, 0, 0], [1, 2, 1, 1, 1], [1, 1, 1, 1, 1]])
# Completions "c a <end>", "b <end>", "a a a"; the last row fills the batch up. Prompts are of two columns.
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0]]).float()
ROLLOUT = Rollout(
    input_ids=IDS,
    attention_mask=torch.ones_like(IDS),
    action_mask=MASK,
    row_mask=torch.tensor([True, True, True, False]),
    ended=torch.tensor([1.0, 1, 0, 0]),
    micro_batches=(),
)
MODEL = torch.tensor([1.0, -2.0, 3.0, 99.0])
EXAMPLES = [prompt(3), prompt(1), prompt(2, 1)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(FUNCTIONS)
    return path


def rewards(examples: list[Prompt] = EXAMPLES, **settings: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The scores of `ROLLOUT`, and their parts."""
    reward_fn = WeightedRewards(build_config({"ppo": settings}).ppo, tokenizer())
    return reward_fn(ROLLOUT, MODEL if settings.get("reward_weight", 1) else None, examples)


def test_the_weighted_sum_by_hand(file: Path) -> None:
    functions = [
        {"function": f"{file}:words", "weight": 0.5},
        {"function": f"{file}:echoes", "weight": -2, "name": "e"},
    ]
    total, parts = rewards(reward_functions=functions, reward_weight=3)
    assert parts["reward_model"].tolist() == MODEL.tolist()
    assert parts["reward/words"].tolist() == [2, 1, 3, 0]
    assert parts["reward/e"].tolist() == [1, 0, 0, 0]
    assert total[:3].tolist() == [3 + 1 - 2, -6 + 0.5, 9 + 1.5]
    assert total.dtype == torch.float32


def test_without_a_model_the_functions_alone(file: Path) -> None:
    functions = [f"{file}:words", {"function": f"{file}:echoes", "weight": 0}]
    total, parts = rewards(reward_functions=functions, reward_weight=0)
    assert total.tolist() == [2, 1, 3, 0] and parts["reward/echoes"].tolist() == [1, 0, 0, 0]
    assert "reward_model" not in parts


def test_score_without_functions_is_the_reward_models() -> None:
    total, parts = rewards(reward_weight=0.5)
    assert parts == {} and torch.equal(total, MODEL / 2)


def test_rows_that_are_missing_do_not_score_0(file: Path) -> None:
    with pytest.raises(RewardError, match="called with rows of the data, and these sequences came without"):
        rewards(EXAMPLES[:2], reward_functions=f"{file}:words")


def test_they_are_recorded_as_means_over_real_rows(file: Path) -> None:
    nothing = torch.zeros_like(MASK)
    scores = Scores(nothing, nothing, nothing, None, *rewards(reward_functions=[f"{file}:words"]))
    sums = rollout_sums(ROLLOUT, scores, mean_score(ROLLOUT, scores))
    means = rollout_means({name: float(number) for name, number in sums.items()})
    assert means["reward/words"] == 2.0
    assert means["reward_model"] == pytest.approx(2 / 3) and means["reward"] == pytest.approx(2 / 3 + 2)


def rows_of(folder: Path, *records: dict[str, Any]) -> dict[str, Prompt]:
    """Return PPO's examples from a file of these records, by their prompts."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    values = {"datasets": [{"path": str(path), "stages": ["ppo"]}], "heldout_fraction": 0.5}
    config = DataConfig.model_validate(values)
    sources = read_sources(config, ["ppo"], seed=0, records=True)
    data = load_stage(config, "ppo", tokenizer(), seed=0, sources=sources)
    return {example.row.text: example for example in (*data.train, *data.heldout) if isinstance(example, Prompt)}


def test_a_function_sees_the_columns_of_its_row(file: Path, tmp_path: Path) -> None:
    answers = {"a b": "c a", "b": "b", "c c": "b"}
    examples = rows_of(tmp_path, *({"prompt": prompt, "answer": answer} for prompt, answer in answers.items()))
    ordered = [examples[text] for text in answers]
    total, _ = rewards(ordered, reward_functions=[f"{file}:exact"], reward_weight=0)
    assert total.tolist() == [1, 1, 0, 0]


def test_columns_stand_above_what_was_read_in_them(tmp_path: Path) -> None:
    record = {"prompt": "a b", "chosen": "c", "rejected": "b", "source": "mine", "level": 3}
    examples = rows_of(tmp_path, record, {"prompt": "c", "chosen": "a", "rejected": "b"})
    read = {"messages": [{"role": "user", "content": "a b"}], "response": "c"}
    assert examples["a b"].row.as_dict() == record | read
    assert examples["c"].row.as_dict()["source"] == "rows.jsonl:2"


def test_records_are_kept_only_for_reward_functions(tmp_path: Path) -> None:
    """Rows and fingerprints are the same with and without records."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a b", "answer": "c"}\n')
    config = DataConfig.model_validate({"datasets": [str(tmp_path / "rows.jsonl")]})
    sources = [read_sources(config, ["ppo"], seed=0, records=records) for records in (False, True)]
    rows = [next(iter(source._read.values())).rows for source in sources]
    assert [rows_read[0].record for rows_read in rows] == [{}, {"prompt": "a b", "answer": "c"}]
    assert list(rows[0]) == list(rows[1]) and sources[0].fingerprints() == sources[1].fingerprints()


@pytest.mark.parametrize("endless", [True, False])
def test_a_rank_s_examples_are_those_of_its_rows(endless: bool) -> None:
    """Five prompts in batches of four: the last one is filled up, with rows that are not real or of the next epoch."""
    prompts = [prompt(*[1] * (number + 1)) for number in range(5)]
    collate = partial(collate_ppo, policy=ShapePolicy("static"), maximum=5, pad_token_id=0)
    for rank in range(2):
        sizes = {"batch_size": 4, "micro_batch_size": 2, "rank": rank, "world_size": 2}
        batches = Batches(prompts, collate, seed=0, endless=endless, **sizes)
        for index in range(4):
            (batch,) = batches.step(index)
            lengths = batch["prompt_mask"].sum(1)[batch["row_mask"]].tolist()
            assert [len(example.prompt_ids) for example in batches.share(index)] == lengths


def test_each_completion_of_a_prompt_comes_with_its_example(accelerator: Accelerator, tmp_path: Path) -> None:
    ppo = build(accelerator, tmp_path, {"batch_size": 8, "minibatch_size": 8, "completions_per_prompt": 2}, seed=0)
    ppo.batches._examples = [prompt(*ids) for ids in ((1,), (2, 3), (3, 3, 3), (3, 1))]  # type: ignore[misc]
    rows, examples = ppo.prompts(0), ppo.examples(0)
    prompts = [ids[mask].tolist() for ids, mask in zip(rows["prompt_ids"], rows["prompt_mask"].bool(), strict=True)]
    assert prompts == [example.prompt_ids for example in examples] and len(set(map(tuple, prompts))) == 4


@pytest.mark.slow
def test_policy_becomes_the_optimum_of_a_function(accelerator: Accelerator, tmp_path: Path, file: Path) -> None:
    """No reward model: the known optimum of `tests.optimum` for a reward that Python counts."""
    changes = {"reward_weight": 0, "reward_functions": [f"{file}:taste"]}
    ppo = build(accelerator, tmp_path, changes, seed=0)
    texts = [" ".join(WORDS[word] for word in words if word) for words in COMPLETIONS]
    scores = [text.count("a") - 0.7 * text.count("c") + 0.3 * len(text) for text in texts]
    known = torch.tensor(scores, dtype=torch.float64)
    best = optimum(log_probabilities(ppo.actor.module), known, BETA)
    before = Distance.between(log_probabilities(ppo.actor.module), best, known)
    assert ppo.reward is None and min(before.forward, before.backward) > 0.5
    for index in range(ppo.settings.steps):
        numbers = ppo.step(index)
    after = Distance.between(log_probabilities(ppo.actor.module), best, known)
    assert max(after.forward, after.backward) < 0.01, (before, after)
    assert numbers["reward"] == numbers["reward/taste"]
