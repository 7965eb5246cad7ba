"""Measure one PPO step (rollout, scoring, training) against trl's PPOTrainer with bf16 weights and with bf16 autocast.

    bash ci/bench/setup_trl.sh                                       once: create TRL's environments
    python ci/bench/ppo_step.py                                      135M, batch 16, 16 + 32 tokens
    python ci/bench/ppo_step.py --prompt 128 --completion 128 --apart
    python ci/bench/ppo_step.py --accelerator cuda --shape llama-3.2-1b

Each side is a process. All have the same model (random weights), prompts, batch, lengths and number of threads, and
they take turns on the whole machine. bf16 autocast is TRL's default and, like ours, has float32 master weights, so
peak memory is compared with it. Longer rows need much memory: with `--apart`, only one process runs at a time. The
results are written to ci/bench/results (of a device, to ci/results).
"""

from __future__ import annotations

import argparse
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import report
import turns
from arithmetic import Shape, Work, ppo_flops, speeds
from random_models import make

SHAPE = "smollm2-135m"
OURS, WEIGHTS, AUTOCAST = "ours", "trl bf16-weights", "trl bf16-autocast"
SETTINGS = {
    "all": "1 PPO epoch, 1 minibatch, 1 micro-batch; sampling at temperature 1 from the whole vocabulary; "
    "no gradient checkpointing; separate policy, reference, value and reward models; AdamW",
    OURS: "bf16 weights and gradients, float32 master weights and optimizer states; everything else at its default",
    WEIGHTS: "bf16 weights, gradients and optimizer states, no autocast; "
    "no stop token, no sample completions, no reports, no checkpoints",
    AUTOCAST: "float32 trained weights under bf16 autocast, bf16 frozen models; otherwise the same as bf16 weights",
}
# Target speedups over each side of TRL, by tokens of prompt and completion.
TARGETS = {(16, 32): {WEIGHTS: 1.8, AUTOCAST: 4.0}, (128, 128): {WEIGHTS: 2.0, AUTOCAST: 4.0}}
MEMORY = 0.8  # target: our peak memory divided by TRL's
SIDES = {"weights": WEIGHTS, "autocast": AUTOCAST}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_arguments(parser)
    add_arguments(parser)
    parser.add_argument(
        "--against", nargs="+", choices=tuple(SIDES), default=list(SIDES), help="sides of TRL (default: both)"
    )
    arguments = parser.parse_args()
    turns.require_trl("ppo")

    size = f"{arguments.prompt}+{arguments.completion}"
    shape = "" if arguments.shape == SHAPE else f"-{arguments.shape}"
    batch = "" if arguments.batch == 16 else f"-x{arguments.batch}"
    against = "" if arguments.against == list(SIDES) else f"-{'-'.join(arguments.against)}"
    names = [OURS, *(SIDES[side] for side in arguments.against)]
    what = f"one PPO step of {arguments.shape} (random weights), batch {arguments.batch}, {size} tokens"
    settings = {"batch": arguments.batch, **{key: SETTINGS[key] for key in ("all", *names)}}
    measured = turns.Turns(f"ppo_step-{size}{shape}{batch}{against}", what, settings, arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder) / "model", arguments.shape)
        file = turns.write(workload(model, arguments), Path(folder))
        commands = {OURS: turns.ours_command(file)}
        commands |= {
            f"trl {precision}": turns.trl_command("ppo", file, precision)
            for precision in ("bf16-weights", "bf16-autocast")
        }
        measured.measure(
            {
                name: partial(turns.start_worker, commands[name], name, Path(folder), arguments.accelerator)
                for name in names
            }
        )
        flops = ppo_flops(Shape.of(model), Work(arguments.batch, arguments.prompt, arguments.completion))
    sides, fastest = measured.sides(), speeds(measured.limits)["flops_per_second"]
    arithmetic = {"flops": flops, "seconds_at_the_limit": round(sum(flops.values()) / fastest, 3)}
    measured.finish(rows(sides, arguments), arithmetic=arithmetic)
    for name, side in sides.items():
        phases = [f"{key[7:]} {value:.2f}" for key, value in side.items() if key.startswith("median_")]
        print(f"{name}: {', '.join(phases)}; peak {_peak(side):.2f} GiB")
    limit = arithmetic["seconds_at_the_limit"]
    print(f"{sum(flops.values()) / 1e12:.2f} TFLOP per step: {limit} s at {fastest:.3g} FLOP/s")


