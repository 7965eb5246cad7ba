"""Measure a step of PPO, RLOO or GRPO (rollout, scoring, update) against TRL's, with bf16 weights and with autocast.

    bash ci/bench/setup_trl.sh                                       once: create TRL's environments
    python ci/bench/ppo_step.py                                      135M, batch 16, 16 + 32 tokens
    python ci/bench/ppo_step.py --estimator grpo                     8 completions of each prompt; rloo: 4
    python ci/bench/ppo_step.py --prompt 128 --completion 128
    python ci/bench/ppo_step.py --prompt 512 --completion 512 --micro-batch 4
    python ci/bench/ppo_step.py --estimator grpo --shape smollm2-1.7b --lora 8
    python ci/bench/ppo_step.py --precision fp32                     float32 on both sides
    python ci/bench/ppo_step.py --accelerator cuda --shape llama-3.2-1b

Each side is a process. All have the same model (random weights), prompts, batch, lengths and number of threads. They
run in turns, one at a time. No token ends a completion: each step of each side must draw the same number of tokens.
bf16 autocast is TRL's default and, like ours, has float32 master weights, so peak memory is compared with it. In fp32,
the default where the processor does not multiply bf16, all is float32 on both sides. TRL can divide an update into
passes, and for RLOO and GRPO has several ways to generate: each is tried first, and the fastest is measured. The
results are written to ci/bench/results (of a device, to ci/results).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import report
import turns
from arithmetic import Shape, Work, ppo_flops, speeds
from random_models import add_shape, make

from rlhf.config.estimators import ESTIMATORS

SHAPE = "smollm2-135m"
OURS, WEIGHTS, AUTOCAST, FLOAT32 = "ours", "trl bf16-weights", "trl bf16-autocast", "trl fp32"
SETTINGS = {
    "all": "one update for each rollout; sampling at temperature 1 from the whole vocabulary; no end token; "
    "no gradient checkpointing; AdamW",
    "bf16": "bf16 weights and gradients, float32 master weights and optimizer states; everything else at its default",
    "fp32": "float32 everywhere; everything else at its default",
    WEIGHTS: "bf16 weights, gradients and optimizer states, no autocast; no sample completions, no reports, "
    "no checkpoints",
    AUTOCAST: "float32 trained weights under bf16 autocast, bf16 frozen models; otherwise the same as bf16 weights",
    FLOAT32: "float32 everywhere, with all models; no sample completions, no reports, no checkpoints",
}
MODELS = {
    "gae": "separate policy, reference, value and reward models of one size",
    "rloo": "separate policy, reference and reward models of one size; KL coefficient 0.1, in the reward",
    "grpo": "separate policy, reference and reward models of one size; KL coefficient 0.1, in the loss (k3); "
    "mean over each completion's tokens, rewards divided by the group's standard deviation",
}
TRAINERS = {"gae": "ppo", "rloo": "rloo", "grpo": "grpo"}
KL_COEF = 0.1  # any value but 0 makes both sides run the reference
# Settings of TRL's trainers. Several updates for one rollout would be another algorithm. Continuous batching takes ten
# times as long on a CPU, and half of the memory.
CACHES: dict[str, dict[str, Any]] = {"dynamic cache": {}, "static cache": {"cache_implementation": "static"}}
PASSES = (1, 4)  # in which an update is divided, unless --micro-batch says so for all sides
TARGET = 2.0  # times as fast as each side of TRL
AUTOCAST_TARGETS = {(16, 32): 4.0, (128, 128): 4.0}  # of PPO with the smallest model, by tokens
SCORING_SHARE, TRAINING_SHARE = 0.6, 0.5  # targets: products at the machine's rate, divided by our time
MEMORY = 0.8  # target: our peak memory divided by TRL's
SIDES = {"bf16": {"weights": WEIGHTS, "autocast": AUTOCAST}, "fp32": {"fp32": FLOAT32}}  # of TRL
SAME_NUMERICS = (AUTOCAST, FLOAT32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_arguments(parser)
    add_arguments(parser)
    parser.add_argument(
        "--estimator", choices=tuple(TRAINERS), default="gae", help="ppo.estimator; gae is PPO (default: gae)"
    )
    turns.add_lora(parser)
    turns.add_precision(parser)
    parser.add_argument(
        "--micro-batch",
        type=int,
        help="rows of a pass, when scoring and updating (default: all; for TRL the faster of all and a quarter)",
    )
    parser.add_argument(
        "--against", nargs="+", choices=tuple(SIDES["bf16"]), help="sides of TRL in bf16 (default: both)"
    )
    arguments = parser.parse_args()
    turns.choose_precision(arguments)
    if arguments.against and arguments.precision != "bf16":
        sys.exit("--against: in fp32 TRL has one side; leave the option out")
    trainer, group = TRAINERS[arguments.estimator], ESTIMATORS[arguments.estimator].group_size
    if arguments.batch % group:
        sys.exit(f"--batch: {arguments.estimator} draws {group} completions of each prompt, got {arguments.batch} rows")
    if arguments.lora and arguments.estimator == "gae":
        sys.exit("--lora: PPOTrainer adapts only the policy, not the critic; choose another --estimator")
    turns.require_trl(trainer)

    others = SIDES[arguments.precision]
    chosen = arguments.against or list(others)
    against = "" if chosen == list(others) else f"-{'-'.join(chosen)}"
    names = [OURS, *(others[side] for side in chosen)]
    settings = {
        "batch": arguments.batch,
        "micro_batch": arguments.micro_batch,
        "lora": arguments.lora,
        "models": MODELS[arguments.estimator],
    }
    settings |= {OURS: SETTINGS[arguments.precision], **{key: SETTINGS[key] for key in ("all", *names[1:])}}
    measured = turns.Turns(result_name(arguments) + against, describe_step(arguments), settings, arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make(folder / "model", arguments.shape, layers=arguments.layers)
        file = turns.write(workload(model, arguments) | method(arguments), folder)
        sides = {OURS: partial(turns.start_worker, turns.ours_command(file), OURS, folder, arguments.accelerator)}
        sides |= {name: measured.fastest_trl(name, trainer, file, ways(arguments)) for name in names[1:]}
        measured.measure(sides)
        shape = Shape.of(model)
    results = measured.sides()
    check_tokens(measured.steps, arguments.batch * arguments.completion)
    details: dict[str, Any] = {}
    shares: list[dict[str, Any]] = []
    if arguments.estimator == "gae":
        flops = ppo_flops(shape, Work(arguments.batch, arguments.prompt, arguments.completion))
        fastest = speeds(measured.best_limits(), arguments.precision)["flops_per_second"]
        limit = round(sum(flops.values()) / fastest, 3)
        details["arithmetic"] = {"flops": flops, "seconds_at_the_limit": limit}
        if arguments.accelerator == "cpu":
            shares = product_shares(results[OURS], flops, fastest, describe_step(arguments))
    measured.finish(rows(results, arguments) + shares, **details)
    print_phases(results)
    if details:
        print(f"{sum(flops.values()) / 1e12:.2f} TFLOP per step: {limit} s at {fastest:.3g} FLOP/s")


def product_shares(ours: dict[str, Any], flops: dict[str, int], fastest: float, what: str) -> list[dict[str, Any]]:
    """Return rows that compare our phases outside of rollouts with products at the machine's highest rate.

    With one update per rollout, scoring includes the forward passes of policy and critic that the update reuses. What
    is left of training also reads and writes the optimizers' states.
    """
    forward = flops["training"] / 3
    phases = {
        "scoring": (flops["scoring"] + forward, SCORING_SHARE),
        "training": (flops["training"] - forward, TRAINING_SHARE),
    }
    return [
        report.row(
            f"{what}, {phase} against its products alone",
            ours=ours[f"median_{phase}"],
            baseline=operations / fastest,
            unit="s",
            target=target,
        )
        for phase, (operations, target) in phases.items()
    ]


def ways(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the settings of TRL's trainer that are tried; PPOTrainer chooses its cache itself."""
    caches = {"": {}} if arguments.estimator == "gae" else {f"{cache}, ": options for cache, options in CACHES.items()}
    divisions = {
        f"{passes} {'pass' if passes == 1 else 'passes'}": {
            "per_device_train_batch_size": arguments.batch // passes,
            "gradient_accumulation_steps": passes,
        }
        for passes in PASSES
    }
    if arguments.micro_batch:
        divisions = {f"passes of {arguments.micro_batch} rows": {}}
    return {
        cache + division: cache_options | pass_options
        for cache, cache_options in caches.items()
        for division, pass_options in divisions.items()
    }


