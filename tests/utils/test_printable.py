"""Control characters of foreign text are shown on terminals and in logs, and never reach them."""

from __future__ import annotations

import ast
import io
import json
import logging
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from rlhf.cli.tables import print_json, print_line, print_table
from rlhf.reporting import console as module
from rlhf.reporting.console import Terminal, append_line, console, copy_console_to
from rlhf.reporting.progress import progress
from rlhf.utils import signals
from rlhf.utils.printable import make_output_printable, make_printable
from tests.helpers import sets

ROOT = Path(__file__).parents[2]
HOSTILE = "a\x1b]0;OWNED\x07b\x1b[2Jc\x9b31md\x7fe\rf\x00"
SHOWN = "a\\x1b]0;OWNED\\x07b\\x1b[2Jc\\x9b31md\\x7fe\\x0df\\x00"


def is_clean(text: str) -> bool:
    return not any(sequence in text for sequence in ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\x7f", "\x00", "\re"))


def test_control_characters_become_visible() -> None:
    assert make_printable(HOSTILE) == SHOWN
    assert make_printable("plain\tä 字\n") == "plain\tä 字\n"


def test_whatever_is_printed_is_clean(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with make_output_printable(), signals.tolerate_closed_terminal(), copy_console_to(tmp_path / "log", HOSTILE):
        print(HOSTILE)
        print(HOSTILE, file=sys.stderr)
        sys.stdout.writelines([HOSTILE])
        console.print(HOSTILE, markup=False)
        console.print(Text(HOSTILE))
        print_line((HOSTILE, "bold"))
        print_table(HOSTILE, [HOSTILE], [[HOSTILE]])
        logging.getLogger("rlhf").warning(HOSTILE)
        with progress(2, HOSTILE) as bar:
            bar.advance()
    out, err = capfd.readouterr()
    assert is_clean(out) and is_clean(err) and out.count("\\x1b]0;") >= 6 and SHOWN in err
    append_line(tmp_path / "log", HOSTILE)
    log = (tmp_path / "log").read_text()
    assert is_clean(log) and log.count("\\x1b]0;") >= 5


def test_terminal_shows_colours_but_no_foreign_sequences() -> None:
    stream = io.StringIO()
    terminal = Terminal(file=stream, force_terminal=True, color_system="standard", width=200)
    table = Table(HOSTILE, title=Text(HOSTILE, "bold"))
    table.add_row(Text(HOSTILE))
    terminal.print(table)
    terminal.print(Text(HOSTILE, "red"))
    with terminal.status(Text(HOSTILE)):
        pass
    assert is_clean(stream.getvalue().replace("\x1b[2K", "").replace("\r\x1b", "")) and "\x1b[31m" in stream.getvalue()


def test_json_stays_valid(capsys: pytest.CaptureFixture[str]) -> None:
    with make_output_printable():
        print_json({HOSTILE: [HOSTILE]})
    out = capsys.readouterr().out
    assert is_clean(out) and json.loads(out) == {HOSTILE: [HOSTILE]}


def test_no_module_prints_past_the_guard() -> None:
    """All consoles are `Terminal`s, and nothing writes to the original streams."""
    for path in (ROOT / "rlhf").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = (
                ast.unparse(node.func)
                if isinstance(node, ast.Call)
                else ast.unparse(node)
                if isinstance(node, ast.Attribute)
                else ""
            )
            assert name not in {"Console", "typer.echo", "click.echo", "sys.__stdout__", "sys.__stderr__"}, path
            assert not name.endswith((".stdout.buffer", ".stderr.buffer")), path
            assert not name.startswith("os.write"), path
    assert issubclass(type(module.console), Terminal)


def test_rows_and_names_of_columns_are_clean(rlhf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": f"a {HOSTILE}", "chosen": f"b {HOSTILE}", "rejected": f"c {HOSTILE}"}
    rows.write_text("".join(json.dumps({**row, "prompt": f"{row['prompt']} {n}"}) + "\n" for n in range(40)))
    long = [f"data.max_{part}_length=200" for part in ("prompt", "completion")]
    done = rlhf("data", "--set", f"data.datasets={rows}", *sets(*long))
    assert done.returncode == 0 and is_clean(done.stdout + done.stderr) and "\\x1b]0;" in done.stdout
    rows.write_text(json.dumps({HOSTILE: "x"}) + "\n")
    failed = rlhf("data", "--set", f"data.datasets={rows}", check=False)
    assert failed.returncode == 2 and is_clean(failed.stderr) and "OWNED" in failed.stderr
