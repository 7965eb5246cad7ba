"""Every figure of a page is in ci/bench/figures.yaml: measured, computed by a test, or not a measurement."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs import pages

BENCH = pages.ROOT / "ci/bench"
DOCUMENT: dict[str, list[dict[str, Any]]] = yaml.safe_load((BENCH / "figures.yaml").read_text(encoding="utf-8"))
MEASURED = DOCUMENT["measured"]
COMMENTED = sorted(path for suffix in ("yaml", "sh") for path in (pages.ROOT / "example_scripts").rglob(f"*.{suffix}"))
READ = [page for page in pages.PAGES if pages.name(page) not in pages.GENERATED] + COMMENTED

NUMBER = r"(?<![\w.])\d[\d,]*(?:\.\d+)?"
UNIT = (
    r"(?:[KMGT]i?B(?:/s)?|%|(?:ms|seconds?|s|min|minutes?|hours?|h|times|nats|[GT]FLOP/s|standard deviations|"
    r"(?:tokens|steps|rows|pairs|completions)(?:/s| per second| a second))\b)"
)
WORD = r"(?:a few|half an|quarter of an|two|three|four|five|six|eight|ten|twelve|twenty|thirty)"
FIGURE = re.compile(rf"{NUMBER} ?{UNIT}|\b(?:{WORD}\s+(?:seconds?|minutes?|hours?)|(?:a|an) (?:minute|hour))\b")
FENCE = re.compile(r"^( *)```(?!text)\S*[^\n]*\n.*?^\1```$", re.MULTILINE | re.DOTALL)
"""Code; blocks of `text` show what a program prints."""
SPAN = re.compile(r"`[^`\n]+`|\]\([^)\n]*\)|\b\d+GiB\b")
"""Code spans, targets of links, and a device's memory as options write it."""


def readable(path: Path) -> str:
    """Return a page's text, or a file's comments, with spaces for everything in which numbers are settings."""
    text = pages.text(path)
    if path.suffix != ".md":
        text = "\n".join(line[line.find("#") :] if "#" in line else "" for line in text.splitlines())
    for pattern in (FENCE, SPAN):
        text = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    return text


def spans(page: str, text: str) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of everything in a page that an entry covers."""
    for entry_page, figure in [pair for entry in MEASURED for pair in figures().texts(entry)]:
        if entry_page == page:
            whole = (pages.ROOT / page).read_text(encoding="utf-8")
            yield from ((match.start(), match.end()) for match in re.finditer(re.escape(figure), whole))
    for entry in DOCUMENT["tested"]:
        for header in entry["tables"].get(page, ()):
            start = text.index(header)
            rows = re.compile(r"(?:\|.*\n)+").match(pages.text(pages.ROOT / page), start)
            assert rows
            yield start, rows.end()
    for entry in DOCUMENT["inputs"]:
        if Path(page).match(entry["pages"]):
            yield from (match.span() for match in re.finditer(entry["text"], text))


def figures() -> Any:
    """Return the module ci/bench/figures.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        return importlib.import_module("figures")


@pytest.mark.parametrize("page", READ, ids=pages.name)
def test_every_figure_of_page_is_listed(page: Path) -> None:
    text = readable(page)
    covered = list(spans(pages.name(page), text))
    unlisted = [
        f"{text[: match.start()].count(chr(10)) + 1}: {match[0]}"
        for match in FIGURE.finditer(text)
        if not any(start <= match.start() and match.end() <= end for start, end in covered)
    ]
    assert unlisted == [], "list them in ci/bench/figures.yaml with their command, or remove them from the page"


@pytest.mark.parametrize(
    "text",
    [
        "takes 2.8 s,",
        "peak of 14.4 GiB.",
        "right on 91.7 % of",
        "rose to 73.3%",
        "1.06 times",
        "in 14 minutes",
        "5 TFLOP/s",
        "1,200 tokens/s",
        "in about a minute",
        "in ten minutes",
        "0.81 standard deviations",
        "300 tokens per second",
    ],
)
def test_figure_with_unit_is_noticed(text: str) -> None:
    assert FIGURE.search(text)


@pytest.mark.parametrize("entry", MEASURED, ids=lambda entry: entry["id"])
def test_measured_text_is_in_its_page_and_follows_from_its_result(entry: dict[str, Any]) -> None:
    module = figures()
    for page, text in module.texts(entry):
        assert text in pages.text(pages.ROOT / page), page
    if "result" in entry:
        result = module.read_result(entry)
        for figure in (figure for listed in entry["figures"].values() for figure in listed):
            assert module.fill(figure["template"], result) == figure["text"]
    assert all((pages.ROOT / path).exists() for path in entry["code"].split())


def test_note_of_page_has_machine_date_commit_and_age() -> None:
    module = figures()
    for page in {page for entry in MEASURED for page, _ in module.texts(entry)}:
        note = f"{module.BEGIN}\n{module.note(page, MEASURED)}\n{module.END}"
        assert note in pages.text(pages.ROOT / page), f"{page}: run python ci/bench/figures.py --write"


def test_tables_have_the_rows_of_all_results() -> None:
    module = figures()
    tables = f"{module.ROWS_BEGIN}\n{module.tables()}\n{module.ROWS_END}"
    assert tables in pages.text(pages.ROOT / module.ROWS), "run python ci/bench/figures.py --write"
    rows = [line for line in tables.splitlines() if line.startswith("| ") and not line.startswith(("| row", "| ---"))]
    results = [json.loads(path.read_text(encoding="utf-8")) for path in (BENCH / "results").glob("*.json")]
    assert len(rows) == sum("ratio" in row for result in results for row in result.get("rows", ()))


