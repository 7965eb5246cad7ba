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
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import ppo_step
import report
import turns
from channel import Worker
from random_models import make
from rollout_server import ONE_THREAD, serving

IN_TURN, AHEAD = "in turn", "ahead"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_arguments(parser)
    ppo_step.add_arguments(parser, completion=64)
    turns.add_precision(parser)
    arguments = parser.parse_args()
    turns.choose_precision(arguments)

    name, what = ppo_step.describe("ahead", arguments)
    what += ", LoRA, rollouts ahead against in turn"
    settings = {"batch": arguments.batch, "precision": arguments.precision, "layers": arguments.layers}
    measured = turns.Turns(name, what, settings, arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make(folder / "model", arguments.shape, layers=arguments.layers)
        options = ["--accelerator", arguments.accelerator, "--precision", arguments.precision]
        with serving(model, options, folder / "server.log") as address:

            def start(side: str) -> Worker:
                work = ppo_step.workload(model, arguments) | {"precision": arguments.precision, "lora": 8}
                rollout = {"where": [address], "correction": "tis", "staleness": int(side == AHEAD)}
                work["ppo"] = {"rollout": rollout}
                (folder / side).mkdir(exist_ok=True)
                command = turns.ours_command(turns.write(work, folder / side))
                return Worker(command, errors=folder / side / "log", environment=ONE_THREAD)

            measured.measure({side: partial(start, side) for side in (IN_TURN, AHEAD)})
    sides = measured.sides()
    measured.finish([row(sides, what)])
    ppo_step.print_phases(sides)


def row(sides: dict[str, Any], what: str) -> dict[str, Any]:
    """Return the row of the time: ours is the side that draws ahead, the baseline the one in turn."""
    seconds = {side: facts["median_seconds"] for side, facts in sides.items()}
    return report.row(what, ours=seconds[AHEAD], baseline=seconds[IN_TURN], unit="s")


if __name__ == "__main__":
    main()
