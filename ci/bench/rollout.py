"""Rollouts: ours, as PPO generates them, against transformers' generate() in its best setting, and against the machine.

    python ci/bench/rollout.py                                              135M, batch 16, 16 + 32 tokens
    python ci/bench/rollout.py --prompt 128 --completion 128 --batch 64
    python ci/bench/rollout.py --compiled                                   try torch.compile for generate() too
    python ci/bench/rollout.py --accelerator cuda --shape llama-2-7b --prompt 256 --completion 256

All that a rollout of PPO needs is in its time: on our side, the switch from training and back. generate() has bf16
weights, no logits processors and nothing to end at; each of its settings is tried on the whole workload, and the
fastest takes turns with ours. The limit is that of `arithmetic.py` at the bytes/s and FLOP/s that `machine.py` finds.
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
from machine import HERE
from random_models import make

SHAPE = "smollm2-135m"
OURS, GENERATE = "ours", "generate()"
SIZES = ((16, 32), (128, 128))
SPEED, ON_GPU, SHARE = 3.0, 7.1, 0.6
UNCOMPILED = "torch.compile was not tried for generate(): on a CPU it is not what generate() does; --compiled tries it"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_arguments(parser, warmup=1)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt (default: 16)")
    parser.add_argument("--completion", type=int, default=32, help="tokens of a completion (default: 32)")
    parser.add_argument("--batch", type=int, default=16, help="rows of a rollout (default: 16)")
    parser.add_argument("--shape", default=SHAPE, help=f"a name in rlhf/models/known.yaml (default: {SHAPE})")
    parser.add_argument("--compiled", action="store_true", help="try torch.compile on a CPU too (minutes)")
    given = parser.parse_args()

    size = f"{given.prompt}+{given.completion}-x{given.batch}"
    shape = "" if given.shape == SHAPE else f"-{given.shape}"
    what = f"rollout of {given.shape} (random weights), batch {given.batch}, {given.prompt} + {given.completion} tokens"
    settings = {
        "all": "bf16 weights; sampling at temperature 1 from the whole vocabulary",
        OURS: "PPO.generate: the switch from training and back, and the decoder as by default",
        GENERATE: "no processors, no end token, use_cache; the fastest of the settings that were tried",
        "compiled": "tried" if given.compiled or given.accelerator != "cpu" else UNCOMPILED,
    }
    measured = turns.Turns(f"rollout-{size}{shape}", what, settings, given)
    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder) / "model", given.shape)
        counted = Shape.of(model)
        work = workload(model, counted, given)
        tried = measured.facts.get(GENERATE, {}).get("tried", {})
        file = turns.write(work | {"compiled": given.compiled, "tried": tried}, Path(folder))
        generate = [sys.executable, str(HERE / "generate_worker.py"), str(file)]
        commands = {GENERATE: generate, OURS: turns.ours(file)}
        measured.measure(
            {
                name: partial(turns.start, command, name, Path(folder), given.accelerator)
                for name, command in commands.items()
            }
        )
    limit = rollout_limit(counted, Work(given.batch, given.prompt, given.completion), **speeds(measured.limits))
    measured.finish(rows(measured.sides(), limit["seconds"], given), limit=limit | speeds(measured.limits))
    print(explained(limit, measured.facts[GENERATE], speeds(measured.limits)))


def workload(model: Path, shape: Shape, given: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoConfig

    words, draw = AutoConfig.from_pretrained(model).vocab_size, random.Random(0)
    return {
        "stage": "rollout",
        "accelerator": given.accelerator,
        "model": str(model),
        "parameters": shape.body + shape.vocabulary,
        "batch_size": given.batch,
        "prompt_tokens": given.prompt,
        "completion_tokens": given.completion,
        "prompts": [[draw.randrange(16, words) for _ in range(given.prompt)] for _ in range(given.batch)],
    }


def rows(sides: dict[str, Any], limit: float, given: argparse.Namespace) -> list[dict[str, Any]]:
    what = f"rollout, {given.shape}, {given.batch} x ({given.prompt} + {given.completion})"
    on_cpu = given.accelerator == "cpu"
    of_issue = on_cpu and given.shape == SHAPE and given.batch in (16, 64) and (given.prompt, given.completion) in SIZES
    on_gpu = not on_cpu and given.shape == "llama-2-7b"
    target = SPEED if of_issue else ON_GPU if on_gpu else None
    ours, theirs = (sides[name]["median_seconds"] for name in (OURS, GENERATE))
    share = SHARE if of_issue or on_gpu else None
    return [
        report.row(f"{what}, against generate()", ours=ours, baseline=theirs, unit="s", target=target),
        report.row(f"{what}, share of the machine's limit", ours=ours, baseline=limit, unit="s", target=share),
    ]


def explained(limit: dict[str, Any], facts: dict[str, Any], speed: dict[str, float]) -> str:
    """The arithmetic of the limit, and how generate() was chosen."""
    prefill, step, steps = limit["prefill"], limit["decode_step"], limit["decode_steps"]
    tried = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in facts["tried"].items())
    return "\n".join(
        [
            f"generate(): {facts['setting']}, of: {tried}",
            f"limit: {speed['bytes_per_second'] / 1e9:.1f} GB/s, {speed['flops_per_second'] / 1e12:.3f} TFLOP/s",
            f"  prefill: {prefill['bytes'] / 1e9:.3f} GB, {prefill['flops'] / 1e9:.1f} GFLOP: {prefill['seconds']} s",
            f"  decode step, {step['which']}: {step['bytes'] / 1e9:.3f} GB: {1e3 * step['seconds_for_bytes']:.2f} ms; "
            f"{step['flops'] / 1e9:.2f} GFLOP: {1e3 * step['seconds_for_flops']:.2f} ms",
            f"  all {steps['count']} of them: {steps['seconds']} s; with the prefill {limit['seconds']} s",
        ]
    )


if __name__ == "__main__":
    main()
