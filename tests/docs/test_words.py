"""Pages and code use the glossary's terms, and none of the words that it rules out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import pages

GLOSSARY = pages.ROOT / "docs/glossary.md"
WRITTEN = [page for page in pages.PAGES if page != GLOSSARY and pages.name(page) not in pages.GENERATED]
FOLDERS = (
    "rlhf",
    "accelerators",
    "ci",
    "plugins/rlhf-example/rlhf_example",
    "plugins/rlhf-gaudi-sim/gaudi_sim",
    "plugins/rlhf-npu/rlhf_npu",
    "plugins/rlhf-xpu/rlhf_xpu",
)
CODE = [
    path
    for folder in FOLDERS
    for path in sorted((pages.ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".sh", ".md"} and not any(part.endswith("-venv") for part in path.parts)
]
"""RESULTS.md among them, which has the names of the planted faults."""
KEYS = {"beside"}
"""Words that the glossary rules out but that users write: `dpo.reference: beside`."""


def ruled_out() -> list[str]:
    """Return the words of the glossary's last table."""
    rows = re.findall(r"^\| (.+?) \| .+ \|$", pages.text(GLOSSARY).partition("## Words that are not used")[2], re.M)
    return [word for row in rows[1:] for word in row.split(", ") if set(word) != {"-"}]


def any_of(words: list[str]) -> re.Pattern[str]:
    """Return a pattern of whole words."""
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, words))})\b", re.IGNORECASE)


NOT_IN_PAGES = any_of(ruled_out())
NOT_IN_CODE = any_of([word for word in ruled_out() if word not in KEYS])
WITHOUT_NOUN = re.compile(r"(?:^|[.:;] |\n)(?:What|Whether|Whoever|Those|That of)\b[^?.]*\.")


@pytest.mark.parametrize("page", WRITTEN, ids=pages.name)
def test_page_uses_no_word_that_the_glossary_rules_out(page: Path) -> None:
    assert NOT_IN_PAGES.findall(pages.words(page)) == []


@pytest.mark.parametrize("page", WRITTEN, ids=pages.name)
def test_page_has_no_sentence_that_begins_without_a_noun(page: Path) -> None:
    sentences = re.sub(r"^#.*$", "", pages.words(page), flags=re.MULTILINE)
    assert WITHOUT_NOUN.findall(sentences) == []


def test_code_uses_no_word_that_is_gone_from_it() -> None:
    words_of_files = {pages.name(path): NOT_IN_CODE.findall(path.read_text(encoding="utf-8")) for path in CODE}
    assert {name: words for name, words in words_of_files.items() if words} == {}


def test_the_glossary_has_words_and_terms() -> None:
    assert len(ruled_out()) > 20 and set(ruled_out()) > KEYS
    terms = [line for line in pages.text(GLOSSARY).splitlines() if line.startswith("| ")]
    assert len(terms) > 40


@pytest.mark.parametrize("text", ["It is computed anew.", "the run goes on", "a loop of your own", "kept beside it"])
def test_ruled_out_words_are_noticed(text: str) -> None:
    assert NOT_IN_PAGES.search(text)
