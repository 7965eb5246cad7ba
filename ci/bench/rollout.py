"""Measure PPO's rollouts against transformers' generate() in its fastest setting, and against the machine's limit.

    python ci/bench/rollout.py                                              135M, batch 16, 16 + 32 tokens
    python ci/bench/rollout.py --prompt 128 --completion 128 --batch 64
    python ci/bench/rollout.py --prompt 128 --completion 1                  prefill: one token, drawn after the prompt
    python ci/bench/rollout.py --prompt 128 --batch 64 --copies 8           as GRPO draws: eight rows of each prompt
    python ci/bench/rollout.py --precision fp32                             float32 on both sides
    python ci/bench/rollout.py --compiled                                   also try torch.compile for generate()
    python ci/bench/rollout.py --accelerator cuda --shape llama-2-7b --prompt 256 --completion 256

Our time includes the switch from training to generation and back. generate() has weights of the same precision: bf16,
or fp32 where the processor does not multiply bf16. It has no logits processors and no end token. Each of its settings
is first timed on the whole workload; the fastest and ours then run in turns, one process at a time. The limit is the
least time that the machine needs for the rollout's bytes and operations: machine.py measures its bytes/s and FLOP/s,
and arithmetic.py counts the bytes and operations. The results are written to ci/bench/results (of a device, to
ci/results).
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
from arithmetic import Shape, Work, rollout_limit, speeds
from channel import Worker
from machine import HERE
from random_models import add_shape, make

SHAPE = "smollm2-135m"
OURS, GENERATE = "ours", "generate()"
SIZES = ((16, 32), (128, 128))
# Targets: the speedup over generate(), and the share of the machine's limit: of a rollout, by its rows; of a prefill.
SPEED, SHARES, PREFILL_SHARE = 3.0, {16: 0.75, 64: 0.6}, 0.6
SPEED_ON_GPU, SHARE_ON_GPU = 7.1, 0.6
UNCOMPILED = "torch.compile was not tried: generate() does not compile on a CPU by default; --compiled tries it"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_arguments(parser, warmup=1)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt (default: 16)")
    parser.add_argument("--completion", type=int, default=32, help="tokens of a completion (default: 32)")
    parser.add_argument("--batch", type=int, default=16, help="rows of a rollout (default: 16)")
    parser.add_argument("--copies", type=int, default=1, help="rows of each prompt (default: 1)")
    add_shape(parser, SHAPE)
    parser.add_argument("--compiled", action="store_true", help="try torch.compile on a CPU too (takes minutes)")
    turns.add_precision(parser)
    arguments = parser.parse_args()
    turns.choose_precision(arguments)

    size = f"{arguments.prompt}+{arguments.completion}-x{arguments.batch}"
    size += f"-copies{arguments.copies}" if arguments.copies > 1 else ""
    shape = "" if arguments.shape == SHAPE else f"-{arguments.shape}"
    shape += turns.mark_precision(arguments, "-")
    tokens = f"{arguments.prompt} + {arguments.completion} tokens"
    what = f"rollout of {arguments.shape} (random weights), batch {arguments.batch}, {tokens}"
    settings = {
        "all": f"{arguments.precision} weights; sampling at temperature 1 from the whole vocabulary",
        OURS: "PPO.generate: the switch from training and back, and the decoder with its defaults",
        GENERATE: "no processors, no end token, use_cache; the fastest of the settings tried",
        "compiled": "tried" if arguments.compiled or arguments.accelerator != "cpu" else UNCOMPILED,
    }
    measured = turns.Turns(f"rollout-{size}{shape}", what, settings, arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder) / "model", arguments.shape)
        sizes = Shape.of(model)
        work = workload(model, sizes, arguments)

        def start(name: str) -> Worker:
            tried = measured.facts.get(GENERATE, {}).get("tried", {})  # by the worker of an earlier block
            file = turns.write(work | {"compiled": arguments.compiled, "tried": tried}, Path(folder))
            generate = [sys.executable, str(HERE / "generate_worker.py"), str(file)]
            command = generate if name == GENERATE else turns.ours_command(file)
            return turns.start_worker(command, name, Path(folder), arguments.accelerator)

        measured.measure({name: partial(start, name) for name in (GENERATE, OURS)})
    speed = speeds(measured.best_limits(), arguments.precision)
    size_of_work = Work(arguments.batch, arguments.prompt, arguments.completion)
    limit = rollout_limit(sizes, size_of_work, **speed, precision=arguments.precision)
    measured.finish(rows(measured.sides(), limit["seconds"], arguments), limit=limit | speed)
    print(explain_limit(limit, measured.facts[GENERATE], speed))


def workload(model: Path, shape: Shape, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the work of both sides: the model, the sizes, and prompts of random tokens."""
    from transformers import AutoConfig

    vocabulary, generator = AutoConfig.from_pretrained(model).vocab_size, random.Random(0)
    return {
        "stage": "rollout",
        "accelerator": arguments.accelerator,
        "precision": arguments.precision,
        "model": str(model),
        "parameters": shape.body + shape.vocabulary,
        "batch_size": arguments.batch,
        "prompt_tokens": arguments.prompt,
        "completion_tokens": arguments.completion,
        "copies": arguments.copies,
        "prompts": [
            [generator.randrange(16, vocabulary) for _ in range(arguments.prompt)] for _ in range(arguments.batch)
        ],
    }


