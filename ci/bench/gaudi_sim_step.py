"""Benchmark: one training step of each stage on the simulated Gaudi, accounting included, against the plain CPU.

Two processes run the trainers of the same recipe and take turns on the whole machine: A B A B ..., so that whatever
else the machine does meets both. Medians go to results/*.json.
Needs plugins/rlhf-gaudi-sim: `pip install ./plugins/rlhf-gaudi-sim`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from channel import Worker
from machine import machine, results_file

HERE = Path(__file__).resolve().parent
STAGES = ("sft", "reward", "ppo")
SIDES = {"cpu": {"RLHF_GAUDI_SIM": "0"}, "hpu": {"RLHF_GAUDI_SIM": "1"}}
# The same shapes on both sides: static ones, which are the simulated card's default.
SETTINGS = ["engine.shapes=static", *(f"{stage}.eval_rows=8" for stage in STAGES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="FILE", help="recipe (default: the embedded example)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each side and stage (default: 20)")
    parser.add_argument("--warmup", type=int, default=4, help="steps of each side before those (default: 4)")
    parser.add_argument("--precisions", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    parser.add_argument("--output", type=Path, help="JSON file (default: results/gaudi_sim_step-<machine>.json)")
    arguments = parser.parse_args()
    try:
        version("rlhf-gaudi-sim")
    except PackageNotFoundError:
        sys.exit("rlhf-gaudi-sim is not installed; run: pip install ./plugins/rlhf-gaudi-sim")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_models(folder, arguments.config)
        found = {
            precision: {stage: measure(stage, precision, folder, arguments) for stage in STAGES}
            for precision in arguments.precisions
        }
    result = {
        "what": f"one step of each stage of {arguments.config or 'the embedded example'}",
        "settings": SETTINGS,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        **found,
    }
    output = arguments.output or results_file(HERE, "gaudi_sim_step")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
    print(output)


def train_models(folder: Path, recipe: str | None) -> None:
    """Models of one step's training, from which the reward and PPO stages of both sides start."""
    config = ["--config", recipe] if recipe else []
    for stage in ("sft", "reward"):
        given = [part for setting in (*SETTINGS, f"{stage}.max_steps=1") for part in ("--set", setting)]
        command = [sys.executable, "-m", "rlhf", stage, "--accelerator", "cpu", "--output", str(folder / "run")]
        subprocess.run([*command, *config, *given], check=True, stdout=subprocess.DEVNULL)


def measure(stage: str, precision: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    settings = [
        *SETTINGS,
        f"precision={precision}",
        f"reward.model={folder}/run/sft/model",
        f"ppo.actor={folder}/run/sft/model",
        f"ppo.reward_model={folder}/run/reward/model",
        f"{stage}.{'steps' if stage == 'ppo' else 'max_steps'}={arguments.warmup + arguments.steps + 1}",
        *([] if stage == "ppo" else [f"{stage}.epochs=1000"]),
    ]
    workers = {}
    for side, environment in SIDES.items():
        work = {"stage": stage, "accelerator": side, "recipe": arguments.config, "settings": settings}
        work["output"] = str(folder / precision / stage / side)
        workers[side] = Worker(
            [sys.executable, str(HERE / "stage_worker.py"), json.dumps(work)],
            errors=folder / f"{stage}-{precision}-{side}.log",
            environment=environment,
        )
    for number in range(arguments.warmup + arguments.steps):
        for worker in workers.values():
            worker.step(record=number >= arguments.warmup)
    for worker in workers.values():
        worker.stop()
    seconds = {side: worker.seconds for side, worker in workers.items()}
    medians = {side: statistics.median(each) for side, each in seconds.items()}
    result: dict[str, Any] = {"ratio": round(medians["hpu"] / medians["cpu"], 2)}
    for side, worker in workers.items():
        result[side] = {**worker.ready, "median_seconds": round(medians[side], 4)}
        result[side]["seconds"] = [round(value, 4) for value in seconds[side]]
    print(f"{precision} {stage}: simulated Gaudi / CPU: {result['ratio']}", flush=True)
    return result


if __name__ == "__main__":
    main()
