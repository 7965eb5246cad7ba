"""SFT and reward training: a step of ours against one of TRL's SFTTrainer or RewardTrainer.

    python ci/bench/supervised.py                        SFT, 16 rows of 16 to 128 tokens, 4 micro-batches
    python ci/bench/supervised.py --stage reward
    python ci/bench/supervised.py --micro-batch 16       one micro-batch

Each step takes the same 16 rows (pairs), each side in its order, so that all sides see the same tokens. TRL's default
has the same precision, bf16 products with float32 weights: float32 weights under bf16 autocast. Its bf16 weights,
without a float32 copy, are timed as well. Of TRL's exact ways to treat padding and loss, each is tried first, and the
fastest takes its turns. Make TRL's environment first with `setup_trl.sh`.
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
from random_models import make

SHAPE = "smollm2-135m"
OURS, WEIGHTS, AUTOCAST = "ours", "trl bf16-weights", "trl bf16-autocast"
PRECISIONS = {AUTOCAST: "bf16-autocast", WEIGHTS: "bf16-weights"}
TARGET = 1.3
SHORTEST, LONGEST = 16, 128
# Packing cuts rows or changes which are in a step; grouping by length changes that too.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "sft": {
        "padded, chunked_nll": {},
        "padded, nll": {"loss_type": "nll"},
        "padding-free, chunked_nll": {"padding_free": True},
    },
    "reward": {"padded": {}},
}
SETTINGS = {
    "all": "constant learning rate 1e-5, AdamW, gradients clipped at norm 1, no dropout, no gradient checkpointing; "
    "SFT learns the completions alone",
    OURS: "bf16 weights and gradients, float32 master weights and optimizer states; all else as it is by default",
    AUTOCAST: "float32 weights under bf16 autocast (TRL's default precision), eager metrics as it has them",
    WEIGHTS: "bf16 weights, gradients and optimizer states: no masters",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_arguments(parser)
    parser.add_argument("--stage", choices=("sft", "reward"), default="sft")
    parser.add_argument("--batch", type=int, default=16, help="rows, or pairs, of a step (default: 16)")
    parser.add_argument("--micro-batch", type=int, default=4, help="of a pass (default: 4)")
    parser.add_argument("--shape", default=SHAPE, help=f"a name in rlhf/models/known.yaml (default: {SHAPE})")
    given = parser.parse_args()
    turns.need_trl()

    shape = "" if given.shape == SHAPE else f"-{given.shape}"
    sizes = f"{given.batch} rows of {SHORTEST} to {LONGEST} tokens"
    what = f"one step of {given.stage}, {given.shape} (random weights), {sizes}"
    settings = {**SETTINGS, "micro_batch": given.micro_batch, "batch": given.batch}
    measured = turns.Turns(f"{given.stage}-{given.batch}by{given.micro_batch}{shape}", what, settings, given)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = make(place / "model", given.shape)
        work = workload(model, given)
        file = turns.write(work, place)
        sides = {OURS: partial(turns.start, turns.ours(file), OURS, place, given.accelerator)}
        for name, precision in PRECISIONS.items():
            options = OPTIONS[given.stage]
            best = measured.fastest(
                name,
                {
                    option: partial(seconds, turns.trl(file, precision, changes), name, place, given.accelerator)
                    for option, changes in options.items()
                },
            )
            command = turns.trl(file, precision, options[best])
            sides[name] = partial(turns.start, command, name, place, given.accelerator)
        measured.measure(sides)
    measured.finish(rows(measured.sides(), given), tokens=tokens(work))


def seconds(*side: Any) -> float:
    """Of a step of a side that is tried, after one that warms up."""
    worker = turns.start(*side)
    worker.step(record=False)
    worker.step(record=True)
    worker.stop()
    return worker.seconds[0]


def workload(model: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Rows of parts of token ids, their lengths together drawn evenly; a third of each is the prompt."""
    from transformers import AutoConfig

    words, draw = AutoConfig.from_pretrained(model).vocab_size, random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randrange(16, words) for _ in range(count)]

    made = []
    for _ in range(given.batch):
        lengths = [draw.randint(SHORTEST, LONGEST) for _ in range(1 if given.stage == "sft" else 2)]
        prompt = min(lengths) // 3
        made.append([ids(prompt), *(ids(length - prompt) for length in lengths)])
    return {
        "stage": given.stage,
        "accelerator": given.accelerator,
        "model": str(model),
        "batch_size": given.batch,
        "micro_batch_size": given.micro_batch,
        "prompt_tokens": LONGEST,
        "completion_tokens": LONGEST,
        "learning_rate": 1e-5,
        "rows": made,
    }


def tokens(work: dict[str, Any]) -> int:
    """Of a step, padding not counted; the prompt of a pair is in both of its rows."""
    return sum(len(prompt) + len(reply) for prompt, *replies in work["rows"] for reply in replies)


def rows(sides: dict[str, Any], given: argparse.Namespace) -> list[dict[str, Any]]:
    what = f"{given.stage}, {given.shape}, {given.batch} rows by {given.micro_batch}"
    judged = (given.shape, given.accelerator, given.batch) == (SHAPE, "cpu", 16)
    found = [
        report.row(
            f"{what}, against {name}",
            ours=sides[OURS]["median_seconds"],
            baseline=sides[name]["median_seconds"],
            unit="s",
            target=TARGET if judged and name == AUTOCAST else None,
        )
        for name in PRECISIONS
    ]
    sizes = {key: _peak(sides[name]) for key, name in (("ours", OURS), ("baseline", AUTOCAST))}
    return [*found, report.row(f"{what}, peak memory", **sizes, unit="GiB", goal="at most")]


def _peak(side: dict[str, Any]) -> float:
    """GiB: of the device where there is one, else of the process."""
    return float(side.get("device_gib", side["peak_gib"]))


if __name__ == "__main__":
    main()
