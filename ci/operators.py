"""Record every operator that the stages use, for the level `numerics` of `rlhf accelerators certify`.

python ci/operators.py                    list the recorded operators with their sources
python ci/operators.py --write            record all families again, and write operators.json and tolerances.json
python ci/operators.py --tolerances       write tolerances.json alone
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlhf.config.schema import Stage  # noqa: E402

STAGES: tuple[Stage, ...] = ("sft", "reward", "ppo")
Source = tuple[str, tuple[Stage, ...], dict[str, Any]]
SHORT = {"batch_size": 4, "max_steps": 1, "eval_rows": 4}
KERNELS = {
    "adamw": "torch-foreach",
    "graph_capture": "none",
    "inference_weights": "none",
    "fused_layers": "none",
    "sampling": "none",
    "quantized_weights": "torch",
}
"""Plain implementations: those of backends are compared operation by operation."""

VARIED = "Llama 3"
VARIANTS: Mapping[str, tuple[tuple[Stage, ...], dict[str, Any]]] = {
    "dpo": (("sft", "reward", "dpo"), {}),
    "LoRA": (STAGES, {"lora": {"rank": 2}}),
    "8 bits": (("sft",), {"lora": {"rank": 2}, "engine": {"frozen": "int8"}}),
    "4 bits": (("sft",), {"lora": {"rank": 2}, "engine": {"frozen": "int4"}}),
    "ZeRO 3": (STAGES, {"engine": {"zero_stage": 3}}),
    "grpo": (STAGES, {"ppo": {"estimator": "grpo", "completions_per_prompt": 2}}),
    "sampling": (STAGES, {"ppo": {"sampling": {"temperature": 0.7, "top_k": 5, "top_p": 0.9}}}),
}
"""Other ways to train, recorded in bf16 with one family."""


def sources() -> dict[str, Source]:
    """Return the family, stages and settings of each source by name.

    One family of each kind goes through the three stages, in fp32 and in bf16. Of the others, fine-tuning in fp32 has
    all that is their own: forward and backward passes, and greedy completions with the decoder.
    """
    from tests.families.table import FAMILIES, OFTEN

    result: dict[str, Source] = {}
    for family in FAMILIES:
        stages: tuple[Stage, ...] = STAGES if family.name in OFTEN else ("sft",)
        for precision in ("fp32", "bf16") if family.name in OFTEN else ("fp32",):
            result[f"{family.name}, {precision}"] = (family.name, stages, {"precision": precision})
    for name, (varied, settings) in VARIANTS.items():
        result[f"{VARIED} with {name}, bf16"] = (VARIED, varied, settings | {"precision": "bf16"})
    return result


def write_rows(path: Path) -> None:
    """Write rows of prompt, response, chosen and rejected."""
    from tests.helpers import WORDS

    draw = random.Random(1)
    words = lambda most: " ".join(draw.choices(WORDS, k=draw.randint(1, most)))  # noqa: E731
    rows = [
        {"prompt": f"{words(8)} {number}", "response": words(8), "chosen": words(6), "rejected": f"no {words(6)}"}
        for number in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def backend() -> Iterator[Any]:
    """Yield the CPU's backend in a process group of one; it computes in bf16 too."""
    import accelerators
    from rlhf.engine import distributed
    from tests.helpers import emulate_bf16

    with distributed.start_process_group(accelerators.select("cpu", environ={})) as accelerator:
        emulate_bf16(accelerator)
        yield accelerator


@contextmanager
def plain_kernels(accelerator: Any, attention: str) -> Iterator[None]:
    """Choose plain implementations for a block."""
    try:
        for operation, implementation in (KERNELS | {"attention": attention}).items():
            accelerator.kernels.choose(operation, implementation)
        yield
    finally:
        for operation in (*KERNELS, "attention"):
            accelerator.kernels.choose(operation, "auto")


def record(name: str, accelerator: Any) -> dict[str, Any]:
    """Run the stages of one source, and return its calls by their lines."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from accelerators.testing.numerics.entries import Recorder
    from rlhf.config.schema import build_config
    from rlhf.runs.directory import RunDirectory
    from rlhf.trainers import pipeline, preflight
    from tests.families.table import BY_NAME
    from tests.helpers import build_tokenizer

    family, stages, settings = sources()[name]
    tokenizer = build_tokenizer()
    with tempfile.TemporaryDirectory() as temporary, plain_kernels(accelerator, BY_NAME[family].attention()):
        folder = Path(temporary)
        config = BY_NAME[family].configuration(
            vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=None, eos_token_id=1
        )
        torch.manual_seed(0)
        MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        write_rows(folder / "rows.jsonl")
        optimizer = {"learning_rate": 1e-3, "warmup": 0}
        values: dict[str, Any] = {
            "output": str(folder / "run"),
            "model": {"path": str(folder / "model")},
            "data": {
                "datasets": [{"path": str(folder / "rows.jsonl")}],
                "heldout_fraction": 0.2,
                "max_prompt_length": 16,
                "max_completion_length": 8,
            },
            "engine": {"zero_stage": 1, "zero_persistence_threshold": 0, "shapes": "static"},
            "ppo": {"batch_size": 4, "minibatch_size": 4, "ppo_epochs": 1, "steps": 1, "eval_rows": 4},
            **{stage: SHORT | {"optimizer": optimizer} for stage in ("sft", "reward", "dpo")},
        }
        values["ppo"] |= {"optimizer": optimizer, "critic_optimizer": optimizer}
        for key, value in settings.items():
            values[key] = values.get(key, {}) | value if isinstance(value, dict) else value
        run = build_config(values)
        directory = RunDirectory(run.output)
        findings = preflight.examine(run, stages, directory, accelerator)
        recorder = Recorder()
        with directory.open_for(run, stages=stages, data=findings.data), recorder:
            pipeline.run(run, accelerator, directory, stages)
    return recorder.calls


def record_apart(name: str) -> tuple[list[str], float]:
    """Return the lines of a source's calls, and the seconds that it took; in a new process."""
    start = time.monotonic()
    with backend() as accelerator:
        return [*record(name, accelerator)], time.monotonic() - start


