"""Measure the price of `ppo.generation_exact`: a PPO step with it against one without it, step by step in turns.

    python ci/bench/exact.py                            135M in fp32, batch 16, 16 + 32 tokens
    python ci/bench/exact.py --prompt 128 --completion 128
    python ci/bench/exact.py --layers 2 --warmup 1 --rounds 2 --output /tmp/exact.json     a quick try

Both sides are this code with the same model (random weights), prompts, batch and lengths. In each step of the exact
one, drawn and scored log-probabilities must be equal. The results are written to ci/bench/results.
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
from random_models import make

EXACT, DEFAULT = "exact", "default"
TARGET = 1.2
"""Time of the exact side, divided by that of the default."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_arguments(parser, apart=False)
    ppo_step.add_arguments(parser)
    turns.add_precision(parser, "fp32")
    arguments = parser.parse_args()

    name, what = ppo_step.describe("exact", arguments)
    what += ", exact against default"
    settings = {"batch": arguments.batch, "precision": arguments.precision, "layers": arguments.layers}
    measured = turns.Turns(name, what, settings, arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make(folder / "model", arguments.shape, layers=arguments.layers)
        starts = {}
        for name in (DEFAULT, EXACT):
            (folder / name).mkdir()
            work = ppo_step.workload(model, arguments)
            work |= {"precision": arguments.precision, "ppo": {"generation_exact": name == EXACT}}
            command = turns.ours_command(turns.write(work, folder / name))
            starts[name] = partial(turns.start_worker, command, name, folder / name, arguments.accelerator)
        measured.measure(starts)
    sides = measured.sides()
    measured.finish(rows(sides, what))
    ppo_step.print_phases(sides)


def rows(sides: dict[str, Any], what: str) -> list[dict[str, Any]]:
    """Return the row of the time: ours is the exact side, the baseline the default."""
    seconds = {name: side["median_seconds"] for name, side in sides.items()}
    sides_seconds = {"ours": seconds[EXACT], "baseline": seconds[DEFAULT]}
    return [report.row(what, **sides_seconds, unit="s", goal="at most", target=TARGET)]


if __name__ == "__main__":
    main()
