"""The table of families in docs/models.md is the one that the tests go through."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def families() -> Any:
    spec = importlib.util.spec_from_file_location("families", ROOT / "ci" / "families.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_families_page_shows_the_tests_table(families: Any) -> None:
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    assert families.updated(page) == page, "run `python ci/families.py --write`"


def test_families_page_without_marks_is_not_overwritten(families: Any) -> None:
    with pytest.raises(ValueError, match="lacks the marks"):
        families.updated("# Models\n")
