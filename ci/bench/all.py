"""Every row that has a target, one after the other, and one table of what was found.

    python ci/bench/all.py                        about half an hour on two cores
    python ci/bench/all.py --seconds 500          stop after so long; the same call again goes on
    python ci/bench/all.py --only rollout 64      rows whose commands contain all of these words
    python ci/bench/all.py --accelerator cuda     the rows of a GPU

What was measured with the code as it is now is not measured again. Exit code 3: some rows are left for another call.
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
ROWS = (
    f"ppo_step.py {SHORT}",
    f"rollout.py {SHORT} --batch 16",
    f"rollout.py {SHORT} --batch 64",
    f"rollout.py {LONG} --batch 16",
    f"rollout.py {LONG} --batch 64 --rounds 3",
    "supervised.py --stage sft --micro-batch 4",
    "supervised.py --stage sft --micro-batch 16",
    "supervised.py --stage reward --micro-batch 4",
    "supervised.py --stage reward --micro-batch 16",
    # 19 GiB on TRL's side with autocast, and 13 on ours: together too much for a machine of 23.
    f"ppo_step.py {LONG} --warmup 1 --apart",
)
ON_GPU = (
    "rollout.py --shape llama-2-7b --prompt 256 --completion 256 --batch 16",
    f"ppo_step.py --shape llama-3.2-1b {LONG} --batch 16",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="stop after so long")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="rows whose commands contain all of them")
    parser.add_argument("--rounds", type=int, help="timed steps of each side, in place of each row's own number")
    parser.add_argument("--warmup", type=int, help="steps before those, in place of each row's own number")
    parser.add_argument("--accelerator", default="cpu", help="backend to run on (default: cpu)")
    given = parser.parse_args()
    begun = time.perf_counter()
    limits = machine.limits(given.accelerator)
    print(machine.shown(limits), flush=True)
    chosen = [
        row for row in (ROWS if given.accelerator == "cpu" else ON_GPU) if all(word in row for word in given.only)
    ]
    left: list[str] = []
    failed: list[str] = []
    rows: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "limits.json"
        kept.write_text(json.dumps(limits))
        for number, row in enumerate(chosen, 1):
            print(f"\n{number} of {len(chosen)}: {row}", flush=True)
            found = Path(folder) / f"{number}.json"
            command = [sys.executable, *row.split(), "--once", "--limits", str(kept), "--rows", str(found)]
            command[1] = str(machine.HERE / command[1])
            command += ["--accelerator", given.accelerator]
            for name in ("rounds", "warmup"):
                command += [f"--{name}", str(value)] if (value := getattr(given, name)) is not None else []
            if given.seconds:
                command += ["--seconds", str(max(given.seconds - (time.perf_counter() - begun), 0))]
            code = subprocess.run(command, check=False).returncode
            if code:
                (left if code == turns.UNFINISHED else failed).append(row)
            else:
                rows += json.loads(found.read_text())
    print(f"\n{report.table(rows)}\n{time.perf_counter() - begun:.0f} s")
    for name, listed in (("left for another call", left), ("failed", failed)):
        if listed:
            print(f"{name}: {'; '.join(listed)}")
    sys.exit(1 if failed else turns.UNFINISHED if left else 0)


if __name__ == "__main__":
    main()
