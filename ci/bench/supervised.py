"""Measure a step of SFT, reward training or DPO against a step of TRL's trainer.

    bash ci/bench/setup_trl.sh                           once: create TRL's environments
    python ci/bench/supervised.py                        SFT, 16 rows of 16 to 128 tokens, 4 micro-batches
    python ci/bench/supervised.py --stage reward         reward training on 16 pairs
    python ci/bench/supervised.py --stage dpo            DPO on 16 pairs
    python ci/bench/supervised.py --micro-batch 16       one micro-batch
    python ci/bench/supervised.py --prompt 128 --completion 128          all rows of this length
    python ci/bench/supervised.py --shape smollm2-360m
    python ci/bench/supervised.py --shape smollm2-1.7b --lora 8
    python ci/bench/supervised.py --precision fp32       float32 on both sides

Every step takes the same 16 rows (or pairs), the longest first on all sides, so that rows of one micro-batch have
little padding. The sides run in turns, one process at a time. The target is against TRL's default precision, float32
weights under bf16 autocast, which is the same as ours: bf16 products with float32 weights. TRL is also timed with
bf16 weights and no float32 copy. In fp32, the default where the processor does not multiply bf16, all is float32 on
both sides. For SFT, TRL has several exact modes of padding and loss, for DPO two of the reference: each is tried
first, and the fastest is measured. The results are written to ci/bench/results (of a device, to ci/results).
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
from arithmetic import Shape, forward_flops, speeds
from random_models import add_shape, make

SHAPE = "smollm2-135m"
OURS, WEIGHTS, AUTOCAST, FLOAT32 = "ours", "trl bf16-weights", "trl bf16-autocast", "trl fp32"
SIDES = {"bf16": (AUTOCAST, WEIGHTS), "fp32": (FLOAT32,)}  # of TRL; the first has the same numerics as ours
TARGET = 2.0
SHARE = 0.5  # target: products at the machine's rate, divided by our time
SHORTEST, LONGEST = 16, 128
# Packing is not tried: it changes the rows of a step, and may cut rows.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "sft": {
        "padded, chunked_nll": {},
        "padded, nll": {"loss_type": "nll"},
        "padding-free, chunked_nll": {"padding_free": True},
        "padding-free, nll": {"padding_free": True, "loss_type": "nll"},
    },
    "reward": {"padded": {}},
    "dpo": {"reference beside": {}, "reference precomputed": {"precompute_ref_log_probs": True}},
}
SETTING = (
    "constant learning rate 1e-5, AdamW, gradients clipped at norm 1, no dropout, no gradient checkpointing; "
    "the loss of SFT covers completions only, that of a pair compares its last tokens"
)
PRECISIONS = {
    "bf16": {
        OURS: "bf16 weights and gradients, float32 master weights and optimizer states; everything else at its default",
        AUTOCAST: "float32 weights under bf16 autocast (TRL's default precision), with its metrics computed eagerly",
        WEIGHTS: "bf16 weights, gradients and optimizer states; no master weights",
    },
    "fp32": {OURS: "float32 everywhere; everything else at its default", FLOAT32: "float32 everywhere"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_arguments(parser)
    parser.add_argument("--stage", choices=tuple(OPTIONS), default="sft", help="default: sft")
    parser.add_argument("--batch", type=int, default=16, help="rows or pairs per step (default: 16)")
    parser.add_argument("--micro-batch", type=int, default=4, help="rows or pairs per pass (default: 4)")
    parser.add_argument("--prompt", type=int, help="tokens of all prompts (default: a third of a row)")
    parser.add_argument(
        "--completion", type=int, help=f"tokens of all replies (default: rows of {SHORTEST} to {LONGEST})"
    )
    turns.add_lora(parser)
    turns.add_precision(parser)
    add_shape(parser, SHAPE)
    parser.add_argument("--layers", type=int, help="layers of the model, for a quick try (default: the shape's)")
    arguments = parser.parse_args()
    if (arguments.prompt is None) != (arguments.completion is None):
        sys.exit("--prompt and --completion: set both or neither")
    turns.choose_precision(arguments)
    turns.require_trl(arguments.stage)

    lengths = (arguments.prompt, arguments.completion) if arguments.prompt is not None else None
    shape = "" if arguments.shape == SHAPE else f"-{arguments.shape}"
    shape += f"-{arguments.layers}-layers" if arguments.layers else ""
    shape += f"-{arguments.prompt}+{arguments.completion}" if lengths else ""
    shape += f"-lora{arguments.lora}" if arguments.lora else ""
    shape += turns.mark_precision(arguments, "-")
    sizes = f"{arguments.batch} rows of {describe_lengths(lengths)}"
    what = f"one step of {arguments.stage}, {arguments.shape} (random weights), {sizes}"
    settings = {"all": SETTING, **PRECISIONS[arguments.precision], "micro_batch": arguments.micro_batch}
    settings |= {"batch": arguments.batch, "lora": arguments.lora}
    measured = turns.Turns(
        f"{arguments.stage}-{arguments.batch}by{arguments.micro_batch}{shape}", what, settings, arguments
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make(folder / "model", arguments.shape, layers=arguments.layers)
        work = workload(model, arguments, lengths) | {"lora": arguments.lora}
        file = turns.write(work, folder)
        sides = {OURS: partial(turns.start_worker, turns.ours_command(file), OURS, folder, arguments.accelerator)}
        for name in SIDES[arguments.precision]:
            sides[name] = measured.fastest_trl(name, arguments.stage, file, OPTIONS[arguments.stage])
        measured.measure(sides)
        flops = step_flops(Shape.of(model), work)
    measured_sides = measured.sides()
    results = rows(measured_sides, arguments, lengths)
    if arguments.accelerator == "cpu" and arguments.stage != "dpo" and not arguments.lora:
        seconds = flops / speeds(measured.best_limits(), arguments.precision)["flops_per_second"]
        ours = measured_sides[OURS]["median_seconds"]
        what = f"{describe_step(arguments, lengths)}, against its products alone"
        results.append(report.row(what, ours=ours, baseline=seconds, unit="s", target=SHARE))
    measured.finish(results, tokens=count_tokens(work))


def describe_lengths(lengths: tuple[int, int] | None) -> str:
    """Return the tokens of a row."""
    return f"{lengths[0]} + {lengths[1]} tokens" if lengths else f"{SHORTEST} to {LONGEST} tokens"


def workload(model: Path, arguments: argparse.Namespace, lengths: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return the work of all sides, with rows of random token ids, those with the longest reply first.

    A row is a prompt and a completion, or a prompt and two replies, of these `lengths`. Without them, the length of a
    prompt with its reply is drawn uniformly from `SHORTEST` to `LONGEST`; the prompt takes a third of it, or of the
    shorter one.
    """
    from transformers import AutoConfig

    vocabulary, generator = AutoConfig.from_pretrained(model).vocab_size, random.Random(0)

    def ids(count: int) -> list[int]:
        return [generator.randrange(16, vocabulary) for _ in range(count)]

    examples = []
    for _ in range(arguments.batch):
        replies = 1 if arguments.stage == "sft" else 2
        totals = [sum(lengths) if lengths else generator.randint(SHORTEST, LONGEST) for _ in range(replies)]
        prompt = lengths[0] if lengths else min(totals) // 3
        examples.append([ids(prompt), *(ids(total - prompt) for total in totals)])
    examples.sort(key=lambda row: len(row[0]) + max(map(len, row[1:])), reverse=True)
    return {
        "stage": arguments.stage,
        "accelerator": arguments.accelerator,
        "precision": arguments.precision,
        "model": str(model),
        "batch_size": arguments.batch,
        "micro_batch_size": arguments.micro_batch,
        "prompt_tokens": lengths[0] if lengths else LONGEST,
        "completion_tokens": lengths[1] if lengths else LONGEST,
        "learning_rate": 1e-5,
        "rows": examples,
    }


