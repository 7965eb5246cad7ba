"""Every page of docs/ has front matter and a place in the navigation; README stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf.config.loader import parse_yaml
from tests.docs import pages

DOCS = pages.ROOT / "docs"
INDEX = DOCS / "index.md"


def navigation() -> list[str]:
    """Return the entries of the navigation: pages without `.md`, or patterns."""
    entries = []
    for block in pages.blocks(INDEX, "{toctree}"):
        entries += [line for line in block.splitlines() if line and not line.startswith(":")]
    return entries


@pytest.mark.parametrize("page", pages.SITE, ids=pages.name)
def test_page_has_front_matter_and_one_title(page: Path) -> None:
    match = re.match(r"---\n(.*?)\n---\n\n# \S", pages.text(page), re.DOTALL)
    assert match, "begin with front matter, then the title"
    matter = parse_yaml(match[1])
    assert set(matter) == {"title", "description"} and all(matter.values())
    assert len(re.findall(r"^# ", pages.prose(page), re.MULTILINE)) == 1


@pytest.mark.parametrize("page", [page for page in pages.SITE if page != INDEX], ids=pages.name)
def test_page_is_in_the_navigation(page: Path) -> None:
    path = page.relative_to(DOCS).with_suffix("")
    assert any(path.match(entry) for entry in navigation())


def test_navigation_lists_only_pages() -> None:
    missing = [entry for entry in navigation() if "*" not in entry and not (DOCS / f"{entry}.md").is_file()]
    assert missing == [] and len(navigation()) > 20


def test_readme_lists_every_guide() -> None:
    """API pages and records of decisions are found through their neighbours."""
    guides = {f"docs/{page.name}" for page in DOCS.glob("*.md")} - {"docs/index.md", "docs/build-the-site.md"}
    linked = {link.partition("#")[0] for link in pages.links(pages.ROOT / "README.md")}
    assert guides - linked - {"docs/deepspeed-chat-differences.md"} == set()


def test_readme_is_short() -> None:
    assert len(pages.text(pages.ROOT / "README.md").splitlines()) <= 200
