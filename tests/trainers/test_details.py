"""docs/ppo-details.md: every place and key that the table names exists, and every detail of the lists has a row.

docs/deepspeed-chat-differences.md: every key and file that it names exists.
"""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rlhf.config.schema import Config

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs/ppo-details.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| Detail", "| ---"))
]
PLACES = sorted({place for row in ROWS for place in re.findall(r"`(rlhf/[^`]+)`", row[-1])})
KEYS = sorted({key for row in ROWS for key in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)`", row[-1])})


DECISIONS = ROOT / "docs" / "deepspeed-chat-differences.md"
DECIDED = re.findall(rf"`((?:{'|'.join(Config.model_fields)})(?:\.[a-z_]+)+)", DECISIONS.read_text(encoding="utf-8"))


def defined(tree: ast.AST, path: list[str]) -> bool:
    """Return whether a module or class defines `path[0]`, and that defines the rest of the path."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == path[0]:
            return len(path) == 1 or defined(node, path[1:])
    return False


@pytest.mark.parametrize("place", PLACES)
def test_every_place_exists(place: str) -> None:
    file, _, name = place.partition(":")
    assert (ROOT / file).is_file()
    assert not name or defined(ast.parse((ROOT / file).read_text(encoding="utf-8")), name.split("."))


@pytest.mark.parametrize("key", sorted({*KEYS, *DECIDED}))
def test_every_key_exists(key: str) -> None:
    section: Any = Config()
    for part in key.split("."):
        assert isinstance(section, BaseModel) and part in type(section).model_fields
        section = getattr(section, part)


def test_decisions_say_what_is_here_and_why() -> None:
    text = DECISIONS.read_text(encoding="utf-8")
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert len(rows) > 30 and all(
        len(row) == 3 and all(cell.strip() for cell in row) for row in rows if row[0][:3] != "---"
    )
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (DECISIONS.parent / link).exists(), link


def test_every_row_is_whole() -> None:
    assert len(ROWS) > 40 and len(PLACES) > 20 and len(KEYS) > 20
    for row in ROWS:
        assert len(row) == 4 and all(row), row
        assert row[2] in {"yes", "key", "other", "no"}, row
        assert row[2] != "key" or re.search(r"`[a-z]+\.[a-z_.]+`", row[3]), f"names no key: {row}"


@pytest.mark.parametrize(("source", "count"), [("N G", 6), ("N R", 3), ("N P", 11), ("37 C", 13)])
def test_no_detail_of_a_list_is_left_out(source: str, count: int) -> None:
    named = {int(number) for row in ROWS for number in re.findall(rf"{re.escape(source)}(\d+)", row[1])}
    assert named == set(range(1, count + 1))


def test_the_defaults_are_what_the_table_says() -> None:
    ppo = Config().ppo
    assert (ppo.sampling.top_k, ppo.sampling.top_p, ppo.gamma, ppo.dropout, ppo.critic_dropout) == (0, 1.0, 1.0, 0, 0)
    assert (ppo.optimizer.eps, ppo.optimizer.min_lr_ratio) == (1e-8, 0.1)
    assert (ppo.missing_eos_penalty, ppo.kl_target, ppo.kl_stop, ppo.normalize_scores) == (None, None, None, "none")
    assert (Config().reward.loss, Config().reward.epochs, Config().data.too_long) == ("token", 1, "drop")
    rates = {Config().sft.optimizer.learning_rate, Config().reward.optimizer.learning_rate, ppo.optimizer.learning_rate}
    assert len(rates) == 1 and ppo.method.whiten_advantages
