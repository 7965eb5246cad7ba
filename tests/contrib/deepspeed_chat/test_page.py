"""The migration page: its tables are those of the translation."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from rlhf.contrib.deepspeed_chat.tables import load_flags, load_variables

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/deepspeed-chat.md"


def test_page_has_the_tables_of_the_translation() -> None:
    spec = importlib.util.spec_from_file_location("ci_migration", ROOT / "ci/migration.py")
    assert spec and spec.loader
    migration = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(migration)
    page = PAGE.read_text(encoding="utf-8")
    assert migration.written(page) == page, "run: python ci/migration.py --write"


def test_page_names_every_flag_and_variable() -> None:
    page = PAGE.read_text(encoding="utf-8")
    names = [name for row in load_flags().values() for name in (row.name, *row.was)] + list(load_variables())
    assert [name for name in names if f"`{name}`" not in page] == []


def test_table_rows_have_as_many_cells_as_the_head() -> None:
    width = 0
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line))
        if not line.startswith("|"):
            width = 0
            continue
        width = width or cells
        assert cells == width, line
