"""example_scripts/overoptimization: the fits and the best of n against closed forms and counts by hand."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf.data.toy_world import generate_records
from tests.diagnosis.records import write_run
from tests.recipes import toys

SHORT_RLHF = """#!/bin/sh
echo "$*" >> "$CALLS"
case $1 in
sft | reward) set -- "$@" --set "$1.max_steps=2" --set "$1.eval_rows=4" ;;
ppo) set -- "$@" --set ppo.steps=10 --set ppo.batch_size=4 --set ppo.minibatch_size=4 --set ppo.eval_rows=4 ;;
compare) set -- "$@" --limit 2 ;;
esac
exec python -m rlhf "$@"
"""


@pytest.fixture(scope="module")
def curves() -> Any:
    path = Path(__file__).parents[2] / "example_scripts/overoptimization/curves.py"
    spec = importlib.util.spec_from_file_location("curves", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["curves"] = module  # named tuples look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("is_sampling", [True, False])
def test_fit_finds_the_curve_that_made_the_numbers(curves: Any, is_sampling: bool) -> None:
    """d (2 - 0.5 d) for the best of n, d (2 - 0.5 log d) for PPO (arXiv:2210.10760), from 0.3 on."""
    distances = [0.0, 0.5, 1.0, 2.0, 4.0]
    values = [0.3 + d * (2 - 0.5 * (d if is_sampling else math.log(max(d, 1e-9)))) for d in distances]
    curve = curves.Curve("made", distances, values, [""] * 5, is_sampling)
    fit = curves.fit(curve)
    assert fit == pytest.approx((0.3, 2.0, 0.5, 1.0))
    assert [fit.at(d, is_sampling) for d in distances] == pytest.approx(values)
    noisy = curves.fit(curve._replace(values=[0.3, 1.0, 0.0, 4.0, 1.0]))
    assert noisy.r2 < 0.9


def test_curve_of_ppo_joins_numbers_of_the_same_step(curves: Any, tmp_path: Path) -> None:
    """The KL of step 5 was not finite, so it has no record."""
    numbers = {"heldout_kl": [0.0, 4.0], "heldout_reward": [0.5, 7.0, 1.0]}
    steps = {"heldout_kl": [0, 10], "heldout_reward": [0, 5, 10]}
    write_run(tmp_path / "kl-0", {"ppo": numbers}, steps=steps)
    curve = curves.read_ppo(tmp_path / "kl-0", "reward")
    assert (curve.distances, curve.values, curve.labels) == ([0.0, 2.0], [0.5, 1.0], ["step 0", "step 10"])


def test_page_shows_quality_and_reward_of_ppo_and_of_the_best_of_n(
    curves: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 64 replies to each prompt, the good one has the highest score; PPO's quality falls in its second half."""
    for coefficient, fall in (("0.1", 0.0), ("0", 0.5)):
        numbers = {
            "heldout_kl": [-1e-7, 1.0, 4.0],
            "heldout_reward": [0.0, 1.0, 2.0],
            "heldout_approved_share": [0.4, 0.8, 0.8 - fall],
        }
        write_run(tmp_path / f"kl-{coefficient}", {"ppo": numbers}, steps={key: [0, 5, 10] for key in numbers})
    lines = []
    for record in itertools.islice(generate_records(0), 3):
        texts, scores = ["wrong"] * 63 + [record["chosen"]], [float(number) for number in range(64)]
        lines.append({"prompt": record["prompt"], "completions": {"m": texts}, "scores": {"m": scores}})
    (tmp_path / "best-of-n.jsonl").write_text("\n".join(map(json.dumps, lines)))
    quality = curves.read_best_of_n(tmp_path / "best-of-n.jsonl", "approved_share")
    assert quality.values == pytest.approx([size / 64 for size in curves.SIZES])
    assert quality.distances[0] == 0 and quality.distances[-1] == pytest.approx(math.sqrt(math.log(64) - 63 / 64))
    curves.main(tmp_path)
    said = capsys.readouterr().out
    assert said.count("| PPO, kl-0 |") == said.count("| best of n |") == 2
    page = (tmp_path / "overoptimization.html").read_text()
    assert page.count("<svg") == 2 and "PPO, kl-0.1 step 10: √KL, nats per sequence 2, " in page
    assert "http" not in page.replace("http://www.w3.org", "")


@pytest.mark.slow
def test_its_script_trains_each_run_once_and_draws_the_page(tmp_path: Path) -> None:
    """The script's own commands, with fewer steps and rows; a second call trains nothing."""
    command = tmp_path / "rlhf"
    command.write_text(SHORT_RLHF)
    command.chmod(0o755)
    calls, folder = tmp_path / "calls", tmp_path / "runs"
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    for _ in range(2):
        done = subprocess.run(
            ["bash", str(toys.EXAMPLES / "overoptimization/run.sh"), str(folder)],
            capture_output=True,
            text=True,
            env=os.environ | {"PATH": path, "CALLS": str(calls)},
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("| best of n |") == 2
        stages = [line.split()[0] for line in calls.read_text().splitlines()]
        assert stages == ["sft", "reward", "reward", "ppo", "ppo", "ppo", "compare"]
    assert (folder / "overoptimization.html").read_text().count("<svg") == 2
