"""Everybody waits for its probe."""

import time

from accelerators import AcceleratorSpec, Probe, hookimpl


def probe():
    time.sleep(0.5)
    return Probe(True, "at last")


@hookimpl
def rlhf_accelerators():
    yield AcceleratorSpec(
        name="slow-probe", api_version=2, factory="accelerators.backends.cpu.backend:CPU", probe=probe, priority=-10
    )
