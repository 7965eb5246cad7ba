"""Measure PPO steps whose rollouts a server draws: one step ahead (`ppo.rollout.staleness: 1`), and in turn.

    python ci/bench/ahead.py                          135M with LoRA, batch 16, 16 + 64 tokens
    python ci/bench/ahead.py --completion 32
    python ci/bench/ahead.py --layers 2 --warmup 1 --rounds 2 --output /tmp/ahead.json     a quick try

Trainer and server are two processes of one thread each, on the same model (random weights). In turn, one of them always
waits for the other; ahead, a step takes as long as the slower of the two, and handing over the adapter. Each side runs
alone, in blocks, since a server draws ahead between two steps. The results are written to ci/bench/results.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ppo_step
import report
import turns
from channel import Worker
from machine import ROOT
from random_models import make

from rlhf.rollouts.client import RolloutServer, ServerError

IN_TURN, AHEAD = "in turn", "ahead"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_arguments(parser)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt (default: 16)")
    parser.add_argument("--completion", type=int, default=64, help="tokens of a completion (default: 64)")
    parser.add_argument("--batch", type=int, default=16, help="rows of a step (default: 16)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="default: bf16")
    parser.add_argument(
        "--shape", default=ppo_step.SHAPE, help="a name in rlhf/models/known.yaml (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, help="layers of the model (default: the shape's)")
    parser.set_defaults(apart=True)
    arguments = parser.parse_args()

    shape = f"{arguments.batch} x ({arguments.prompt} + {arguments.completion})"
    model_name = arguments.shape + (f"-{arguments.layers}-layers" if arguments.layers else "")
    what = f"PPO step, {model_name}, {arguments.precision}, LoRA, {shape}, rollouts ahead against in turn"
    name = f"ahead-{arguments.prompt}+{arguments.completion}-{model_name}-{arguments.precision}"
    settings = {"batch": arguments.batch, "precision": arguments.precision, "layers": arguments.layers}
    measured = turns.Turns(name, what, settings, arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make(folder / "model", arguments.shape, layers=arguments.layers)
        with serving(model, arguments, folder / "server.log") as address:

            def start(side: str) -> Worker:
                work = ppo_step.workload(model, arguments) | {"precision": arguments.precision, "lora": 8}
                work["rollout"] = {"where": [address], "correction": "tis", "staleness": int(side == AHEAD)}
                (folder / side).mkdir(exist_ok=True)
                command = turns.ours_command(turns.write(work, folder / side))
                environment = ONE_THREAD | {"PYTHONPATH": str(ROOT)}
                return Worker(command, errors=folder / side / "log", environment=environment)

            measured.measure({side: partial(start, side) for side in (IN_TURN, AHEAD)})
    sides = measured.sides()
    measured.finish([row(sides, what)])
    for side, facts in sides.items():
        phases = [f"{key[7:]} {value:.2f}" for key, value in facts.items() if key.startswith("median_")]
        print(f"{side}: {', '.join(phases)}")


@contextmanager
def serving(model: Path, arguments: argparse.Namespace, log: Path) -> Iterator[str]:
    """Run a rollout server of the model for the duration of the block, and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "rlhf", "serve", str(model), "--rollouts", "--port", str(port)]
    command += ["--accelerator", arguments.accelerator, "--precision", arguments.precision]
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        while not answers(address):
            if process.poll() is not None:
                sys.exit(f"the server has ended:\n{log.read_text()}")
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait()


def answers(address: str) -> bool:
    """Return whether a rollout server is ready at an address."""
    try:
        RolloutServer(address, 10).capabilities()
    except ServerError:
        return False
    return True


def row(sides: dict[str, Any], what: str) -> dict[str, Any]:
    """Return the row of the time: ours is the side that draws ahead, the baseline the one in turn."""
    seconds = {side: facts["median_seconds"] for side, facts in sides.items()}
    return report.row(what, ours=seconds[AHEAD], baseline=seconds[IN_TURN], unit="s")


if __name__ == "__main__":
    main()
