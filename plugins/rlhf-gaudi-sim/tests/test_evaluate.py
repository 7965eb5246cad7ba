"""`rlhf evaluate` compiles one graph for all its batches, reads no value inside one, and says what a plain CPU says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, Runs


@pytest.mark.parametrize("option", ["--pairs", "--text"])
def test_it_is_one_graph_and_gives_the_numbers_of_the_cpu(
    python: Run, finished: Runs, tmp_path: Path, option: str
) -> None:
    run = finished("hpu", zero_stage=2).folder
    found: dict[str, Any] = {}
    for accelerator in ("hpu", "cpu"):
        command = ["-m", "rlhf", "evaluate", str(run), option, "heldout", "--json", "--accelerator", accelerator]
        env = {"RLHF_GAUDI_SIM_REPORT": str(tmp_path / "report.json")}
        done = python(*command, "--precision", "fp32", "--batch-size", "3", simulated=accelerator == "hpu", env=env)
        assert done.returncode == 0, done.stderr
        (found[accelerator],) = json.loads(done.stdout)["models"]
    numbers = {name: value for name, value in found["cpu"].items() if isinstance(value, float)}
    assert {name: found["hpu"][name] for name in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-5)
    counts = json.loads((tmp_path / "report.json").read_text())["counts"]
    assert (counts["compilations"], counts["breaks"]) == (1, 0) and counts["hits"] >= 1
