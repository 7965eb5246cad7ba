"""Measure the limits of this machine: the memory bandwidth and the floating-point speed of matrix products.

    python ci/bench/machine.py                       bytes/s and FLOP/s of this machine's processor
    python ci/bench/machine.py --accelerator cuda    bytes/s and FLOP/s of a device
    python ci/bench/machine.py --json                one line of JSON, for --limits of the other benchmarks

Bandwidth counts the bytes read (in a copy, the bytes read and written) of tensors far larger than any cache. A matrix
product of m x k by k x n counts as 2 m n k operations. Each figure is the best of several runs, so it is a limit and
not an average.

The module also describes the machine for result files and names those files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT)]

from accelerators.backends.cpu import info as cpu_info  # noqa: E402

READ = 2**30  # bytes per read


def machine() -> dict[str, Any]:
    """Return the description of this machine that result files contain."""
    return {
        "model": cpu_info.cpu_model(),
        "cores": cpu_info.cores(),
        "bf16": cpu_info.native_bf16(),
        "system": platform.platform(),
    }


def chip_name() -> str:
    """Return the name of this machine's processor, as `name_chip` does."""
    return name_chip(machine())


def name_chip(described: dict[str, Any]) -> str:
    """Return a processor's name with its instructions for bf16, which decide every figure in bf16.

    Args:
        described: what `machine` returned there.
    """
    native = described["bf16"]
    widest = "with AMX" if "amx_bf16" in native else "with AVX512-BF16" if native else "without bf16 instructions"
    model = " ".join(re.sub(r"\((R|TM)\)|Processor", "", described["model"]).split())
    return f"{model} {widest}"


def usual_precision(accelerator: str) -> str:
    """Return fp32 on a CPU without bf16 instructions, otherwise bf16."""
    return "bf16" if accelerator != "cpu" or cpu_info.native_bf16() else "fp32"


def results_file(folder: Path, benchmark: str) -> Path:
    """Return the file for the results of `benchmark` on this machine."""
    return folder / "results" / f"{benchmark}-{slug(chip_name(), ' +')}.json"


def device_file(chip: str) -> Path:
    """Return the file for the results of all benchmarks on a device, by name of the benchmark."""
    return ROOT / "ci" / "results" / f"bench-{slug(chip, '[^A-Za-z0-9]+')}.json"


def slug(name: str, unwanted: str) -> str:
    """Return the name in lower case, with a hyphen for each match of the pattern `unwanted`."""
    return re.sub(unwanted, "-", name).strip("-").lower()


def limits(accelerator: str, precision: str | None = None) -> dict[str, Any]:
    """Return the result of `measure` from a separate process."""
    command = [sys.executable, str(HERE / "machine.py"), "--accelerator", accelerator, "--json"]
    command += ["--precision", precision] if precision else []
    completed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if completed.returncode:
        sys.exit(f"machine.py: failed with exit code {completed.returncode}")
    measured: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return measured


def better(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the larger of both numbers for each speed: what slows a measurement is no limit of the machine."""
    both = {
        key: better(value, second[key]) if isinstance(value, dict) else max(value, second[key])
        for key, value in first.items()
        if key in second
    }
    return {**first, **second, **both}


def measure(accelerator: str, precision: str | None = None, *, size: int = READ, side: int = 4096) -> dict[str, Any]:
    """Return the bytes and operations per second, by the operation that was measured.

    Args:
        accelerator: name of the backend.
        precision: bf16 or fp32; None for what the device usually runs in. Float32 is measured in any case.
        size: bytes per read.
        side: rows of the largest square matrices; `precision` is measured at this size and half of it, float32 always
            at half.
    """
    import torch

    device, synchronize, chip = _bind_device(accelerator)
    torch.set_num_threads(cpu_info.cores())

    def best_time(work: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(8):  # the first warms up
            synchronize()
            start = time.perf_counter()
            work()
            synchronize()
            seconds.append(time.perf_counter() - start)
        return min(seconds[1:])

    return {
        "chip": chip,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **_measure_bytes(size, device, best_time),
        "flops_per_second": _measure_flops(side, device, precision or usual_precision(device.type), best_time),
    }


def _measure_bytes(size: int, device: Any, best_time: Callable[[Callable[[], Any]], float]) -> dict[str, Any]:
    import torch

    width = 4096
    numbers = torch.ones(size // 4, device=device)
    target = torch.empty_like(numbers)
    weights = torch.ones(size // 2 // width, width, dtype=torch.bfloat16, device=device)
    vector = torch.ones(width, dtype=torch.bfloat16, device=device)
    reads: dict[str, Callable[[], Any]] = {
        "sum, float32": numbers.sum,
        "dot, float32": partial(torch.dot, numbers, numbers),
        "matrix x vector, bf16": partial(torch.mv, weights, vector),
    }
    return {
        "read_bytes_per_second": {name: round(size / best_time(work)) for name, work in reads.items()},
        "copy_bytes_per_second": round(2 * size / best_time(partial(target.copy_, numbers))),
    }


def _measure_flops(
    side: int, device: Any, precision: str, best_time: Callable[[Callable[[], Any]], float]
) -> dict[str, int]:
    import torch

    speeds: dict[str, int] = {}

    def record_speed(name: str, edge: int, work: Callable[[], Any]) -> None:
        speeds[name] = max(speeds.get(name, 0), round(2 * edge**3 / best_time(work)))

    for name, edge in dict.fromkeys([(precision, side), (precision, side // 2), ("fp32", side // 2)]):
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[name]
        left, right = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
        record_speed(name, edge, partial(torch.matmul, left, right))
        if device.type == "cpu" and name == precision and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            # oneDNN's packed layout of the weights; torch 2.13 has it under these private names.
            packed = torch.ops.mkldnn._reorder_linear_weight(right, edge)
            record_speed(
                f"{name}, packed weights",
                edge,
                partial(torch.ops.mkldnn._linear_pointwise, left, packed, None, "none", [], ""),
            )
    return speeds


def _bind_device(accelerator: str) -> tuple[Any, Callable[[], None], str]:
    """Return the device of a backend, the function that synchronizes it, and the name of the chip."""
    import accelerators

    selection = accelerators.select(accelerator, environ={})
    selection.export(os.environ)
    backend = selection.create()
    return backend.bind(0), backend.synchronize, backend.info().model


def describe_limits(measured: dict[str, Any]) -> str:
    """Return the result of `measure` as lines of text."""
    lines = [f"{measured['chip']}, {measured['threads']} threads, torch {measured['torch']}"]
    lines += [f"read, {name}: {value / 1e9:.1f} GB/s" for name, value in measured["read_bytes_per_second"].items()]
    lines += [f"copy, read and written: {measured['copy_bytes_per_second'] / 1e9:.1f} GB/s"]
    lines += [f"product, {name}: {value / 1e12:.3f} TFLOP/s" for name, value in measured["flops_per_second"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="cpu", help="backend to measure (default: cpu)")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), help="of the products (default: bf16 if the device multiplies it)"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    measured = measure(arguments.accelerator, arguments.precision)
    print(json.dumps(measured) if arguments.json else describe_limits(measured))


if __name__ == "__main__":
    main()
