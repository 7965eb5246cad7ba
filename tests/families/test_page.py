"""The table of families in docs/models.md is the one that the tests go through."""

import pytest
import transformers
from packaging.version import Version

from ci import families


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="the page shows those of 5.24")
def test_families_page_shows_the_tests_table() -> None:
    page = families.PAGE.read_text(encoding="utf-8")
    assert families.updated(page) == page, "run `python ci/families.py --write`"


def test_families_page_without_marks_is_not_overwritten() -> None:
    with pytest.raises(ValueError, match="lacks the marks"):
        families.updated("# Models\n")
