"""Measure a step of the AdamW that updates offloaded weights on the host, against DeepSpeed's CPU Adam.

    python ci/bench/host_adamw.py                        135 million weights in one tensor, as ZeRO 1 to 3 keeps a share
    python ci/bench/host_adamw.py --weights 1000000000   more of them; a side needs 16 bytes per weight

Ours is the cpu backend's `adamw_cpu_offload`. The baseline is DeepSpeedCPUAdam, which DeepSpeed compiles on first use
with a C++ compiler and ninja. Both update float32 weights; `gigabytes_per_second` counts each weight, gradient and
moment that is read and each weight and moment that is written: 28 bytes per weight.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import report  # noqa: E402
from channel import Channel, Worker  # noqa: E402
from machine import HERE, machine, results_file  # noqa: E402

SIDES = ("ours", "DeepSpeedCPUAdam")
BYTES_PER_WEIGHT = 4 * (4 + 3)
WARM_UP = 2
SETTINGS = {"lr": 1e-5, "betas": (0.9, 0.95), "weight_decay": 0.1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, default=135_000_000, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each side (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file (default: results/host_adamw-CHIP.json)")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_side(arguments.worker, arguments.weights)
        return
    command = [sys.executable, __file__, "--weights", str(arguments.weights), "--worker"]
    steps: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        workers = {
            side: Worker([*command, side], errors=Path(folder, f"{side}.log"), environment={"PYTHONPATH": str(ROOT)})
            for side in SIDES
        }
        for number in range(-WARM_UP, arguments.rounds):
            for side, worker in workers.items():
                reply = worker.step(record=False)
                if number >= 0:
                    steps[side].append(reply)
        for worker in workers.values():
            worker.stop()
    sides = {side: workers[side].ready | report.summarize(steps[side]) for side in SIDES}
    ours, baseline = (sides[side]["median_seconds"] for side in SIDES)
    name = f"AdamW on the host, {arguments.weights:,} weights, against DeepSpeedCPUAdam"
    rows = [report.row(name, ours=ours, baseline=baseline, unit="s")]
    file = arguments.output or results_file(HERE, "host_adamw")
    result = {"machine": machine(), "settings": {"weights": arguments.weights}, "sides": sides, "rows": rows}
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(report.table(rows), file, sep="\n")


def run_side(side: str, weights: int) -> None:
    """Take a step for each command."""
    channel = Channel()
    import torch

    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(weights))
    parameter.grad = torch.randn(weights)
    optimizer = _create(side, parameter)
    channel.reply(implementation=type(optimizer).__name__, threads=torch.get_num_threads())
    while channel.wait():
        start = time.perf_counter()
        optimizer.step()
        seconds = time.perf_counter() - start
        channel.reply(seconds=seconds, gigabytes_per_second=BYTES_PER_WEIGHT * weights / seconds / 1e9)


def _create(side: str, parameter: Any) -> Any:
    if side == "ours":
        import accelerators

        accelerator = accelerators.select("cpu", environ={}).create()
        return accelerator.kernels.get("adamw_cpu_offload", required=True)([parameter], **SETTINGS)
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam([parameter], **SETTINGS)


if __name__ == "__main__":
    main()
