"""Record the golden numbers of level `learning`: the truth of each stage in float64, and bands from seeds.

    python ci/golden.py --write                 # from zero; writes rlhf/certify/golden/learning.safetensors
    python ci/golden.py --write --folder DIR    # continue what an interrupted recording left in DIR
    python ci/golden.py                         # writes nothing

Each stage takes its steps on the CPU, with PyTorch's own operators: once in float64; then in float32 and bfloat16 from
each seed, which perturbs the operators of every tenth step by one rounding each. PPO's completions are those of the run
in float64. At the end, each seed is compared with the bands of the others: the false alarms. The CPU
does not train in fp16 (DeepSpeed), so fp16 has no golden numbers.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

ROOT = Path(__file__).resolve().parents[1]
SEEDS, CHUNK = 10, 5
"""Seeds of each stage and precision, and of PPO with its own draws; seeds of a stage that one process records."""

Chosen = dict[str, list[str]]
"""The precisions of each stage that are recorded."""

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
KERNELS = {"fused_layers": "none", "inference_weights": "none", "sampling": "none", "graph_capture": "none"}
PLAIN = {"engine": {"shapes": "static", "kernels": KERNELS}}
"""Without the CPU's own kernels, whose operators could not be perturbed, nor be computed in float64."""


class Float64(TorchDispatchMode):
    """Compute in float64 what asks for float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        args, kwargs = tree_map(lambda item: torch.float64 if item is torch.float32 else item, (args, kwargs or {}))
        return func(*args, **kwargs)


@contextmanager
def open_side(stage: str, precision: str, folder: Path) -> Iterator[Any]:
    """Open a stage before its first step, in a precision that the CPU may refuse to users because it is slow."""
    from accelerators import Precision
    from accelerators.backends.cpu.backend import CPU
    from rlhf.certify.fixed_state import open_stage, write_state
    from rlhf.reporting.console import console

    console.quiet = True
    CPU.precision = lambda self, wish="auto": Precision(PRECISIONS[precision], precision, "recorded")  # type: ignore
    write_state(folder)
    with open_stage("cpu", folder, stage, precision, PLAIN) as side:  # type: ignore[arg-type]
        yield side


def record_truth(stage: str, folder: Path) -> Any:
    """Return the trace of a stage in float64."""
    from rlhf.certify.fixed_state import STEPS
    from rlhf.certify.trace import trace_steps

    with open_side(stage, "fp32", folder) as side:
        for model in side.models:
            model.double()
        torch.set_default_dtype(torch.float64)
        with Float64():
            return trace_steps(side, STEPS)


def record_seeds(stage: str, precision: str, first: int, folder: Path, truth: Any) -> list[Any]:
    """Return the traces of the seeds from `first`."""
    from rlhf.certify.fixed_state import STEPS
    from rlhf.certify.trace import trace_steps

    traces = []
    with open_side(stage, precision, folder) as side:
        side.save_state(0, str(folder / "start"))
        for seed in range(first, first + CHUNK):
            side.load_state(str(folder / "start"))
            traces.append(trace_steps(side, STEPS, truth.ids, perturbed=seed))
    return traces


def run_part(part: str, folder: Path) -> None:
    """Record one part, in a process, and keep it in a file of its name."""
    stage, precision, *first = part.split("-")
    with tempfile.TemporaryDirectory() as temporary:
        start = time.monotonic()
        if precision == "truth":
            traces: Any = [record_truth(stage, Path(temporary))]
        else:
            truth = load(folder, f"{stage}-truth")[0]
            traces = record_seeds(stage, precision, int(first[0]), Path(temporary), truth)
        torch.save([vars(trace) for trace in traces], folder / f"{part}.part")
    (folder / f"{part}.part").rename(folder / f"{part}.pt")
    print(f"{part}: {len(traces)} in {time.monotonic() - start:.0f} s", flush=True)


def load(folder: Path, part: str) -> list[Any]:
    """Return the traces of a part."""
    from rlhf.certify.trace import Name, Trace

    with torch.serialization.safe_globals([Name]):
        parts = torch.load(folder / f"{part}.pt")
    return [Trace(**values) for values in parts]


def list_chunks(stage: str, precision: str) -> list[str]:
    """Return the parts with the seeds of a stage in a precision."""
    return [f"{stage}-{precision}-{first}" for first in range(0, SEEDS, CHUNK)]


def load_seeds(folder: Path, stage: str, precision: str) -> list[Any]:
    """Return the traces of all seeds of a stage in a precision."""
    return [seed for part in list_chunks(stage, precision) for seed in load(folder, part)]


def record(folder: Path, chosen: Chosen, jobs: int) -> None:
    """Record the parts that the folder lacks."""

    def start(part: str) -> None:
        if not (folder / f"{part}.pt").exists():
            subprocess.run([sys.executable, __file__, "--part", part, "--folder", str(folder)], cwd=ROOT, check=True)

    seeds = [part for stage, names in chosen.items() for name in names for part in list_chunks(stage, name)]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(start, [f"{stage}-truth" for stage in chosen]))
        list(pool.map(start, seeds))


def summarize(folder: Path, chosen: Chosen) -> Any:
    """Return the golden numbers of the recorded parts."""
    from rlhf.certify.golden import GoldenStage, summarize_seeds

    golden: Any = {}
    for stage, names in chosen.items():
        right = golden[stage] = GoldenStage(load(folder, f"{stage}-truth")[0], seeds=SEEDS)
        for precision in names:
            right.bands[precision] = summarize_seeds(right.truth, load_seeds(folder, stage, precision))
    return golden


def count_alarms(folder: Path, chosen: Chosen) -> Iterator[str]:
    """Yield, for each stage and precision, how each seed compares with the bands of the others."""
    from rlhf.certify.golden import GoldenStage, compare, count_comparisons, reach, summarize_seeds

    comparisons = count_comparisons(summarize(folder, chosen))
    for stage, names in chosen.items():
        (truth,) = load(folder, f"{stage}-truth")
        for precision in names:
            seeds = load_seeds(folder, stage, precision)
            ratios = []
            for number, seed in enumerate(seeds):
                others = seeds[:number] + seeds[number + 1 :]
                right = GoldenStage(truth, {precision: summarize_seeds(truth, others)})
                verdicts = compare(right, seed, precision, reach(len(others), comparisons))
                ratios += [(verdict.ratio, str(verdict.quantity.name)) for verdict in verdicts]
            alarms = sum(ratio > 1 for ratio, _ in ratios)
            largest, name = max(ratios)
            yield f"{stage} in {precision}: {alarms} of {len(ratios)} beyond; the largest is {largest:.2g} ({name})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the file")
    parser.add_argument("--only", action="append", metavar="STAGE-PRECISION", help="such as sft-fp32; repeatable")
    parser.add_argument("--folder", type=Path, help="keep the parts there; default: a temporary folder")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time, each of one thread")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    torch.set_num_threads(1)
    if options.part:
        run_part(options.part, options.folder)
        return
    from rlhf.certify.fixed_state import STAGES
    from rlhf.certify.golden import FILE, write_golden

    recorded: Chosen = {
        stage: [name for name in PRECISIONS if not options.only or f"{stage}-{name}" in options.only]
        for stage in STAGES
    }
    chosen = {stage: names for stage, names in recorded.items() if names}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        record(folder, chosen, options.jobs)
        if options.write:
            write_golden(FILE, summarize(folder, chosen))
            print(f"{FILE}: {FILE.stat().st_size:,} bytes")
        for line in count_alarms(folder, chosen):
            print(line)
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