def record_all(jobs: int) -> dict[str, int]:
    """Record all sources in some processes, and return the line of each call with its sources as bits."""
    lines: dict[str, int] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for number, (name, (calls, seconds)) in enumerate(
            zip(sources(), pool.map(record_apart, sources()), strict=True)
        ):
            print(f"{name}: {len(calls)} calls in {seconds:.0f} s", flush=True)
            for line in calls:
                lines[line] = lines.get(line, 0) | 1 << number
    return lines


def write_calls(lines: Mapping[str, int]) -> None:
    """Write the calls to keep, one a line."""
    from accelerators.testing.numerics import entries

    kept = entries.reduce(lines)
    calls = ",\n".join(f"[{bits},{line[1:-1]}]" for line, bits in sorted(kept.items()))
    head = {"versions": recorded_versions(), "sources": [*sources()]}
    entries.DATA.write_text(f'{json.dumps(head)[:-1]},\n"calls": [\n{calls}\n]}}\n')


def recorded_versions() -> dict[str, str]:
    """Return the versions that decide which operators a model calls."""
    return {package: version(package).partition("+")[0] for package in ("torch", "transformers", "deepspeed")}


def find_stale(name: str, calls: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return what a source calls and the list lacks, and what the list has of it and it does not call any more.

    Calls are compared by operator, dtypes, dimensions and order of strides: kinds of values depend on the numbers that
    a run draws.
    """
    from accelerators.testing.numerics import entries

    names, lines = entries.read_calls()
    bit = 1 << names.index(name)
    made = {call.shape_class() for call in calls.values()}
    listed = {line: entries.Call.decode(line).shape_class() for line in lines}
    own = {listed[line] for line, bits in lines.items() if bits & bit}
    return sorted(made - own, key=str), sorted(own - made, key=str)


def measure_call(line: str) -> tuple[str, str, float]:
    """Return the operator and the dtype of a call, and the largest error of torch on the CPU in all cases."""
    import torch

    from accelerators.testing.numerics import entries, replay

    call = entries.Call.decode(line)
    worst = 0.0
    for comparison in replay.compare_call(call, torch.device("cpu"), math.inf):
        if comparison.reason or comparison.units == math.inf:
            raise SystemExit(f"the CPU itself fails: {comparison.describe()}")
        worst = max(worst, comparison.units)
    return call.operator, call.dtype(), worst


def write_tolerances(jobs: int) -> None:
    """Measure the errors of torch on the CPU in each dtype of a device, and write the table of tolerances."""
    from accelerators.testing.numerics import entries, errors, replay

    start = time.monotonic()
    largest: dict[str, dict[str, float]] = {}
    granted = (replay.ALL_DTYPES, [*replay.SIXTEEN_BITS.values()])  # of devices with and without float64
    calls = [one for call in entries.iterate_calls() for dtypes in granted for one in replay.in_dtypes(call, dtypes)]
    lines = [*dict.fromkeys(call.encode() for call in calls)]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for number, (operator, dtype, units) in enumerate(pool.map(measure_call, lines, chunksize=20)):
            if number % 500 == 0:
                print(f"call {number} of {len(lines)}, {operator}", flush=True)
            row = largest.setdefault(operator, {})
            row[dtype] = max(row.get(dtype, 0.0), units)
    table = {
        operator: {dtype: errors.derive_factor(units, dtype) for dtype, units in sorted(row.items())}
        for operator, row in sorted(largest.items())
    }
    rows = ",\n".join(f"{json.dumps(operator)}: {json.dumps(row)}" for operator, row in table.items())
    errors.TABLE.write_text(f"{{\n{rows}\n}}\n")
    print(f"tolerances of {len(table)} operators from {len(lines)} calls in {time.monotonic() - start:.0f} s")


def print_calls() -> None:
    """Print the recorded operators, the number of calls of each, and its first source."""
    from accelerators.testing.numerics import entries

    names, lines = entries.read_calls()
    found: dict[str, list[int]] = {}
    for line, bits in lines.items():
        found.setdefault(entries.Call.decode(line).operator, []).append(bits)
    for operator, sets in sorted(found.items()):
        first = min((bits & -bits).bit_length() - 1 for bits in sets)
        print(f"{operator:60} {len(sets):4} {names[first]}")
    print(f"{len(found)} operators, {len(lines)} calls")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record all sources, and write both files")
    parser.add_argument("--tolerances", action="store_true", help="write tolerances.json for the recorded calls")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time; default: %(default)s")
    options = parser.parse_args()
    if options.write:
        write_calls(record_all(options.jobs))
    if options.write or options.tolerances:
        write_tolerances(options.jobs)
    else:
        print_calls()


if __name__ == "__main__":
    main()