def rows(sides: dict[str, Any], limit: float, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows: time against generate(), and against the machine's limit."""
    what = f"rollout, {arguments.shape}, {arguments.batch} x ({arguments.prompt} + {arguments.completion})"
    what += f", {arguments.copies} of each prompt" if arguments.copies > 1 else ""
    what += turns.mark_precision(arguments, ", ")
    speed, share = targets(arguments)
    ours, baseline = (sides[name]["median_seconds"] for name in (OURS, GENERATE))
    against = report.row(f"{what}, against generate()", ours=ours, baseline=baseline, unit="s", target=speed)
    if arguments.copies > 1:  # the limit is for prompts that are all read
        return [against]
    return [
        against,
        report.row(f"{what}, share of the machine's limit", ours=ours, baseline=limit, unit="s", target=share),
    ]


def targets(arguments: argparse.Namespace) -> tuple[float | None, float | None]:
    """Return the targets for the speedup over generate() and for the share of the limit; None if there is none."""
    if arguments.accelerator != "cpu":
        return (SPEED_ON_GPU, SHARE_ON_GPU) if arguments.shape == "llama-2-7b" else (None, None)
    if arguments.shape != SHAPE or arguments.copies > 1 or arguments.batch not in SHARES:
        return None, None
    if arguments.completion == 1:
        return None, PREFILL_SHARE
    return (SPEED, SHARES[arguments.batch]) if (arguments.prompt, arguments.completion) in SIZES else (None, None)


def explain_limit(limit: dict[str, Any], facts: dict[str, Any], speed: dict[str, float]) -> str:
    """Return lines on the arithmetic of the limit and on the settings of generate() that were tried."""
    prefill, step, steps = limit["prefill"], limit["decode_step"], limit["decode_steps"]
    tried = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in facts["tried"].items())
    lines = [
        f"generate(): {facts['setting']}, the fastest of: {tried}",
        f"limit: {speed['bytes_per_second'] / 1e9:.1f} GB/s, {speed['flops_per_second'] / 1e12:.3f} TFLOP/s",
        f"  prefill: {prefill['bytes'] / 1e9:.3f} GB, {prefill['flops'] / 1e9:.1f} GFLOP: {prefill['seconds']} s",
    ]
    if steps["count"]:
        lines += [
            f"  decode step {step['which']}: {step['bytes'] / 1e9:.3f} GB: {1e3 * step['seconds_for_bytes']:.2f} ms; "
            f"{step['flops'] / 1e9:.2f} GFLOP: {1e3 * step['seconds_for_flops']:.2f} ms",
            f"  all {steps['count']} decode steps: {steps['seconds']} s; with the prefill: {limit['seconds']} s",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
