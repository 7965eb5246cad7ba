"""One PPO step (rollout, scoring, training): ours against trl's PPOTrainer in bf16 weights and in bf16 autocast.

    python ci/bench/ppo_step.py                                      135M, batch 16, 16 + 32 tokens
    python ci/bench/ppo_step.py --prompt 128 --completion 128 --apart
    python ci/bench/ppo_step.py --accelerator cuda --shape llama-3.2-1b

A process for each side, all with the same model (random weights), prompts, batch, lengths and threads, takes turns on
the whole machine. bf16-autocast is TRL's own default, and the one with float32 masters as ours: memory is compared with
it. With longer rows the processes need much memory: `--apart` has no two of them at once. Make TRL's environment first
with `setup_trl.sh`.
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
    OURS: "bf16 weights and gradients, float32 master weights and optimizer states; all else as it is by default",
    WEIGHTS: "bf16 weights, gradients and optimizer states, no autocast; "
    "no stop token, no sample completions, no reports, no checkpoints",
    AUTOCAST: "float32 trained weights under bf16 autocast, bf16 frozen models; otherwise the same",
}
# How many times as fast as each, by prompt and completion.
TARGETS = {(16, 32): {WEIGHTS: 1.8, AUTOCAST: 4.0}, (128, 128): {WEIGHTS: 2.0, AUTOCAST: 4.0}}
MEMORY = 0.8
SIDES = {"weights": WEIGHTS, "autocast": AUTOCAST}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_arguments(parser)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt (default: 16)")
    parser.add_argument("--completion", type=int, default=32, help="tokens of a completion (default: 32)")
    parser.add_argument("--batch", type=int, default=16, help="rows of a step (default: 16)")
    parser.add_argument("--shape", default=SHAPE, help=f"a name in rlhf/models/known.yaml (default: {SHAPE})")
    parser.add_argument("--against", nargs="+", choices=tuple(SIDES), default=list(SIDES), help="TRL's (both, at once)")
    given = parser.parse_args()
    turns.need_trl()

    size = f"{given.prompt}+{given.completion}"
    shape = "" if given.shape == SHAPE else f"-{given.shape}"
    batch = "" if given.batch == 16 else f"-x{given.batch}"
    against = "" if given.against == list(SIDES) else f"-{'-'.join(given.against)}"
    names = [OURS, *(SIDES[each] for each in given.against)]
    what = f"one PPO step of {given.shape} (random weights), batch {given.batch}, {size} tokens"
    settings = {"batch": given.batch, **{key: SETTINGS[key] for key in ("all", *names)}}
    measured = turns.Turns(f"ppo_step-{size}{shape}{batch}{against}", what, settings, given)
    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder) / "model", given.shape)
        file = turns.write(workload(model, given), Path(folder))
        commands = {OURS: turns.ours(file)}
        commands |= {f"trl {each}": turns.trl(file, each) for each in ("bf16-weights", "bf16-autocast")}
        measured.measure(
            {name: partial(turns.start, commands[name], name, Path(folder), given.accelerator) for name in names}
        )
        flops = ppo_flops(Shape.of(model), Work(given.batch, given.prompt, given.completion))
    sides, fastest = measured.sides(), speeds(measured.limits)["flops_per_second"]
    arithmetic = {"flops": flops, "seconds_at_the_limit": round(sum(flops.values()) / fastest, 3)}
    measured.finish(rows(sides, given), arithmetic=arithmetic)
    for name, side in sides.items():
        phases = [f"{key[7:]} {value:.2f}" for key, value in side.items() if key.startswith("median_")]
        print(f"{name}: {', '.join(phases)}; peak {_peak(side):.2f} GiB")
    print(
        f"{sum(flops.values()) / 1e12:.2f} TFLOP a step: {arithmetic['seconds_at_the_limit']} s at {fastest:.3g} FLOP/s"
    )


def workload(model: Path, given: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoConfig

    words, draw = AutoConfig.from_pretrained(model).vocab_size, random.Random(0)
    return {
        "stage": "ppo",
        "accelerator": given.accelerator,
        "model": str(model),
        "batch_size": given.batch,
        "prompt_tokens": given.prompt,
        "completion_tokens": given.completion,
        "prompts": [[draw.randrange(16, words) for _ in range(given.prompt)] for _ in range(16 * given.batch)],
    }


def rows(sides: dict[str, Any], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds against each of TRL's sides, and memory against the one of equal numerics."""
    what = f"PPO step, {given.shape}, {given.batch} x ({given.prompt} + {given.completion})"
    of_issue = given.shape == SHAPE and given.batch == 16 and given.accelerator == "cpu"
    targets = TARGETS.get((given.prompt, given.completion), {}) if of_issue else {}
    mine = sides[OURS]
    found = [
        report.row(
            f"{what}, against {name}",
            ours=mine["median_seconds"],
            baseline=side["median_seconds"],
            unit="s",
            target=targets.get(name),
        )
        for name, side in sides.items()
        if name != OURS
    ]
    if AUTOCAST in sides:
        sizes = {"ours": _peak(mine), "baseline": _peak(sides[AUTOCAST])}
        found.append(report.row(f"{what}, peak memory", **sizes, unit="GiB", goal="at most", target=MEMORY))
    return found


def _peak(side: dict[str, Any]) -> float:
    """GiB: of the device where there is one, else of the process."""
    return float(side.get("device_gib", side["peak_gib"]))


if __name__ == "__main__":
    main()
