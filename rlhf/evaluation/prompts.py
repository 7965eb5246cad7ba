"""The prompts that models are asked: of a file, a data set, standard input, or those that a recipe holds out.

A name or a recipe flows in; rows with their prompts come out, as many as are wanted, drawn by the seed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

from rlhf.config.schema import Config
from rlhf.data.formats import Columns
from rlhf.data.load_sources import Source, SourceRows
from rlhf.data.records import Row, parse
from rlhf.data.report import Dropped, count
from rlhf.errors import DataError
from rlhf.evaluation.rows import read_text

STDIN = "-"


def has_lines(name: str) -> bool:
    """Whether a name is of what holds a prompt on each line, and not of what `data.datasets` reads."""
    return name == STDIN or name.lower().endswith(".txt")


def read_lines(name: str) -> list[Row]:
    """The prompts of standard input (`-`) or of a text file, one on each line, in their order; never none.

    Raises:
        DataError: it cannot be read, or holds no prompt.
    """
    if name == STDIN:
        return _some(_lines("standard input", sys.stdin), "standard input")
    return _some(_lines(name, read_text(name).split("\n")), name)


def read_prompts(config: Config, *, show: bool = False) -> tuple[list[Row], Dropped]:
    """The prompts of all rows of `config.data.datasets`, never none; and why rows are left out.

    Raises:
        DataError: a source cannot be read, or they hold no prompt.
    """
    read = SourceRows(config.seed, show)
    rows: list[Row] = []
    dropped: Dropped = {}
    for found in (read[Source.trained(dataset)] for dataset in config.data.datasets):
        for reason, (number, where) in found.dropped.items():
            count(dropped, reason, where, number)
        for row in found.rows:
            if row.prompt:
                rows.append(row)
            else:
                count(dropped, "text alone, without a prompt", row.source)
    return _some(rows, ", ".join(dataset.path for dataset in config.data.datasets)), dropped


def held_out(config: Config, tokenizer: Any) -> list[Row]:
    """The prompts that the PPO stage of a recipe holds out.

    Raises:
        DataError: a source cannot be read, or the stage has no rows.
    """
    from rlhf.data.stage_dataset import load_stage

    return [example.row for example in load_stage(config.data, "ppo", tokenizer, seed=config.seed).heldout]


def drawn(rows: list[Row], limit: int, seed: int) -> list[Row]:
    """At most `limit` rows, in their order, drawn from all of them."""
    if limit >= len(rows):
        return rows
    return [rows[place] for place in sorted(random.Random(f"limit {seed}").sample(range(len(rows)), limit))]


def _lines(name: str, lines: Iterable[str]) -> list[Row]:
    """Each line is a record of one column, `prompt`: one that is a transcript is a conversation."""
    columns = Columns(prompt="prompt")
    return [
        parse({"prompt": line.strip()}, columns, f"{name}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def _some(rows: list[Row], name: str) -> list[Row]:
    if not rows:
        raise DataError(f"{name}: holds no prompts; name another file with --prompts")
    return rows
