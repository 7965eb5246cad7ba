"""The backend of `rlhf_uncertain`: the CPU's in fp32, with the methods that FAULTS lists for the variable FAULT."""

import os

import torch

from accelerators import AcceleratorError, KernelImpl, Precision, Support
from accelerators.backends.cpu.backend import CPU

KEPT = []


def precision(self, wish="auto"):
    if wish in ("auto", "fp32"):
        return Precision(torch.float32, "fp32", "the only one")
    raise AcceleratorError(f"precision {wish}: it has fp32 alone; use auto or fp32")


def adamw(make):
    """Return the methods of a backend whose optimizer `make` makes."""
    kernel = KernelImpl(
        operation="adamw",
        name="faulty",
        factory=lambda accelerator: make,
        supported=lambda accelerator: Support(True, "for tests"),
        priority=99,
    )
    return {"kernel_implementations": lambda self: [*CPU.kernel_implementations(self), kernel]}


def keeping(params, **settings):
    """Keep every parameter, as the lazy bridge's weight sharing does."""
    optimizer = torch.optim.AdamW(params, **settings)
    KEPT.extend(parameter for group in optimizer.param_groups for parameter in group["params"])
    return optimizer


class Frozen(torch.optim.AdamW):
    """Step no adapter, as if a move had given the model other parameters than the optimizer has."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if 4 in parameter.shape:  # the rank
                    parameter.grad = None
        return super().step(closure)


class Flat(torch.optim.AdamW):
    """Step no parameter that ZeRO has flattened."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() == 1 and parameter.numel() > 10_000:
                    parameter.grad = None
        return super().step(closure)


class Forgetful(torch.optim.AdamW):
    """Take the first step with new moments, although a checkpoint's were loaded."""

    has_stepped = False

    def step(self, closure=None):
        if not self.has_stepped and self.param_groups[0]["lr"] > 0:  # loading takes a step at a rate of 0
            self.state.clear()
            self.has_stepped = True
        return super().step(closure)


def aborts(self, local_rank):
    os.abort()


def later(self):
    KEPT.append(None)
    return len(KEPT)


FAULTS = {
    "aborts when the device is opened": {"bind": aborts},
    "cannot clip": {
        "kernel_implementations": lambda self: [
            kernel for kernel in CPU.kernel_implementations(self) if kernel.operation != "clip_grad_norm"
        ]
    },
    "answers with another type": {"is_lazy": lambda self: "no"},
    "keeps every parameter": adamw(keeping),
    "does not step adapters": adamw(Frozen),
    "does not step flattened parameters": adamw(Flat),
    "loads no optimizer state": adamw(Forgetful),
    "compiles in every step": {"compilations": later},
}
Uncertain = type(
    "Uncertain",
    (CPU,),
    {
        "name": "uncertain",
        "__module__": __name__,
        "precision": precision,
        **FAULTS.get(os.environ.get("FAULT", ""), {}),
    },
)
