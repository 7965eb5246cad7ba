"""The backend of `rlhf_faulty`: the CPU's, with the methods that FAULTS lists for the variable FAULT."""

import os
import resource
from pathlib import Path

import torch
from rlhf_faulty import FAULT, kernel

from accelerators import KernelImpl, Support, register_attention
from accelerators.backends.cpu.backend import CPU


def raises(error):
    def method(self, *arguments):
        raise error

    return method


def fails(*arguments, **options):
    raise OSError("no card")


class Still(torch.optim.SGD):
    def step(self, closure=None):
        fails()


def recorded(self, fn, key):
    """Works, but for what `fn` raises: that it wraps."""

    def replay():
        try:
            fn()
        except Exception as error:
            raise RuntimeError(f"{key}: the recording failed") from error

    return replay


class DeviceOutOfMemory(RuntimeError):
    """As a vendor's runtime names it."""


def out_of_memory_as_a_cause(self, tag):
    try:
        raise DeviceOutOfMemory("Tried to allocate 2 GiB")
    except RuntimeError as error:
        raise OSError("step failed") from error


class FullError(Exception):
    """As no library names it: only the backend knows."""


def limited(self, seed):
    """From now on this process may have 32 MiB more."""
    self.empty_cache()  # what is kept would be room too
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (32 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def full_when_scored(self, tag):
    if tag == "score/reward":
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB")


def full_on_rank_1(self, tag):
    if os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB")


if FAULT == "none, but rlhf has a defect":
    from rlhf.generation.decode_state import DecodeState

    DecodeState._step = None

if FAULT == "out of memory on rank 1":
    from rlhf.launchers import coordinator

    coordinator._SECONDS_FOR_CAUSES = 0.2  # no other rank fails


def attend(module, query, key, value, mask, **features):
    """Fail in the forward pass, or in the backward pass alone."""
    if FAULT == "attention fails":
        raise RuntimeError("TPU_STATUS_17: bad tile")
    if FAULT == "attention fills its memory":
        raise RuntimeError("TPU_RESOURCE_EXHAUSTED: HBM is full")
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    return Backward.apply(output).transpose(1, 2), None


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output):
        return output.clone()

    @staticmethod
    def backward(ctx, gradient):
        fails()


ATTENTION = KernelImpl(
    operation="attention",
    name="faulty",
    factory=lambda accelerator: register_attention("faulty", attend),
    supported=lambda accelerator: Support(True, "for tests"),
    priority=99,
)
ATTENDS = {"kernel_implementations": lambda self: [*CPU.kernel_implementations(self), ATTENTION]}
STILL = kernel("adamw", lambda params, **settings: Still(params))
FAULTS = {
    "none, but rlhf has a defect": {"capture": recorded},
    "synchronize exits": {"synchronize": raises(SystemExit(3))},
    "a recording raises": {"capture": lambda self, fn, key: fails},
    "memory gives a tuple": {"memory": lambda self: (1, 2, 3)},
    "adamw does not step": {"kernel_implementations": lambda self: [*CPU.kernel_implementations(self), STILL]},
    "out of memory": {"step_boundary": raises(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))},
    "out of memory in a runtime's own words": {"step_boundary": out_of_memory_as_a_cause},
    "out of memory as only the backend knows": {
        "step_boundary": raises(FullError("7 tiles short")),
        "is_out_of_memory": lambda self, error: isinstance(error, FullError),
    },
    "out of memory when scored": {"step_boundary": full_when_scored},
    "out of memory on rank 1": {"step_boundary": full_on_rank_1},
    "attention fails": ATTENDS,
    "attention fills its memory": ATTENDS,
    "attention fails in its backward pass": ATTENDS,
    "memory is limited": {"seed": limited},
}
Faulty = type("Faulty", (CPU,), {"name": "faulty", "__module__": __name__, **FAULTS.get(FAULT, {})})
