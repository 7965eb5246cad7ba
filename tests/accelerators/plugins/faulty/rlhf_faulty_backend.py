"""The backend of `rlhf_faulty`: the CPU's, with what FAULTS says of the variable FAULT."""

import os
import resource
from pathlib import Path

import torch
from rlhf_faulty import FAULT, kernel

from accelerators import Precision
from accelerators.backends.cpu.backend import CPU


def raises(error):
    def method(self, *arguments):
        raise error

    return method


def gives(answer):
    return lambda self, *arguments, **options: answer


def offers(operation, made):
    return lambda self: [*CPU.kernels(self), kernel(operation, made)]


def fails(*arguments, **options):
    raise OSError("no card")


def one_by_one(self):
    yield kernel("adamw", fails)
    raise OSError("no card")


class Odd(Precision):
    def autocast(self):
        raise OSError("no card")


class Vague(Precision):
    def deepspeed_config(self):
        return "fp32"


class Still(torch.optim.SGD):
    def step(self, closure=None):
        raise OSError("no card")


def recorded(self, fn, key):
    """Works, but for what `fn` raises: that it wraps."""

    def replay():
        try:
            fn()
        except Exception as error:
            raise RuntimeError(f"{key}: the recording failed") from error

    return replay


def defective(session, width):
    raise KeyError("defect in the decoder")


def lacking(self, tag):
    try:
        raise DeviceOutOfMemory("Tried to allocate 2 GiB")
    except RuntimeError as error:
        raise OSError("step failed") from error


class FullError(Exception):
    """As no library names it: only the backend knows."""


def is_full(self, error):
    return isinstance(error, FullError)


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


class DeviceOutOfMemory(RuntimeError):
    """As a vendor's runtime names it."""


if FAULT == "none, but rlhf has a defect":
    from rlhf.generation.decode_state import Session

    Session._step = defective

FAULTS = {
    "none, but rlhf has a defect": {"capture": recorded},
    "bind raises": {"bind": raises(OSError("no card"))},
    "bind gives 0": {"bind": gives(0)},
    "bind without local_rank": {"bind": lambda self: torch.device("cpu")},
    "device gives a str": {"device": gives("cpu")},
    "to_device raises": {"to_device": raises(OSError("no card"))},
    "to_device gives None": {"to_device": gives(None)},
    "info gives a dict": {"info": gives({"model": "Faulty"})},
    "synchronize raises": {"synchronize": raises(OSError("no card"))},
    "synchronize exits": {"synchronize": raises(SystemExit(3))},
    "step_boundary raises": {"step_boundary": raises(OSError("no card"))},
    "step_boundary without tag": {"step_boundary": lambda self: None},
    "step_boundery": {"step_boundery": gives(None)},
    "a recording raises": {"capture": lambda self, fn, key: fails},
    "capture gives None": {"capture": gives(None)},
    "compilations gives a str": {"compilations": gives("3")},
    "precision raises": {"precision": raises(KeyError("fp32"))},
    "precision gives a dtype": {"precision": gives(torch.float32)},
    "autocast raises": {"precision": gives(Odd(torch.float32, "fp32", "the only one"))},
    "deepspeed_config gives a str": {"precision": gives(Vague(torch.float32, "fp32", "the only one"))},
    "precision without wish": {"precision": lambda self: CPU.precision(self)},
    "kernels raises midway": {"kernels": one_by_one},
    "kernels gives dicts": {"kernels": gives([{"operation": "adamw"}])},
    "shape_policy gives a str": {"shape_policy": gives("static")},
    "memory gives a tuple": {"memory": gives((1, 2, 3))},
    "memory is no method": {"memory": 7},
    "reset_peak raises": {"reset_peak": raises(OSError("no card"))},
    "empty_cache raises": {"empty_cache": raises(OSError("no card"))},
    "seed raises": {"seed": raises(OSError("no card"))},
    "rng_state gives None": {"rng_state": gives(None)},
    "dist_backend gives hccl": {"dist_backend": gives("hccl")},
    "dist_backend gives None": {"dist_backend": gives(None)},
    "deepspeed_accelerator gives a str": {"deepspeed_accelerator": gives("cpu")},
    "prepare_deepspeed gives None": {"prepare_deepspeed": gives(None)},
    "deepspeed_name is None": {"deepspeed_name": None},
    "absent is a str": {"absent": "none"},
    "absent names no operation": {"absent": {"graph_captur": "none here"}},
    "adamw raises": {"kernels": offers("adamw", fails)},
    "adamw gives a str": {"kernels": offers("adamw", lambda params, **settings: "adamw")},
    "adamw does not step": {"kernels": offers("adamw", lambda params, **settings: Still(params))},
    "adamw takes no eps": {"kernels": offers("adamw", lambda params, lr, betas: None)},
    "clip_grad_norm gives a float": {"kernels": offers("clip_grad_norm", lambda parameters, norm: 1.0)},
    "clip_grad_norm raises": {"kernels": offers("clip_grad_norm", fails)},
    "graph_capture gives None": {"kernels": offers("graph_capture", lambda fn, key: None)},
    "out of memory": {"step_boundary": raises(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))},
    "out of memory in a runtime's own words": {"step_boundary": lacking},
    "out of memory as only the backend knows": {
        "step_boundary": raises(FullError("7 tiles short")),
        "is_out_of_memory": is_full,
    },
    "its judgement fails": {
        "step_boundary": raises(FullError("7 tiles short")),
        "is_out_of_memory": raises(KeyError("tiles")),
    },
    "out of memory when scored": {"step_boundary": full_when_scored},
    "out of memory on rank 1": {"step_boundary": full_on_rank_1},
    "memory is limited": {"seed": limited},
    "attention is not known": {"kernels": offers("attention", "flash_atention")},
}
Faulty = type("Faulty", (CPU,), {"name": "faulty", "__module__": __name__, **FAULTS.get(FAULT, {})})
