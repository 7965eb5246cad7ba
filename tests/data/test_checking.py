"""`check_stage` tells what `load_stage` will say, and tokenizes no more than a sample where that shows it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import STAGES, DataConfig, Stage
from rlhf.data import stage_dataset, tokenize_rows
from rlhf.data.load_sources import read_sources
from rlhf.data.stage_dataset import CHECK_SAMPLE, check_stage, load_stage
from rlhf.errors import DataError

LIMITS: dict[str, Any] = {"max_prompt_length": 30, "max_completion_length": 20}

BROKEN: tuple[dict[str, Any], ...] = (
    {"prompt": "a" * 40},
    {"chosen": "b" * 40},
    {"chosen": "baa"},
    {"chosen": "a<eos>"},
    {"prompt": 3},
)


def outcome(call: Any, *arguments: Any, **options: Any) -> str:
    try:
        call(*arguments, **options)
    except DataError as error:
        return str(error)
    return "success"


def some_rows(rng: random.Random) -> str:
    """Up to 30 rows of few prompts, nearly all usable or nearly none; the usable ones may come last."""
    usable, prompts = rng.choice([0.1, 0.3, 0.9, 1.0, 1.0]), rng.choice([1, 10, 30, 30])
    lines = []
    for _ in range(rng.choice([0, 5, 30, 30, 30])):
        row: dict[str, Any] = {"prompt": f"Question {rng.randrange(prompts)}?", "chosen": "moo", "rejected": "baa"}
        if rng.random() > usable:
            row |= rng.choice(BROKEN)
        lines.append(f"{json.dumps(row)}\n")
    if rng.random() < 0.5:
        lines.sort(key=len, reverse=True)
    return "".join(lines)


def a_config(rng: random.Random, folder: Path) -> DataConfig:
    datasets = []
    for number in range(rng.choice([1, 1, 2, 3])):
        path, heldout = folder / f"{number}.jsonl", folder / f"{number}-heldout.jsonl"
        path.write_text(some_rows(rng))
        heldout.write_text(some_rows(rng).replace("moo", rng.choice(["moo", "Moo"])))
        stages = STAGES if rng.random() < 0.7 else rng.sample(STAGES, rng.randint(1, 2))
        named = {"heldout": str(heldout)} if rng.random() < 0.25 else {}
        datasets.append({"path": str(path), "stages": stages, "weight": rng.choice([1, 3]), **named})
    return DataConfig(datasets=datasets, heldout_fraction=rng.choice([0.05, 0.5, 0.95]), **LIMITS)


def test_a_check_says_what_loading_says_whatever_the_rows(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_dataset, "CHECK_SAMPLE", 2)
    outcomes = []
    for seed in range(100):
        config = a_config(random.Random(seed), tmp_path)
        for stage in STAGES:
            whole = outcome(load_stage, config, stage, tokenizer, seed=seed)
            assert outcome(check_stage, config, stage, tokenizer, seed=seed) == whole, seed
            sampled = outcome(load_stage, config, stage, tokenizer, seed=seed, sample=2)
            outcomes.append((sampled == "success", whole == "success"))
    counts = {pair: outcomes.count(pair) for pair in ((True, True), (False, True), (False, False))}
    assert min(counts.values()) > 10, "the rows are such that all of these happen"
    assert (True, False) not in outcomes


@pytest.mark.parametrize("stage", STAGES)
def test_a_check_tokenizes_a_sample_and_all_rows_only_where_that_shows_too_few(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: Stage
) -> None:
    encode, tokenized = tokenize_rows.encode_prompts, []

    def counted(tokenizer: Any, rows: Any, **options: Any) -> Any:
        tokenized.append(len(rows))
        return encode(tokenizer, rows, **options)

    monkeypatch.setattr(tokenize_rows, "encode_prompts", counted)
    pair = {"chosen": "moo", "rejected": "baa"}
    path = tmp_path / "rows.jsonl"
    config = DataConfig(datasets=[{"path": str(path), "stages": [stage]}], **LIMITS)

    path.write_text("".join(f"{json.dumps(pair | {'prompt': f'{n}?'})}\n" for n in range(5 * CHECK_SAMPLE)))
    sources = read_sources(config, [stage], seed=0)
    path.unlink()  # it was read before
    data = check_stage(config, stage, tokenizer, seed=0, sources=sources)
    assert sum(tokenized) == CHECK_SAMPLE == len(data.train) + len(data.heldout)
    assert data.reports[0].unseen == 4 * CHECK_SAMPLE
    assert "of a sample; 1024 more not examined" in str(data.reports[0])

    tokenized.clear()
    prompts = ["a" * 40] * 5 * CHECK_SAMPLE + ["first?", "second?"]
    path.write_text("".join(f"{json.dumps(pair | {'prompt': prompt})}\n" for prompt in prompts))
    data = check_stage(config, stage, tokenizer, seed=0)
    assert len(data.train) + len(data.heldout) == 2
    assert sum(tokenized) == CHECK_SAMPLE + len(prompts)


def test_a_sample_is_of_all_rows_and_not_of_the_first(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}?"}}\n' for n in range(100)))
    config = DataConfig(datasets=[{"path": str(path), "stages": ["ppo"]}])
    data = load_stage(config, "ppo", tokenizer, seed=0, sample=10)
    lines = [int(example.row.source.partition(":")[2]) for example in data.train + data.heldout]
    assert len(set(lines)) == 10
    assert max(lines) > 50 > min(lines)
    assert data == load_stage(config, "ppo", tokenizer, seed=0, sample=10)
