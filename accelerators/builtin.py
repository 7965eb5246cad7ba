"""The entry point of the backends that come with this distribution.

It offers their specs with probes that import no torch; the classes are imported when one is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable

from accelerators import gaudi, host, nvidia
from accelerators.hookspecs import hookimpl
from accelerators.types import API_VERSION, AcceleratorSpec, Probe


def probe_cpu() -> Probe:
    """A CPU is always there."""
    return Probe(ok=True, reason=f"{host.cores()} cores", count=1, model=host.cpu_model())


@hookimpl
def rlhf_accelerators() -> Iterable[AcceleratorSpec]:
    return [
        AcceleratorSpec(name="cpu", api_version=API_VERSION, factory="accelerators.cpu:CPU", probe=probe_cpu),
        AcceleratorSpec(
            name="cuda",
            api_version=API_VERSION,
            factory="accelerators.cuda:CUDA",
            probe=nvidia.probe,
            env=nvidia.device_order,
            priority=100,
        ),
        AcceleratorSpec(
            name="hpu",
            api_version=API_VERSION,
            factory="accelerators.hpu:HPU",
            probe=gaudi.probe,
            env=gaudi.environment,
            priority=110,
        ),
    ]
