"""Run every comparison with TRL and generate(), one after the other, and print one table of the results.

    bash ci/bench/setup_trl.sh                    once: create TRL's environments
    python ci/bench/all.py                        all rows of a CPU
    python ci/bench/all.py --seconds 500          stop after 500 seconds; the same command resumes
    python ci/bench/all.py --only rollout 64      only rows whose commands contain all of these words
    python ci/bench/all.py --accelerator cuda     the rows of a GPU

Steps of PPO, RLOO, GRPO, SFT, reward training and DPO are compared with TRL's trainers; rollouts are compared with
transformers' generate() and with the limits of the machine. Rows that were measured with the current code are not
measured again. The exit code is 0 if all rows are complete, 1 if a row failed, and 3 if time ran out before some rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import report
import turns

SHORT, LONG = "--prompt 16 --completion 32", "--prompt 128 --completion 128"
LONGEST = "--prompt 512 --completion 512 --micro-batch 4 --rounds 2"
STAGES = ("sft", "reward", "dpo")
SHAPES = ("--shape smollm2-360m", "--shape smollm2-1.7b --lora 8")
ROWS = (
    f"ppo_step.py {SHORT}",
    "rollout.py --prompt 128 --completion 1 --batch 16",
    f"rollout.py {SHORT} --batch 16",
    f"rollout.py {SHORT} --batch 64",
    f"rollout.py {LONG} --batch 16",
    f"rollout.py {LONG} --batch 64 --rounds 3",
    "supervised.py --stage sft --micro-batch 4",
    "supervised.py --stage sft --micro-batch 16",
    "supervised.py --stage reward --micro-batch 4",
    "supervised.py --stage reward --micro-batch 16",
    "supervised.py --stage dpo --micro-batch 4",
    *(f"supervised.py --stage {stage} {LONG} --rounds 3" for stage in STAGES),
    *(f"supervised.py --stage {stage} {LONGEST}" for stage in STAGES),
    *(f"ppo_step.py --estimator {estimator} {SHORT}" for estimator in ("rloo", "grpo")),
    *(f"ppo_step.py --estimator {estimator} {LONG}" for estimator in ("rloo", "grpo")),
    f"ppo_step.py {LONG}",
    *(f"ppo_step.py --estimator {estimator} {LONGEST}" for estimator in ("rloo", "grpo", "gae")),
    *(f"supervised.py --stage {stage} {shape} --rounds 2" for shape in SHAPES for stage in STAGES),
    *(f"ppo_step.py --estimator grpo {shape} --rounds 2" for shape in SHAPES),
)
ON_GPU = (
    "rollout.py --shape llama-2-7b --prompt 256 --completion 256 --batch 16",
    f"ppo_step.py --shape llama-3.2-1b {LONG} --batch 16",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="stop after this time; the same command resumes")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="run only rows whose commands contain all words"
    )
    parser.add_argument("--rounds", type=int, help="timed steps per side (default: set per row)")
    parser.add_argument("--warmup", type=int, help="untimed steps before them (default: set per row)")
    parser.add_argument("--accelerator", default="cpu", help="backend to run on (default: cpu)")
    arguments = parser.parse_args()
    start = time.perf_counter()
    limits = machine.limits(arguments.accelerator)
    print(machine.describe_limits(limits), flush=True)
    all_rows = ROWS if arguments.accelerator == "cpu" else ON_GPU
    selected = [row for row in all_rows if all(word in row for word in arguments.only)]
    unfinished: list[str] = []
    failed: list[str] = []
    rows: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        limits_file = Path(folder) / "limits.json"
        limits_file.write_text(json.dumps(limits))
        for number, row in enumerate(selected, 1):
            print(f"\n{number} of {len(selected)}: {row}", flush=True)
            rows_file = Path(folder) / f"{number}.json"
            command = [sys.executable, *row.split(), "--once", "--limits", str(limits_file), "--rows", str(rows_file)]
            command[1] = str(machine.HERE / command[1])
            command += ["--accelerator", arguments.accelerator]
            for name in ("rounds", "warmup"):
                command += [f"--{name}", str(value)] if (value := getattr(arguments, name)) is not None else []
            if arguments.seconds:
                command += ["--seconds", str(max(arguments.seconds - (time.perf_counter() - start), 0))]
            code = subprocess.run(command, check=False).returncode
            if code:
                (unfinished if code == turns.UNFINISHED else failed).append(row)
            else:
                rows += json.loads(rows_file.read_text())
    print(f"\n{report.table(rows)}\n{time.perf_counter() - start:.0f} s")
    for label, commands in (("unfinished (the same command resumes)", unfinished), ("failed", failed)):
        if commands:
            print(f"{label}: {'; '.join(commands)}")
    sys.exit(1 if failed else turns.UNFINISHED if unfinished else 0)


if __name__ == "__main__":
    main()
