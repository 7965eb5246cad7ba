"""What a benchmark ran on, what that machine can do at most, and where results go.

    python ci/bench/machine.py                       bytes/s and FLOP/s of this machine's processor
    python ci/bench/machine.py --accelerator cuda    of a device

Bytes are those read (or, in a copy, read and written) of tensors far larger than any cache; operations those of matrix
products, 2 m n k. Each is the best of several runs: a limit, not an average.
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

READ = 2**30  # bytes of the tensor that is read


def machine() -> dict[str, Any]:
    return {
        "model": cpu_info.cpu_model(),
        "cores": cpu_info.cores(),
        "bf16": cpu_info.native_bf16(),
        "system": platform.platform(),
    }


def results_file(folder: Path, benchmark: str) -> Path:
    """Where the results of `benchmark` on this machine go."""
    chip = slug(re.sub(r"\((R|TM)\)|Processor", "", cpu_info.cpu_model()), " +")
    return folder / "results" / f"{benchmark}-{chip}.json"


def device_file(chip: str) -> Path:
    """Where the results of all benchmarks on a device go, each under its name."""
    return ROOT / "ci" / "results" / f"bench-{slug(chip, '[^A-Za-z0-9]+')}.json"


def slug(name: str, unwanted: str) -> str:
    return re.sub(unwanted, "-", name).strip("-").lower()


def limits(accelerator: str) -> dict[str, Any]:
    """What `measure` finds, in a process of its own."""
    command = [sys.executable, str(HERE / "machine.py"), "--accelerator", accelerator, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"machine.py ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(accelerator: str, *, size: int = READ, side: int = 4096) -> dict[str, Any]:
    """Bytes and operations a second, each by the way in which it was found.

    Args:
        size: bytes of the tensors that are read.
        side: of the square matrices that are multiplied in bf16, beside smaller ones; half of that in float32.
    """
    import torch

    device, synchronize, chip = _device(accelerator)
    torch.set_num_threads(cpu_info.cores())

    def best(work: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(8):  # the first warms up
            synchronize()
            begun = time.perf_counter()
            work()
            synchronize()
            seconds.append(time.perf_counter() - begun)
        return min(seconds[1:])

    return {
        "chip": chip,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **_bytes(size, device, best),
        "flops_per_second": _flops(side, device, best),
    }


def _bytes(size: int, device: Any, best: Callable[[Callable[[], Any]], float]) -> dict[str, Any]:
    import torch

    wide = 4096
    numbers = torch.ones(size // 4, device=device)
    target = torch.empty_like(numbers)
    weights = torch.ones(size // 2 // wide, wide, dtype=torch.bfloat16, device=device)
    vector = torch.ones(wide, dtype=torch.bfloat16, device=device)
    read: dict[str, Callable[[], Any]] = {
        "sum, float32": numbers.sum,
        "dot, float32": partial(torch.dot, numbers, numbers),
        "matrix x vector, bf16": partial(torch.mv, weights, vector),
    }
    return {
        "read_bytes_per_second": {name: round(size / best(work)) for name, work in read.items()},
        "copy_bytes_per_second": round(2 * size / best(partial(target.copy_, numbers))),
    }


def _flops(side: int, device: Any, best: Callable[[Callable[[], Any]], float]) -> dict[str, int]:
    import torch

    found: dict[str, int] = {}

    def note(name: str, edge: int, work: Callable[[], Any]) -> None:
        found[name] = max(found.get(name, 0), round(2 * edge**3 / best(work)))

    for name, dtype, edge in (
        ("bf16", torch.bfloat16, side),
        ("bf16", torch.bfloat16, side // 2),
        ("fp32", torch.float32, side // 2),
    ):
        left, right = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
        note(name, edge, partial(torch.matmul, left, right))
        if device.type == "cpu" and name == "bf16" and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            # oneDNN's own order of the weights, which torch 2.13 has under these private names.
            packed = torch.ops.mkldnn._reorder_linear_weight(right, edge)
            note(
                f"{name}, packed weights",
                edge,
                partial(torch.ops.mkldnn._linear_pointwise, left, packed, None, "none", [], ""),
            )
    return found


def _device(accelerator: str) -> tuple[Any, Callable[[], None], str]:
    """The device of a backend, what waits for it, and what it is called."""
    import accelerators

    selection = accelerators.select(accelerator, environ={})
    selection.export(os.environ)
    made = selection.create()
    return made.bind(0), made.synchronize, made.info().model


def shown(found: dict[str, Any]) -> str:
    lines = [f"{found['chip']}, {found['threads']} threads, torch {found['torch']}"]
    lines += [f"read, {name}: {value / 1e9:.1f} GB/s" for name, value in found["read_bytes_per_second"].items()]
    lines += [f"copy, read and written: {found['copy_bytes_per_second'] / 1e9:.1f} GB/s"]
    lines += [f"product, {name}: {value / 1e12:.3f} TFLOP/s" for name, value in found["flops_per_second"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="cpu", help="backend to measure (default: cpu)")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    given = parser.parse_args()
    found = measure(given.accelerator)
    print(json.dumps(found) if given.json else shown(found))


if __name__ == "__main__":
    main()
