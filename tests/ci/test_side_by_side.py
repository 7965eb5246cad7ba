"""The table of ci/side_by_side.py follows from output that DeepSpeed-Chat and rlhf really printed and recorded."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

CI = Path(__file__).parents[2] / "ci"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("side_by_side")


@pytest.fixture
def recorded() -> dict[str, Any]:
    result: dict[str, Any] = json.loads((CI / "bench/results/side_by_side.json").read_text(encoding="utf-8"))
    return result


def make_table(script: Any, recorded: dict[str, Any]) -> list[str]:
    return list(script.format_table(recorded["printed"], recorded["changed"], recorded["records"]))


def test_table_follows_from_recorded_output(script, recorded) -> None:
    assert make_table(script, recorded) == recorded["table"].splitlines()
    row = "| 2 | `chosen_last_scores` | `heldout_chosen_score` | 1 |"
    (cells,) = [line.split("|")[5:8] for line in recorded["table"].splitlines() if line.startswith(row)]
    printed = re.findall(r"chosen_last_scores \(higher is better\) : (\S+),", recorded["printed"]["reward"])
    assert float(cells[0]) == pytest.approx(float(printed[1]), rel=1e-3)


def test_changed_deepspeed_chat_has_the_numbers_of_rlhf(recorded) -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in recorded["table"].splitlines()[2:]]
    assert {row[0] for row in rows} == {"1", "2", "3"}
    for step, *_, original, ours, changed in rows:
        assert float(ours) == pytest.approx(float(original if step == "1" else changed), rel=2e-3)


def test_missing_number_is_an_error(script, recorded) -> None:
    recorded["printed"]["sft"] = recorded["printed"]["sft"].partition("\n")[2]
    with pytest.raises(SystemExit, match=r"sft: `ppl`, `heldout_perplexity`: got 3 and 4 values"):
        make_table(script, recorded)


def test_other_version_of_deepspeed_chat_is_refused(script, tmp_path: Path) -> None:
    for part in ("training", "dschat"):
        (tmp_path / "there" / part).mkdir(parents=True)
    (tmp_path / "there/dschat/file.py").write_text("one two")
    script.copy_originals(tmp_path / "there", tmp_path / "good", [("dschat/file.py", "two", "three")])
    assert (tmp_path / "good/dschat/file.py").read_text() == "one three"
    with pytest.raises(SystemExit, match=r"dschat/file\.py: expected 'four'; adapt PATCHES"):
        script.copy_originals(tmp_path / "there", tmp_path / "bad", [("dschat/file.py", "four", "five")])
