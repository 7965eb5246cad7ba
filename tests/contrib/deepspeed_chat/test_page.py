"""The migration page: its tables are those of the translation, its links lead somewhere, its commands exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from rlhf.cli.app import app
from rlhf.contrib.deepspeed_chat.tables import load_flags, load_variables

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/deepspeed-chat.md"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ci_migration", ROOT / "ci/migration.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_tables_are_made_of_the_data(maker: ModuleType) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert maker.written(page) == page, "run: python ci/migration.py --write"


def test_it_names_every_flag_and_variable() -> None:
    page = PAGE.read_text(encoding="utf-8")
    names = [name for row in load_flags().values() for name in (row.name, *row.was)] + list(load_variables())
    assert [name for name in names if f"`{name}`" not in page] == []


def test_rows_of_its_tables_have_as_many_cells_as_their_heads() -> None:
    width = 0
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line))
        if not line.startswith("|"):
            width = 0
            continue
        width = width or cells
        assert cells == width, line


def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)", PAGE.read_text(encoding="utf-8"))
    assert len(links) >= 3
    assert [link for link in links if not (PAGE.parent / link).exists()] == []


def test_the_commands_that_it_sends_users_to_exist() -> None:
    there = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    named = set(re.findall(r"`rlhf ([a-z]+)", PAGE.read_text(encoding="utf-8")))
    assert len(named) > 5
    assert sorted(named - there) == []
