"""A plugin that prints wherever it is called, and answers with what nobody can use."""

import ctypes
import os

from accelerators import AcceleratorSpec, KernelImpl, Support, hookimpl


def shout():
    print("shouting")
    os.write(1, b"shouting\n")
    ctypes.CDLL(None).puts(b"shouting")


shout()


@hookimpl
def rlhf_accelerators():
    shout()
    return [AcceleratorSpec(name="rubbish", api_version=2, factory="nowhere:Nothing", probe=shout)]


@hookimpl
def rlhf_kernels(accelerator):
    shout()

    def factory(accelerator):
        shout()
        raise ImportError("libfast.so: no such file")

    yes = KernelImpl(operation="adamw", name="yes", factory=factory, supported=lambda accelerator: True)
    fast = KernelImpl(
        operation="adamw",
        name="fast",
        factory=factory,
        supported=lambda accelerator: Support(True, "fast"),
        priority=99,
    )
    return [yes, fast]


@hookimpl
def rlhf_check_run(run):
    shout()
    return "no run today"
