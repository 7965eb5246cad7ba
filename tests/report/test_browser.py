"""The page in a real Chromium, with every request refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf.report.page import write_report
from tests.browser import MARKS, chromium
from tests.report.runs import bad_run

pytestmark = MARKS


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """(file, width) -> the open page; the test fails if it asks for anything else, or prints to the console."""
    contexts, complaints = [], []

    def open_file(file: Path, width: int = 1200, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        context.route("**/*", lambda route: route.continue_() if route.request.url == file.as_uri() else refuse(route))
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.goto(file.as_uri())
        return page

    def refuse(route: Any) -> None:
        complaints.append(f"asks for {route.request.url}")
        route.abort()

    yield open_file
    for context in contexts:
        context.close()
    assert complaints == []


def scroll_through(page: Any) -> None:
    """Show every part of the page once, as curves are drawn when they come into view."""
    for place in range(0, page.evaluate("document.documentElement.scrollHeight"), 600):
        page.evaluate(f"scrollTo(0, {place})")
        page.wait_for_timeout(30)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_page_draws_all_curves_and_nothing_overflows(
    long_run: Any,
    open_page: Any,
    tmp_path: Path,
    width: int,
    scheme: str,
) -> None:
    write_report([long_run], file := tmp_path / "report.html")
    page = open_page(file, width, scheme)
    scroll_through(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".plot").count() == page.locator(".uplot").count() > 10


def test_search_and_sorting_work(long_run: Any, open_page: Any, tmp_path: Path) -> None:
    write_report([long_run], file := tmp_path / "report.html")
    page = open_page(file)
    rows = page.locator("table.sortable tbody tr")
    everything = rows.count()
    page.get_by_label("Search").fill("question 12:")
    assert page.locator("table.sortable tbody tr:visible").count() == 1
    assert page.locator(".tools output").first.text_content() == f"1 of {everything}"
    page.get_by_label("Search").fill("")
    for name in ("reward", "change", "KL", "tokens"):
        button = page.locator(f"th button:text-is('{name}')")
        column = button.evaluate("node => node.parentElement.cellIndex")
        for order in (-1, 1) if name != "change" else (1, -1):  # it is sorted by the change at first
            button.click()
            values = rows.evaluate_all(f"rows => rows.map(row => Number(row.cells[{column}].dataset.value))")
            assert values == sorted(values, key=lambda value: order * value), name


def test_keyboard_alone_sorts(long_run: Any, open_page: Any, tmp_path: Path) -> None:
    write_report([long_run], file := tmp_path / "report.html")
    page = open_page(file)
    page.get_by_label("Search").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "reward"
    page.keyboard.press("Enter")
    assert page.locator("th[aria-sort=descending]").text_content() == "reward"


def test_tokens_are_tinted_by_the_chosen_number(long_run: Any, open_page: Any, tmp_path: Path) -> None:
    write_report([long_run], file := tmp_path / "report.html")
    page = open_page(file)
    piece = page.locator(".tokens span").nth(1)
    assert piece.get_attribute("title") == "log(policy / reference) 0.841"
    page.get_by_label("Tint").select_option("value")
    assert piece.get_attribute("title") == "value 0.841" and "color-mix" in (piece.get_attribute("style") or "")


def test_hostile_texts_do_nothing(open_page: Any, tmp_path: Path) -> None:
    write_report([bad_run(tmp_path)], file := tmp_path / "report.html")
    page = open_page(file)
    scroll_through(page)
    assert page.locator("img").count() == 0
    assert "onerror=alert(1)" in page.locator("table.sortable").text_content()


def test_page_is_readable_without_scripts(browser: Any, long_run: Any, tmp_path: Path) -> None:
    write_report([long_run], file := tmp_path / "report.html")
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    assert page.locator(".plot svg").count() > 10 and page.locator(".tools:visible").count() == 0
    context.close()
