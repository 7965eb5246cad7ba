"""A trainer on the CPU whose rollouts a simulated Gaudi draws learns what it learns alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.launchers.coordinator import find_free_port

SHORT = ["sft.max_steps=20", "reward.max_steps=10", "ppo.steps=3", "ppo.eval_rows=16", "precision=fp32"]


@pytest.mark.slow
@pytest.mark.parametrize("lazy", ["0", "1"], ids=["eager", "lazy"])
def test_simulated_gaudi_draws_for_a_trainer_on_the_cpu(environment: dict[str, str], tmp_path: Path, lazy: str) -> None:
    options = [word for key in SHORT for word in ("--set", key)]
    program, trained = [sys.executable, "-m", "rlhf"], ["--accelerator", "cpu", *options]

    def run(*words: object) -> None:
        subprocess.run([*program, *map(str, words), *trained], env=environment, check=True, timeout=300, cwd=tmp_path)

    run("--stages", "sft,reward", "--output", "there")
    port = find_free_port()
    server = subprocess.Popen(
        [*program, "serve", "there/sft", "--rollouts", "--accelerator", "hpu", "--precision=fp32", "--port", str(port)],
        env=environment | {"RLHF_GAUDI_SIM": "1", "PT_HPU_LAZY_MODE": lazy}, cwd=tmp_path, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert server.stdout and "on hpu in fp32" in server.stdout.readline()
        run("ppo", "--output", "there", "--set", f"ppo.rollout.where=http://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait(60)
    run("ppo", "--output", "here", "--set", "ppo.actor=there/sft/model", "--set", "ppo.reward_model=there/reward/model")
    for there, here in zip(steps(tmp_path / "there"), steps(tmp_path / "here"), strict=True):
        assert there["handover_gap"] < 1e-5 and there.get("handover_slope", 1) == pytest.approx(1, abs=0.01)
        assert (there["tokens"], there["reward"]) == (here["tokens"], pytest.approx(here["reward"], abs=1e-3))


def steps(run: Path) -> list[dict[str, float]]:
    records = map(json.loads, (run / "ppo" / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if "draw_gap" in record]
