"""A CPU that can do what only other devices can: it trains in fp16 with loss scaling, and records rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accelerators import AcceleratorSpec, KernelImpl, Precision, Probe, Support, hookimpl
from accelerators.backends.cpu.backend import CPU
from accelerators.capture import Graph
from accelerators.testing import stand_in

counts: Counter[str] = Counter()
"""Functions recorded so far in this process, and replays of them."""


def install(folder: Path) -> str:
    """Make this module a plugin of whoever has `folder` in PYTHONPATH; gives its name."""
    name = "rlhf-rehearsal"
    about = folder / "rlhf_rehearsal-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[rlhf.accelerators]\nrehearsal = {__name__}\n")
    return name


@hookimpl
def rlhf_accelerators() -> list[AcceleratorSpec]:
    return [
        AcceleratorSpec(
            name="rehearsal",
            api_version=2,
            factory=f"{__name__}:Rehearsal",
            probe=lambda: Probe(True, "a CPU is always there", count=1, model="CPU"),
            priority=-10,
        )
    ]


def watch(recipe: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """Begin to count for `two_ranks`."""
    counts.clear()
    return lambda: {"counts": dict(counts)}


def record(fn: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    outputs, replay = stand_in.record(fn)
    counts["recorded"] += 1

    def counted() -> None:
        counts["replayed"] += 1
        replay()

    return outputs, counted


class FP16(Precision):
    """Its loss scale begins at 2^12, which the gradients of tiny models fit, so that no step is lost to find it."""

    def deepspeed_config(self) -> dict[str, Any]:
        return {"fp16": super().deepspeed_config()["fp16"] | {"initial_scale_power": 12}}


class Rehearsal(CPU):
    name = "rehearsal"
    absent = {}  # noqa: RUF012

    def kernel_implementations(self) -> list[KernelImpl]:
        tape = KernelImpl(
            operation="graph_capture",
            name="tape",
            factory=lambda accelerator: partial(Graph, record=record),
            supported=lambda accelerator: Support(True, "operators are written down, and run again without Python"),
        )
        # The tape records operators of torch, and the CPU's kernel that draws is none.
        return [*(kernel for kernel in super().kernel_implementations() if kernel.operation != "sampling"), tape]

    def precision(self, wish: str = "auto") -> Precision:
        if wish == "fp16":
            return FP16(torch.float16, "fp16", "DeepSpeed is told that it can", loss_scaling=True)
        return super().precision(wish)

    def deepspeed_accelerator(self) -> Any:
        from accelerators import DeepSpeedDevice  # imports DeepSpeed

        return DeepSpeedDevice(self)
