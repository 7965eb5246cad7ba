"""Relative links and anchors of every page lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import pages

PATH = re.compile(r"(?:rlhf|accelerators|tests|ci|docs|plugins)/[\w./-]+(?::[\w.]+)?")
NAMING_FILES = [page for page in pages.PAGES if page.name != "CHANGELOG.md" and "plugins" not in page.parts]
"""Pages that name files of this repository; a plugin's page names the plugin's."""


def broken(page: Path) -> list[str]:
    """Return the links of a page that lead nowhere."""
    return [link for link in pages.links(page) if not leads_somewhere(page, link)]


def leads_somewhere(page: Path, link: str) -> bool:
    """Return True if a link's file is in the repository and has the anchor."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or not target.is_relative_to(pages.ROOT):
        return False
    return not anchor or (target.suffix == ".md" and anchor in pages.anchors(target))


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_links_and_anchors_of_a_page_exist(page: Path) -> None:
    assert broken(page) == []


@pytest.mark.parametrize("page", NAMING_FILES, ids=pages.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    spans = re.findall(r"`([^`\n]+)`", pages.prose(page))
    paths = [span.partition(":")[0] for span in spans if PATH.fullmatch(span) and not span.startswith("ci/results")]
    assert [path for path in paths if not (pages.ROOT / path).exists()] == []


def test_links_are_found() -> None:
    assert sum(len(pages.links(page)) for page in pages.PAGES) > 100
    assert any("#" in link for page in pages.PAGES for link in pages.links(page))