def test_every_result_is_measured_and_every_id_is_unique() -> None:
    results = {str(path.relative_to(pages.ROOT)) for path in (BENCH / "results").glob("*.json")}
    with_rows = {path for path in results if '"ratio"' in (pages.ROOT / path).read_text(encoding="utf-8")}
    assert with_rows <= {entry["result"] for entry in MEASURED if "result" in entry}
    assert len({entry["id"] for entry in MEASURED}) == len(MEASURED)


@pytest.mark.parametrize("entry", DOCUMENT["tested"], ids=lambda entry: entry["test"])
def test_test_of_computed_figures_exists(entry: dict[str, Any]) -> None:
    file, _, name = entry["test"].partition("::")
    assert f"def {name}(" in (pages.ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("entry", DOCUMENT["inputs"], ids=lambda entry: f"{entry['pages']}: {entry['text']}")
def test_number_that_is_not_measured_is_in_its_page(entry: dict[str, Any]) -> None:
    assert entry["reason"]
    assert any(
        re.search(entry["text"], readable(page)) for page in READ if Path(pages.name(page)).match(entry["pages"])
    )


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return `figures` in a repository with one commit, a page that says 2.5 s, and a command that takes 3.5."""
    module = figures()
    page = f"It takes 2.5 s.\n\n{module.BEGIN}\n{module.END}"
    files = {"page.md": page, "code/file": "1", "result.json": '{"seconds": 2.5}', "figures.yaml": "# comment\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for name, value in (("ROOT", tmp_path), ("FILE", tmp_path / "figures.yaml")):
        monkeypatch.setattr(module, name, value)
    commit = _commit(tmp_path, "init", "-q")
    figure = {"text": "takes 2.5 s", "template": "takes {seconds:.1f} s"}
    command = """echo '{"seconds": 3.5}' > result.json"""
    entry = {"id": "one", "command": command, "needs": [], "result": "result.json", "machine": "a chip, 2 cores"}
    entry |= {"date": "2026-01-01", "commit": commit, "older": False, "code": "code", "figures": {"page.md": [figure]}}
    module.save({"measured": [entry]})
    module.write_notes([entry])
    return argparse.Namespace(module=module, root=tmp_path)


def _commit(root: Path, *first: str) -> str:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        return subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True, text=True).stdout

    if first:
        git(*first)
    git("add", ".")
    git("commit", "-qm", "change")
    return git("rev-parse", "--short=7", "HEAD").strip()


def _run(repository: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr("sys.argv", ["figures.py", *options])
    repository.module.main()


def test_page_says_that_code_has_changed_since(repository, monkeypatch, capsys) -> None:
    _run(repository, monkeypatch, "--check")
    assert "current" in capsys.readouterr().out
    assert "changed since" not in (repository.root / "page.md").read_text()
    (repository.root / "code/file").write_text("2")
    _commit(repository.root)
    with pytest.raises(SystemExit, match=r"wrong about the age of one; run python ci/bench/figures\.py --write"):
        _run(repository, monkeypatch, "--check")
    _run(repository, monkeypatch, "--write")
    assert "files changed since: 1" in capsys.readouterr().out
    assert "a chip, 2 cores" in (text := (repository.root / "page.md").read_text()) and "changed since" in text
    _run(repository, monkeypatch, "--check")


@pytest.mark.parametrize(
    ("name", "before", "words", "code"),
    [
        ("a.py", '"""One."""\nx = "1"', '"""Two."""\n# why\nx = "1"', '"""Two."""\nx = "2"'),
        ("a.h", "int f(int x);", "int f(int x); // a\n/* b\n */", "long f(int x);"),
    ],
)
def test_comments_make_no_figure_old(repository, name: str, before: str, words: str, code: str) -> None:
    path = repository.root / "code" / name
    (entry,) = repository.module.load()["measured"]
    counts = []
    for text in (before, words, code):
        path.write_text(text)
        commit = _commit(repository.root)
        counts.append(repository.module.count_changes(entry))
        entry["commit"] = commit
    assert counts == [1, 0, 1]


def test_measure_writes_value_commit_and_note(repository, monkeypatch) -> None:
    (repository.root / "code/file").write_text("2")
    commit = _commit(repository.root)
    _run(repository, monkeypatch, "--measure", "one")
    (entry,) = repository.module.load()["measured"]
    assert (entry["commit"], entry["older"], entry["figures"]["page.md"][0]["text"]) == (commit, False, "takes 3.5 s")
    text = (repository.root / "page.md").read_text()
    assert text.startswith("It takes 3.5 s.") and commit in text and "changed since" not in text
    assert (repository.root / "figures.yaml").read_text().startswith("# comment\n")


def test_measure_skips_what_this_machine_lacks(repository, monkeypatch, capsys) -> None:
    document = repository.module.load()
    document["measured"][0]["needs"] = ["chip None of This Name"]
    repository.module.save(document)
    _run(repository, monkeypatch, "--measure")
    assert "one: not measured: this machine has no chip None of This Name" in capsys.readouterr().out
    assert "takes 2.5 s" in (repository.root / "page.md").read_text()
