"""Train the runs of plan.py and keep their numbers in `results/`: see README.md in this folder."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from plan import Run, list_runs

from rlhf.utils.statistics import measure_fall

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results"
_JUDGE_SEED = 1000  # added to the run's
WORK = ROOT / "runs" / "truth"

TRAINING = (
    *("reward", "reward_std", "kl", "entropy", "response_length", "truncated_share", "clip_fraction", "approx_kl"),
    *("explained_variance", "grad_norm", "equal_group_share", "draw_gap", "draw_gap_max", "score_clip_fraction"),
)
"""Numbers of each step that are kept, if they were recorded."""

_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # a model that several runs need is trained once


def main() -> None:
    """Train the requested runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="runs to train again; default: all without results")
    parser.add_argument("--list", action="store_true", help="list the runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one core; default: 1")
    parser.add_argument("--keep", action="store_true", help="keep the runs' folders, in runs/truth, with their reports")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after this many seconds")
    options = parser.parse_args()
    runs = list_runs()
    if options.list:
        for run in runs:
            print(f"{'done' if result_file(run).is_file() else '':5} {run.group:10} {run.name}")
        return
    if options.jobs < 1:
        parser.error(f"--jobs: at least 1, got {options.jobs}")
    if unknown := set(options.names) - {run.name for run in runs}:
        parser.error(f"no run {', '.join(sorted(unknown))}; --list shows them")
    chosen = [run for run in runs if (run.name in options.names if options.names else not result_file(run).is_file())]
    end = time.time() + options.seconds

    def train_in_time(run: Run) -> None:
        if (started := time.time()) < end:
            train(run, keep=options.keep)
            print(f"{run.name}: {time.time() - started:.0f} s", flush=True)

    with ThreadPoolExecutor(options.jobs) as threads:
        list(threads.map(train_in_time, chosen))  # raises what a thread has raised


def result_file(run: Run) -> Path:
    """Return the file of a run's numbers."""
    return RESULTS / f"{run.name}.json"


def train(run: Run, *, keep: bool = False) -> Path:
    """Train a run, and the models that it starts from if they do not exist yet; keep its numbers.

    Returns:
        The run's folder, which is deleted unless `keep` is true.
    """
    sft = train_stage(f"sft-{run.seed}", "sft", run.seed, {})
    settings = {
        "reward.model": sft,
        "reward.epochs": 20,  # at most: reward.max_steps of the recipe ends larger ones earlier
        "data.datasets": describe_pairs(run.pairs),
    }
    reward = train_stage(f"reward-{run.seed}-{run.pairs}", "reward", run.seed, settings)
    # Another seed draws other pairs.
    judge = train_stage(f"judge-{run.seed}-{run.pairs}", "reward", run.seed + _JUDGE_SEED, settings)
    models = {"ppo.actor": sft, "ppo.judge": judge}
    if run.settings.get("ppo.reward_weight") != 0:
        models["ppo.reward_model"] = reward
    name = f"ppo-{run.name}"
    shutil.rmtree(WORK / name, ignore_errors=True)  # kept by an earlier call
    started = time.time()
    train_stage(name, "ppo", run.seed, run.keys | models)
    RESULTS.mkdir(exist_ok=True)
    partial = result_file(run).with_suffix(".partial")
    partial.write_text(json.dumps(read_numbers(run, WORK / name, time.time() - started), indent=None) + "\n")
    partial.rename(result_file(run))
    if not keep:
        shutil.rmtree(WORK / name)
    return WORK / name


def describe_pairs(count: int) -> str:
    """Return the setting of a source of `count` pairs for training."""
    return f"{{path: world, limit: {count * 20 // 19}, stages: [reward]}}"  # a twentieth is held out


def train_stage(name: str, stage: str, seed: int, settings: dict[str, Any]) -> Path:
    """Train one stage, unless its folder is complete, and return its model."""
    folder = WORK / name
    keys = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "rlhf", stage, "--output", str(folder), "--seed", str(seed), "--overwrite"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with _locks[name]:
        if not (folder / stage / "stage.json").is_file():
            done = subprocess.run(
                [*command, "--accelerator", "cpu", "--precision", "fp32", "--trust", *keys],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                sys.exit(f"{name}: {done.stderr.strip()}")
    return folder / stage / "model"


def read_numbers(run: Run, folder: Path, seconds: float) -> dict[str, Any]:
    """Return what is kept of a run: its numbers, and of held-out rows scores, lengths and the rule's judgements."""
    from rlhf.diagnosis.records import read_run

    (stage,) = read_run(folder).stages
    held_out = {name: curve for name, curve in stage.curves.items() if name.startswith("heldout_")}
    judged = [[row["judge"] for row in rows] for _, rows in sorted(stage.heldout.items())]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    return {
        "name": run.name,
        "group": run.group,
        "seed": run.seed,
        "pairs": run.pairs,
        "settings": {key: str(value) for key, value in run.settings.items()},
        "commit": commit.strip(),
        "seconds": round(seconds),
        "steps": next(iter(held_out.values())).steps,
        "heldout": {name: [_shorten(value) for value in curve.values] for name, curve in held_out.items()}
        | {"heldout_judge_fall": [_shorten(value) for value in measure_falls(judged)]},
        "training": {
            name: [_shorten(value) for value in stage.curve(name).values] for name in TRAINING if stage.curve(name)
        },
        "approved": ["".join("01"[row["approved"]] for row in rows) for rows in stage.heldout.values()],
        "rows": {
            str(step): {key: [_shorten(row[key]) for row in stage.heldout[step]] for key in ("reward", "tokens")}
            for step in (min(stage.heldout), max(stage.heldout))
        },
    }


def measure_falls(judged: Sequence[Sequence[float]]) -> list[float]:
    """Return for each evaluation the fall of the judge's scores since the best one so far, in standard errors.

    As in `ppo.stop`, the first evaluation, before training, does not count.
    """
    falls = [0.0]
    for now, scores in enumerate(judged[1:], 1):
        falls.append(measure_fall(max(judged[1 : now + 1], key=fmean), scores))
    return falls


def _shorten(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
