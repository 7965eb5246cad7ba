"""Tables for people."""

from __future__ import annotations

import re

import pytest

from rlhf.cli.tables import print_table


def test_a_narrow_terminal_cuts_no_cell_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Points of a sweep differ at the ends of their names."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "30"}.items():
        monkeypatch.setenv(name, value)
    names = ["zero2-offload-lora8", "zero2-offload-lora64"]
    print_table("", ["point", "peak\nmemory"], [[name, "1,234.5 GiB"] for name in names])
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert max(map(len, shown.splitlines())) <= 30 and "…" not in shown
    cells = [re.findall(r"│([^│]*)│", line)[0].strip() for line in shown.splitlines() if line.startswith("│")]
    assert "".join(cells) == "".join(names)
