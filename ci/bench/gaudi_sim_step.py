"""Measure a training step of each stage on the simulated Gaudi, with its accounting, against the same step on the CPU.

    pip install ./plugins/rlhf-gaudi-sim                                once: install the simulated Gaudi
    python ci/bench/gaudi_sim_step.py                                   SFT, reward and PPO in bf16 and fp32
    python ci/bench/gaudi_sim_step.py --precisions bf16 --steps 5       a shorter measurement
    python ci/bench/gaudi_sim_step.py --config my.yaml                  another recipe than the embedded example

Two processes run the trainers of the same recipe and take turns on the whole machine, A B A B, so that other load on
the machine affects both. Each ratio is the median step on the simulated Gaudi divided by the median step on the CPU.
Medians and ratios are written to ci/bench/results.
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
# Both sides use static shapes, the default of the simulated card.
SETTINGS = ["engine.shapes=static", *(f"{stage}.eval_rows=8" for stage in STAGES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="FILE", help="recipe (default: the embedded example)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps per side and stage (default: 20)")
    parser.add_argument("--warmup", type=int, default=4, help="untimed steps before them (default: 4)")
    parser.add_argument(
        "--precisions", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"], help="default: both"
    )
    parser.add_argument("--output", type=Path, help="JSON file (default: results/gaudi_sim_step-<machine>.json)")
    arguments = parser.parse_args()
    try:
        version("rlhf-gaudi-sim")
    except PackageNotFoundError:
        sys.exit("rlhf-gaudi-sim is not installed; run: pip install ./plugins/rlhf-gaudi-sim")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_models(folder, arguments.config)
        measurements = {
            precision: {stage: measure(stage, precision, folder, arguments) for stage in STAGES}
            for precision in arguments.precisions
        }
    result = {
        "what": f"one step of each stage of {arguments.config or 'the embedded example'}",
        "settings": SETTINGS,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        **measurements,
    }
    output = arguments.output or results_file(HERE, "gaudi_sim_step")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
    print(output)


def train_models(folder: Path, recipe: str | None) -> None:
    """Train models for one step; the reward and PPO stages of both sides start from them."""
    config = ["--config", recipe] if recipe else []
    for stage in ("sft", "reward"):
        overrides = [part for setting in (*SETTINGS, f"{stage}.max_steps=1") for part in ("--set", setting)]
        command = [sys.executable, "-m", "rlhf", stage, "--accelerator", "cpu", "--output", str(folder / "run")]
        subprocess.run([*command, *config, *overrides], check=True, stdout=subprocess.DEVNULL)


def measure(stage: str, precision: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a stage's steps on both sides, their medians, and the ratio of the medians."""
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
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    result: dict[str, Any] = {"ratio": round(medians["hpu"] / medians["cpu"], 2)}
    for side, worker in workers.items():
        result[side] = {**worker.ready, "median_seconds": round(medians[side], 4)}
        result[side]["seconds"] = [round(value, 4) for value in seconds[side]]
    print(f"{precision} {stage}: simulated Gaudi / CPU: {result['ratio']}", flush=True)
    return result


if __name__ == "__main__":
    main()
