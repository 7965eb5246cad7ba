"""The entry point of the built-in backends: their specs, with probes that do not import torch."""

from __future__ import annotations

from collections.abc import Iterable

from accelerators.backends.cpu import info as cpu_info
from accelerators.backends.cuda import info as cuda_info
from accelerators.backends.hpu import info as hpu_info
from accelerators.hookspecs import hookimpl
from accelerators.types import API_VERSION, AcceleratorSpec, Probe


def probe_cpu() -> Probe:
    """Report the CPU, which is always available."""
    return Probe(ok=True, reason=f"{cpu_info.cores()} cores", count=1, model=cpu_info.cpu_model())


@hookimpl
def rlhf_accelerators() -> Iterable[AcceleratorSpec]:
    """Offer cpu, cuda and hpu."""
    return [
        AcceleratorSpec(
            name="cpu", api_version=API_VERSION, factory="accelerators.backends.cpu.backend:CPU", probe=probe_cpu
        ),
        AcceleratorSpec(
            name="cuda",
            api_version=API_VERSION,
            factory="accelerators.backends.cuda.backend:CUDA",
            probe=cuda_info.probe,
            env=cuda_info.environment,
            priority=100,
        ),
        AcceleratorSpec(
            name="hpu",
            api_version=API_VERSION,
            factory="accelerators.backends.hpu.backend:HPU",
            probe=hpu_info.probe,
            env=hpu_info.environment,
            priority=110,
        ),
    ]
