"""Sources that the tests of this folder write, and the rows and data sets that are read from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhf.config.schema import DataConfig, Stage
from rlhf.data.load_sources import ParsedSource, read_sources
from rlhf.data.records import Message
from rlhf.data.stage_dataset import StageData, load_stage


def write_jsonl(path: Path, rows: list[Any], end: str = "\n") -> str:
    """Write a row per line, texts as they are, and return the path."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_bytes("".join(line + end for line in lines).encode())
    return str(path)


def load(tokenizer: Any, *datasets: dict[str, Any], stage: Stage = "sft", seed: int = 0, **data: Any) -> StageData:
    return load_stage(DataConfig(datasets=datasets, **data), stage, tokenizer, seed=seed)


def parse(stage: Stage = "sft", **dataset: Any) -> ParsedSource:
    """Return the training source of a data set, with its rows."""
    sources = read_sources(DataConfig(datasets=[dataset]), [stage], seed=0)
    return next(iter(sources._read.values()))


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def prompt_of(*contents: str) -> tuple[Message, ...]:
    return tuple(Message(turn["role"], turn["content"]) for turn in turns(*contents))
