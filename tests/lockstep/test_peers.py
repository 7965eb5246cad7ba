"""A side's process that ends or fails is reported in one line, and never waited for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf.config.schema import Config
from rlhf.errors import RemoteRankError, RLHFError
from rlhf.lockstep.peers import live_side


def test_process_that_cannot_start_is_reported_with_what_it_printed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nprint('no device', flush=True)\nos._exit(7)\n")
    line = "^A: its process ended with exit code 7; what it printed is in "
    side = live_side("A", Config(), ["sft"], tmp_path / "a", {"PYTHONPATH": str(tmp_path)})
    with pytest.raises(RemoteRankError, match=line) as raised, side:
        pass
    (path,) = re.findall(r"printed is in (\S+)$", str(raised.value))
    assert Path(path).read_text() == "no device\n"


def test_error_of_the_user_is_one_line_with_the_side_in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_ACCELERATOR", "cpu")  # a side names its backend
    config = Config(accelerator="absent", output=tmp_path / "run")
    side = live_side("B", config, ["sft"], tmp_path / "b")
    with pytest.raises(RLHFError, match=r"^B: .*absent"), side:
        pass