def add_arguments(parser: argparse.ArgumentParser, *, completion: int = 32) -> None:
    """Add the options for the sizes of a PPO step; `completion` is the default length of completions."""
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt (default: 16)")
    parser.add_argument(
        "--completion", type=int, default=completion, help="tokens of a completion (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=16, help="rows of a step (default: 16)")
    parser.add_argument("--shape", default=SHAPE, help=f"a name in rlhf/models/known.yaml (default: {SHAPE})")


def add_variants(parser: argparse.ArgumentParser, *, precision: str) -> None:
    """Add the options for the precision, with this default, and for a model of fewer layers."""
    parser.add_argument("--precision", choices=("fp32", "bf16"), default=precision, help="default: %(default)s")
    parser.add_argument("--layers", type=int, help="layers of the model (default: the shape's)")


def describe(bench: str, arguments: argparse.Namespace) -> tuple[str, str]:
    """Return the name of a benchmark's results, and what its step is, for a parser with both kinds of options."""
    model = arguments.shape + (f"-{arguments.layers}-layers" if arguments.layers else "")
    sizes = f"{arguments.batch} x ({arguments.prompt} + {arguments.completion})"
    name = f"{bench}-{arguments.prompt}+{arguments.completion}-{model}-{arguments.precision}"
    return name, f"PPO step, {model}, {arguments.precision}, {sizes}"


def print_phases(sides: dict[str, dict[str, Any]]) -> None:
    """Print the median seconds of each side's phases."""
    for name, side in sides.items():
        phases = [f"{key[7:]} {value:.2f}" for key, value in side.items() if key.startswith("median_")]
        print(f"{name}: {', '.join(phases)}")


def workload(model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the work of all sides: the model, the sizes, and prompts of random tokens."""
    from transformers import AutoConfig

    vocabulary, generator = AutoConfig.from_pretrained(model).vocab_size, random.Random(0)
    return {
        "stage": "ppo",
        "accelerator": arguments.accelerator,
        "model": str(model),
        "batch_size": arguments.batch,
        "prompt_tokens": arguments.prompt,
        "completion_tokens": arguments.completion,
        "prompts": [
            [generator.randrange(16, vocabulary) for _ in range(arguments.prompt)] for _ in range(16 * arguments.batch)
        ],
    }


def rows(sides: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows: time against each side of TRL, and memory against the side with the same numerics."""
    what = f"PPO step, {arguments.shape}, {arguments.batch} x ({arguments.prompt} + {arguments.completion})"
    has_target = arguments.shape == SHAPE and arguments.batch == 16 and arguments.accelerator == "cpu"
    targets = TARGETS.get((arguments.prompt, arguments.completion), {}) if has_target else {}
    ours = sides[OURS]
    results = [
        report.row(
            f"{what}, against {name}",
            ours=ours["median_seconds"],
            baseline=side["median_seconds"],
            unit="s",
            target=targets.get(name),
        )
        for name, side in sides.items()
        if name != OURS
    ]
    if AUTOCAST in sides:
        sizes = {"ours": _peak(ours), "baseline": _peak(sides[AUTOCAST])}
        results.append(report.row(f"{what}, peak memory", **sizes, unit="GiB", goal="at most", target=MEMORY))
    return results


def _peak(side: dict[str, Any]) -> float:
    """Return the peak memory in GiB: of the device if there is one, otherwise of the process."""
    return float(side.get("device_gib", side["peak_gib"]))


if __name__ == "__main__":
    main()
