"""The copy of what a terminal shows: each line once, whole and plain, whatever the terminal can show."""

import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from rlhf.reporting import console as terminal
from rlhf.reporting import progress as module
from rlhf.reporting import verbosity
from rlhf.reporting.console import Terminal, copy_console_to
from rlhf.reporting.progress import progress


@pytest.fixture(params=[False, True], ids=["pipe", "terminal"])
def shown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Return the output of the terminal."""
    output = io.StringIO()
    console = Terminal(file=output, force_terminal=request.param, width=60, highlight=False)
    monkeypatch.setattr(module, "console", console)
    monkeypatch.setattr(terminal, "console", console)
    return output


@pytest.fixture
def ours() -> Iterator[logging.Logger]:
    """A logger of this package, in a process of the command line."""
    logger = logging.getLogger("rlhf")
    before, level = logger.handlers, logger.level
    verbosity.configure_logging(debug=True)
    yield logging.getLogger("rlhf.somewhere")
    logger.handlers = before
    logger.setLevel(level)


def test_copy_has_every_line_once_without_colours(tmp_path: Path, shown: io.StringIO) -> None:
    console, long = module.console, "a line of more columns than the terminal has, " * 5
    console.print("before")
    with copy_console_to(tmp_path / "console.log", "rlhf sft"):
        console.print("[bold]bold[/] words")
        console.print("[not markup]", markup=False)
        console.print(long.strip())
        console.print()
        table = Table.grid(padding=1)
        table.add_row("a", "b")
        console.print(table)
    console.print("after")
    lines = [line.rstrip() for line in (tmp_path / "console.log").read_text().splitlines()]
    assert [line for line in lines if line] == ["rlhf sft", "bold words", "[not markup]", long.strip(), "a b"]
    for line in ("before", "after", "[not markup]"):
        assert line in shown.getvalue()


def test_bars_leave_a_first_and_a_last_line(
    tmp_path: Path, shown: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    with copy_console_to(tmp_path / "console.log", "rlhf sft"), progress(30, "sft", unit="rows") as bar:
        for _ in range(30):
            clock.now += 0.5
            bar.advance(1, loss=2.5)
        module.console.print("between")
    assert (tmp_path / "console.log").read_text().splitlines() == [
        "rlhf sft",
        "sft: 30 rows",
        "sft: 20/30 rows  67%  2 rows/s  5.0 s left  loss 2.5",
        "between",
        "sft: 30/30 rows  100%  2 rows/s  15 s in total  loss 2.5",
    ]


def test_copy_has_notes_once_also_during_a_bar(tmp_path: Path, shown: io.StringIO, ours: logging.Logger) -> None:
    with copy_console_to(tmp_path / "console.log", "rlhf sft"):
        ours.warning("%s gave way", "it")
        ours.info("a detail")
        with progress(1, "sft"):
            ours.warning("again")
    ours.warning("later")
    lines = (tmp_path / "console.log").read_text().splitlines()
    assert [line for line in lines if "note" in line] == ["rlhf: note: it gave way", "rlhf: note: again"]
    assert "a detail" not in lines


@pytest.mark.parametrize("configured", [False, True], ids=["plain", "configured"])
def test_a_program_sees_notes_once_whether_or_not_it_configured_logging(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shown: io.StringIO,
    configured: bool,
) -> None:
    for name in verbosity.OWN_LOGGERS:
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    handler = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler] if configured else [])
    with copy_console_to(tmp_path / "console.log", "rlhf sft"):
        logging.getLogger("accelerators.somewhere").warning("it gave way")
    logging.getLogger("rlhf.somewhere").warning("later")
    assert capsys.readouterr().err == ("" if configured else "it gave way\nlater\n")
    assert handler.stream.getvalue() == ("it gave way\nlater\n" if configured else "")


def test_copy_after_a_crash_starts_a_new_line(tmp_path: Path, shown: io.StringIO) -> None:
    path = tmp_path / "console.log"
    path.write_text("rlhf sft\nsft: 20/3")
    with copy_console_to(path, "rlhf sft --resume"):
        module.console.print("on")
    assert path.read_text() == "rlhf sft\nsft: 20/3\nrlhf sft --resume\non\n"


def test_copy_has_each_line_at_once(tmp_path: Path, shown: io.StringIO, ours: logging.Logger) -> None:
    path = tmp_path / "console.log"
    with copy_console_to(path, "rlhf sft"):
        module.console.print("first")
        assert path.read_text().endswith("first\n")
        ours.warning("second")
        assert path.read_text().endswith("second\n")


def test_quiet_run_shows_warnings_and_the_verdict_and_logs_the_rest(rlhf: Any, tmp_path: Path) -> None:
    output = tmp_path / "run"
    done = rlhf("sft", "-q", "--output", output)
    lines = [line for line in done.stdout.splitlines() if line]
    warnings = [line for line in lines if line.startswith("sft: warning: ")]
    assert warnings, "a tiny run has something to warn about"
    verdict, page = [line for line in lines if line not in warnings]
    assert (
        "supervised fine-tuning: " in verdict and page == f"{output}/report.html explains the run; open it in a browser"
    )
    log = (output / "sft/console.log").read_text(encoding="utf-8")
    assert "sft: training: " in log and "perplexity" in log and warnings[0] in log
    assert "sft is complete" in rlhf("sft", "--quiet", "--output", output, "--resume").stdout
    assert len(rlhf("sft", "--quiet", "--dry-run", "--output", tmp_path / "other").stdout.splitlines()) > 5
