"""Compare the time that `rlhf plan` predicts for a whole recipe with the time that the recipe takes.

    python ci/bench/plan_time.py                             the embedded example: three stages, about four minutes
    python ci/bench/plan_time.py --config recipe.yaml        another recipe
    python ci/bench/plan_time.py --set sft.max_steps=60 --set reward.max_steps=60 --set ppo.steps=10     a quick try

`rlhf profile` measures steps of each stage, `rlhf plan --measured` predicts, and then the recipe runs, with evaluations
and checkpoints in between. A stage is compared with `seconds` of its `stage.json`, the whole with the time of the
command. The exit code is 1 if a prediction is off by more than 15 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report
from machine import HERE, ROOT, machine, results_file

WITHIN = 0.15
STAGES = ("sft", "reward", "ppo")
SCHEDULE = ("sft.eval_every=200", "reward.eval_every=100", "ppo.eval_every=10", "ppo.checkpoint_every=10")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="recipe (default: the embedded example)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key; repeatable")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each stage (default: 20)")
    parser.add_argument("--output", type=Path, help="file for the results (default: in ci/bench/results)")
    arguments = parser.parse_args()
    recipe = ["--config", str(arguments.config)] if arguments.config else []
    settings = [*(() if arguments.config else SCHEDULE), *arguments.set]
    recipe += [word for setting in settings for word in ("--set", setting)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        stages = [word for stage in STAGES for word in ("--stage", stage)]
        trace = ["--trace", str(folder / "trace.json.gz"), "--output", str(folder / "absent")]
        profile = folder / "profile.json"
        profile.write_text(rlhf("profile", *recipe, *stages, "--steps", str(arguments.steps), "--json", *trace))
        plans = json.loads(rlhf("plan", *recipe, *stages, "--measured", str(profile), "--json"))
        start = time.perf_counter()
        rlhf(*recipe, "--output", str(folder / "run"))
        whole = time.perf_counter() - start
        summaries = {stage: json.loads((folder / "run" / stage / "stage.json").read_text()) for stage in STAGES}
        measured = json.loads(profile.read_text())
    predicted = {plan["stage"]: 3600 * plan["hours"] for plan in plans}
    rows = [compare(stage, predicted[stage], summaries[stage]["seconds"]) for stage in STAGES]
    start_seconds = 3600 * max(plan["start_hours"] for plan in plans)
    rows.append(compare("all stages", start_seconds + sum(predicted.values()), whole))
    print(report.table(rows))
    for entry in measured:
        del entry["operators"]
    facts: dict[str, Any] = {"machine": machine(), "settings": settings, "profiles": measured, "rows": rows}
    output = arguments.output or results_file(HERE, "plan_time")
    output.write_text(json.dumps(facts, indent=2) + "\n")
    return 0 if all(row["met"] for row in rows) else 1


def rlhf(*arguments: str) -> str:
    """Run an rlhf command, and return its standard output; exit with its errors if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "rlhf", *arguments]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if completed.returncode:
        sys.exit(f"rlhf {arguments[0]} failed with exit code {completed.returncode}:\n{completed.stderr[-4000:]}")
    return completed.stdout


def compare(what: str, predicted: float, actual: float) -> dict[str, Any]:
    """Return the row of a prediction, which is met if it is neither too long nor too short."""
    name = f"time of {what} that rlhf plan predicts, against the actual (within {100 * WITHIN:.0f} %)"
    row = report.row(name, ours=predicted, baseline=actual, unit="s", goal="at most")
    return row | {"met": abs(predicted / actual - 1) <= WITHIN}


if __name__ == "__main__":
    sys.exit(main())
