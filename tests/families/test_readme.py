"""README's table of families is the one that the tests go through."""

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


def test_the_readme_shows_the_table_of_the_tests(families: Any) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert families.written(readme) == readme, "run `python ci/families.py --write`"


def test_a_readme_that_lost_its_marks_is_not_written_over(families: Any) -> None:
    with pytest.raises(ValueError, match="lacks the marks"):
        families.written("# rlhf\n")
