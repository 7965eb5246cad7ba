"""The CPU with one fault, which the variable FAULT names; without it, a plugin as it should be."""

import os

from accelerators import AcceleratorSpec, KernelImpl, Probe, Problem, Support, hookimpl

FAULT = os.environ.get("FAULT", "")


@hookimpl
def rlhf_accelerators():
    probe = Probe(True, "found one", count=1, model="Faulty")
    factory = "rlhf_faulty_backend:Faulty"
    return [AcceleratorSpec(name="faulty", api_version=2, factory=factory, probe=lambda: probe, priority=-10)]


@hookimpl
def rlhf_kernels(accelerator):
    return halfway(kernel("adamw", None)) if FAULT == "hook rlhf_kernels raises midway" else []


@hookimpl
def rlhf_check_run(accelerator, run):
    if FAULT == "hook rlhf_check_run raises midway":
        return halfway(*[Problem("too cold", "wait")] * (accelerator.name == "faulty"))
    return []


def halfway(*answers):
    yield from answers
    raise OSError("no library")


def kernel(operation, made):
    supported = lambda accelerator: Support(True, "for tests")  # noqa: E731
    return KernelImpl(operation=operation, name="fast", factory=lambda a: made, supported=supported, priority=99)
