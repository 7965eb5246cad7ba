"""Relative links and anchors of every page lead somewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import pages


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


def test_links_are_found() -> None:
    assert sum(len(pages.links(page)) for page in pages.PAGES) > 100
    assert any("#" in link for page in pages.PAGES for link in pages.links(page))
