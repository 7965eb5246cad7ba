"""Measure the price of `ppo.generation_exact`: a PPO step with it against one without it, taken in turns.

    python ci/bench/exact.py                            135M in fp32, batch 16, 16 + 32 tokens
    python ci/bench/exact.py --prompt 128 --completion 128 --apart
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
    turns.add_arguments(parser)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt (default: 16)")
    parser.add_argument("--completion", type=int, default=32, help="tokens of a completion (default: 32)")
    parser.add_argument("--batch", type=int, default=16, help="rows of a step (default: 16)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="default: fp32")
    parser.add_argument(
        "--shape", default=ppo_step.SHAPE, help="a name in rlhf/models/known.yaml (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, help="layers of the model (default: the shape's)")
    arguments = parser.parse_args()

    prompt, completion = arguments.prompt, arguments.completion
    model_name = arguments.shape + (f"-{arguments.layers}-layers" if arguments.layers else "")
    shape = f"{arguments.batch} x ({prompt} + {completion})"
    what = f"PPO step, {model_name}, {arguments.precision}, {shape}, exact against default"
    name = f"exact-{prompt}+{completion}-{model_name}-{arguments.precision}"
    settings = {"batch": arguments.batch, "precision": arguments.precision, "layers": arguments.layers}
    measured = turns.Turns(name, what, settings, arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make(folder / "model", arguments.shape, layers=arguments.layers)
        starts = {}
        for name in (DEFAULT, EXACT):
            (folder / name).mkdir()
            work = ppo_step.workload(model, arguments)
            work |= {"precision": arguments.precision, "generation_exact": name == EXACT}
            command = turns.ours_command(turns.write(work, folder / name))
            starts[name] = partial(turns.start_worker, command, name, folder / name, arguments.accelerator)
        measured.measure(starts)
    sides = measured.sides()
    measured.finish(rows(sides, what))
    for name, side in sides.items():
        phases = [f"{key[7:]} {value:.2f}" for key, value in side.items() if key.startswith("median_")]
        print(f"{name}: {', '.join(phases)}")


def rows(sides: dict[str, Any], what: str) -> list[dict[str, Any]]:
    """Return the row of the time: ours is the exact side, the baseline the default."""
    seconds = {name: side["median_seconds"] for name, side in sides.items()}
    sides_seconds = {"ours": seconds[EXACT], "baseline": seconds[DEFAULT]}
    return [report.row(what, **sides_seconds, unit="s", goal="at most", target=TARGET)]


if __name__ == "__main__":
    main()