def method(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the part of the work that concerns the estimator, the rows of a pass, and LoRA."""
    work: dict[str, Any] = {"micro_batch_size": arguments.micro_batch, "lora": arguments.lora}
    if arguments.estimator != "gae":
        group = ESTIMATORS[arguments.estimator].group_size
        work["ppo"] = {"estimator": arguments.estimator, "completions_per_prompt": group, "kl_coef": KL_COEF}
    return work


def check_tokens(steps: dict[str, list[dict[str, float]]], expected: int) -> None:
    """Exit with a line about the first side that drew another number of tokens in a step."""
    for name, side in steps.items():
        for step in side:
            if step["tokens"] != expected:
                sys.exit(f"{name}: {step['tokens']:.0f} tokens were drawn in a step, expected {expected}")


def result_name(arguments: argparse.Namespace) -> str:
    """Return the name of the results, with the sizes that are not at their defaults."""
    model = name_model(arguments)
    parts = [f"{arguments.prompt}+{arguments.completion}"]
    parts += [] if model == SHAPE else [model]
    parts += [] if arguments.batch == 16 else [f"x{arguments.batch}"]
    parts += [f"by{arguments.micro_batch}"] if arguments.micro_batch else []
    parts += [f"lora{arguments.lora}"] if arguments.lora else []
    return "-".join([f"{TRAINERS[arguments.estimator]}_step", *parts]) + turns.mark_precision(arguments, "-")


def describe_step(arguments: argparse.Namespace) -> str:
    """Return what a step is, for the names of the rows."""
    sizes = f"{arguments.batch} x ({arguments.prompt} + {arguments.completion})"
    sizes += f" by {arguments.micro_batch}" if arguments.micro_batch else ""
    sizes += f", LoRA of rank {arguments.lora}" if arguments.lora else ""
    sizes += turns.mark_precision(arguments, ", ")
    return f"{TRAINERS[arguments.estimator].upper()} step, {name_model(arguments)}, {sizes}"


def name_model(arguments: argparse.Namespace) -> str:
    """Return the shape of the model, with its layers if they are not the shape's."""
    return f"{arguments.shape}-{arguments.layers}-layers" if arguments.layers else str(arguments.shape)


def add_arguments(parser: argparse.ArgumentParser, *, completion: int = 32) -> None:
    """Add the options for the sizes of a PPO step; `completion` is the default length of completions."""
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt (default: 16)")
    parser.add_argument(
        "--completion", type=int, default=completion, help="tokens of a completion (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=16, help="rows of a step (default: 16)")
    add_shape(parser, SHAPE)
    parser.add_argument("--layers", type=int, help="layers of the model, for a quick try (default: the shape's)")


def describe(bench: str, arguments: argparse.Namespace) -> tuple[str, str]:
    """Return the name of a benchmark's results, and what its step is, for a parser that has the precision."""
    model = name_model(arguments)
    sizes = f"{arguments.batch} x ({arguments.prompt} + {arguments.completion})"
    name = f"{bench}-{arguments.prompt}+{arguments.completion}-{model}-{arguments.precision}"
    return name, f"PPO step, {model}, {arguments.precision}, {sizes}"


def print_phases(sides: dict[str, dict[str, Any]]) -> None:
    """Print the median seconds of each side's phases, and its peak memory."""
    for name, side in sides.items():
        medians = {key.removeprefix("median_"): value for key, value in side.items() if key.startswith("median_")}
        phases = [f"{phase} {value:.2f}" for phase, value in medians.items() if phase != "tokens"]
        print(f"{name}: {', '.join(phases)}; peak {_peak(side):.2f} GiB")


def workload(model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the work of all sides: the model, the sizes, and prompts of random tokens."""
    from transformers import AutoConfig

    vocabulary, generator = AutoConfig.from_pretrained(model).vocab_size, random.Random(0)
    return {
        "stage": "ppo",
        "accelerator": arguments.accelerator,
        "precision": arguments.precision,
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
    what = describe_step(arguments)
    targets: dict[str, float] = {}
    if arguments.batch == 16 and arguments.accelerator == "cpu" and not arguments.layers:
        targets = dict.fromkeys((WEIGHTS, *SAME_NUMERICS), TARGET)
        if arguments.estimator == "gae" and arguments.shape == SHAPE:
            targets[AUTOCAST] = AUTOCAST_TARGETS.get((arguments.prompt, arguments.completion), TARGET)
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
    for same in (name for name in SAME_NUMERICS if name in sides):
        sizes = {"ours": _peak(ours), "baseline": _peak(sides[same])}
        most = MEMORY if targets and arguments.estimator == "gae" else None
        results.append(report.row(f"{what}, peak memory", **sizes, unit="GiB", goal="at most", target=most))
    return results


def _peak(side: dict[str, Any]) -> float:
    """Return the peak memory in GiB: of the device if there is one, otherwise of the process."""
    return float(side.get("device_gib", side["peak_gib"]))


if __name__ == "__main__":
    main()
