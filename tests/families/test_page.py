"""The table of families in docs/models.md is the one that the tests go through."""

import pytest

from ci import families


def test_families_page_shows_the_tests_table() -> None:
    page = families.PAGE.read_text(encoding="utf-8")
    assert families.updated(page) == page, "run `python ci/families.py --write`"


def test_families_page_without_marks_is_not_overwritten() -> None:
    with pytest.raises(ValueError, match="lacks the marks"):
        families.updated("# Models\n")
