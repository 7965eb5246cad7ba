"""The prompts that models are asked: of a file, a data set, standard input, or those that a run held out.

A name flows in; rows with their prompts come out, as many as are wanted, drawn by the seed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from pathlib import Path

from rlhf.config import load_config
from rlhf.config_data import DatasetConfig
from rlhf.data.formats import Columns
from rlhf.data.reading import Source, SourceRows
from rlhf.data.rows import Row, parse
from rlhf.errors import DataError, RunError
from rlhf.names import joined
from rlhf.run import RunDirectory

STDIN = "-"


def read_prompts(name: str, *, split: str, seed: int, show: bool = False) -> list[Row]:
    """The prompts of a source, in its order; never none.

    Args:
        name: `-` for the lines of standard input, a .txt file of one prompt a line, or what `data.datasets` reads.
        split: the one to read of a source that has several.
        seed: decides the rows of the embedded world.
        show: tell of reading that takes long.

    Raises:
        DataError: it cannot be read, or holds no prompt.
    """
    if name == STDIN:
        rows = _lines("standard input", sys.stdin)
    elif name.lower().endswith(".txt"):
        rows = _lines(name, _text(Path(joined("", name))).split("\n"))
    else:
        source = Source.trained(DatasetConfig(path=name, split=split))
        rows = [row for row in SourceRows(seed, show)[source].rows if row.prompt]
    if not rows:
        raise DataError(f"{name}: holds no prompts; name another file with --prompts")
    return rows


def held_out(run: RunDirectory, *, show: bool = False) -> list[Row]:
    """The prompts that the PPO stage of a run holds out, whether or not it ran.

    Raises:
        RLHFError: the run has no recipe, or its data or tokenizer cannot be read.
    """
    from rlhf.preflight import look_at_data

    recipe = run.own_recipe()
    if recipe is None:
        raise RunError(f"{run.path}: has no recipe that names its data; give --prompts")
    config = load_config(recipe, options={"output": run.path})
    (plan,) = look_at_data(config, ["ppo"], show=show)
    return [example.row for example in plan.data.heldout]


def drawn(rows: list[Row], limit: int, seed: int) -> list[Row]:
    """At most `limit` rows, in their order, drawn from all of them."""
    if limit >= len(rows):
        return rows
    return [rows[place] for place in sorted(random.Random(f"limit {seed}").sample(range(len(rows)), limit))]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check --prompts") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def _lines(name: str, lines: Iterable[str]) -> list[Row]:
    """Each line is a record of one column, `prompt`: one that is a transcript is a conversation."""
    columns = Columns(prompt="prompt")
    return [
        parse({"prompt": line.strip()}, columns, f"{name}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
