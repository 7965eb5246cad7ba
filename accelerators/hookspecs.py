"""The three hooks of plugins, and their decorators.

A plugin is a distribution with an entry point in the group `rlhf.accelerators` that names a module. The module contains
functions with the decorator `@hookimpl` and the names below. It must not import torch: it is loaded before a backend is
chosen, and some runtimes read their environment when torch is imported. Its import, `rlhf_accelerators` and each probe
may take ten seconds; their output goes to standard error. The other two hooks run in the thread of the run, which waits
for them; after ten seconds a warning names the plugin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

from accelerators.types import AcceleratorSpec, KernelImpl, Problem

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

PROJECT = "rlhf"
ENTRY_POINT_GROUP = "rlhf.accelerators"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def rlhf_accelerators() -> Iterable[AcceleratorSpec]:  # type: ignore[empty-body]
    """Offer backends.

    The probe runs in the launcher, before a fork: it reads files or runs a vendor's tool, and opens no device.

        from pathlib import Path
        from accelerators import AcceleratorSpec, Probe, hookimpl

        def probe():
            nodes = list(Path("/dev").glob("npu[0-9]*"))
            files = tuple(map(str, nodes))
            return Probe(bool(nodes), f"{len(nodes)} files /dev/npu*", count=len(nodes), model="NPU", devices=files)

        @hookimpl
        def rlhf_accelerators():
            return [AcceleratorSpec(name="npu", api_version=3, factory="my_npu.backend:NPU", probe=probe, priority=50)]
    """


@hookspec
def rlhf_kernels(accelerator: Accelerator) -> Iterable[KernelImpl]:  # type: ignore[empty-body]
    """Offer implementations of operations, for any backend; torch may be imported here.

    The supported implementation with the highest priority is used; `rlhf accelerators explain` gives the reasons.

        from accelerators import KernelImpl, Support, hookimpl

        def supported(accelerator):
            fits = accelerator.name == "npu"
            return Support(fits, "one pass over memory" if fits else "needs an NPU")

        def factory(accelerator):
            from my_npu.optimizers import AdamW
            return AdamW

        @hookimpl
        def rlhf_kernels(accelerator):
            return [KernelImpl(operation="adamw", name="npu", factory=factory, supported=supported, priority=50)]
    """


@hookspec
def rlhf_check_run(accelerator: Accelerator, run: Mapping[str, Any]) -> Iterable[Problem]:  # type: ignore[empty-body]
    """Object to a run; `run` is its configuration as nested plain values.

    The hook must not change it. The user sees the objections of all plugins together.

        from accelerators import Problem, hookimpl

        @hookimpl
        def rlhf_check_run(accelerator, run):
            if accelerator.name == "npu" and run["engine"]["zero_stage"] == 3:
                yield Problem("ZeRO-3 hangs on NPU driver 1.2", "set engine.zero_stage to 2, or update the driver")
    """