def count_tokens(work: dict[str, Any]) -> int:
    """Return the tokens of a step without padding; a pair's prompt counts twice, once per reply."""
    return sum(len(prompt) + len(reply) for prompt, *replies in work["rows"] for reply in replies)


def step_flops(shape: Shape, work: dict[str, Any]) -> int:
    """Return the operations of a step of SFT or reward training, three forward passes, without those of padding.

    The prompt of a pair counts once.
    """
    read = work["stage"] == "sft"  # a reward model has no output matrix
    forward = 0
    for prompt, *replies in work["rows"]:
        for reply in replies:
            forward += forward_flops(shape, 1, len(prompt) + len(reply), len(reply) if read else 0)
        forward -= (len(replies) - 1) * forward_flops(shape, 1, len(prompt), 0)
    return 3 * forward


def describe_step(arguments: argparse.Namespace, lengths: tuple[int, int] | None) -> str:
    """Return the stage, the model and the rows."""
    what = f"{arguments.stage}, {arguments.shape}, {arguments.batch} rows by {arguments.micro_batch}"
    what += f", {describe_lengths(lengths)}" if lengths else ""
    what += f", LoRA of rank {arguments.lora}" if arguments.lora else ""
    return what + turns.mark_precision(arguments, ", ")


def rows(sides: dict[str, Any], arguments: argparse.Namespace, lengths: tuple[int, int] | None) -> list[dict[str, Any]]:
    """Return the rows: time against each side of TRL, and memory against the one with the same numerics."""
    what = describe_step(arguments, lengths)
    others = SIDES[arguments.precision]
    same = others[0]
    has_target = (arguments.accelerator, arguments.batch, arguments.layers) == ("cpu", 16, None)
    results = [
        report.row(
            f"{what}, against {name}",
            ours=sides[OURS]["median_seconds"],
            baseline=sides[name]["median_seconds"],
            unit="s",
            target=TARGET if has_target and name == same else None,
        )
        for name in others
    ]
    sizes = {key: _peak(sides[name]) for key, name in (("ours", OURS), ("baseline", same))}
    return [*results, report.row(f"{what}, peak memory", **sizes, unit="GiB", goal="at most")]


def _peak(side: dict[str, Any]) -> float:
    """Return the peak memory in GiB: of the device if there is one, otherwise of the process."""
    return float(side.get("device_gib", side["peak_gib"]))


if __name__ == "__main__":
    main()
