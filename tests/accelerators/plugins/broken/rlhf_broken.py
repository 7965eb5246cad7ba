"""Backends that are wrong in one respect each, for the conformance kit to find, and three unusual ones that are right.

Their names say how.
"""

import os

from accelerators import AcceleratorSpec, Probe, hookimpl

OPENED_BY = None
"""The process that first opened the device: as with real runtimes, its children cannot use it."""


def usual_probe():
    return Probe(True, "found one", count=1)


def probe_that_imports_torch():
    import torch

    return Probe(True, f"torch {torch.__version__}", count=1)


def probe_that_opens_the_device():
    global OPENED_BY
    OPENED_BY = OPENED_BY or os.getpid()
    return Probe(True, "opened one", count=1)


def probe_that_numbers_devices():
    return Probe(True, "found one", count=1, devices=("chip 0",))


PROBES = {
    "probe-imports-torch": probe_that_imports_torch,
    "probe-opens-device": probe_that_opens_the_device,
    "probe-numbers-devices": probe_that_numbers_devices,
}

BACKENDS = {
    "rlhf_broken_backends": (
        *PROBES,
        "flag-is-text",
        "unknown-collectives",
        "unknown-operation-absent",
        "any-error-is-lack",
        "lack-not-told",
        "factory-raises",
        "bucket-not-idempotent",
        "bucket-not-monotone",
        "bucket-too-short",
        "bf16-in-fp32",
        "bf16-not-told",
        "fp32-that-rounds",
        "precision-raises-valueerror",
        "precision-takes-anything",
        "auto-differs",
        "device-before-bind",
        "nested-tensor-forgotten",
        "named-tuple-lost",
        "seed-forgets-python",
        "state-not-restored",
        "state-not-loadable",
        "memory-stands-still",
        "memory-never-falls",
        "other-dist-backend",
        "one-device",
        "loud",
        "deepspeed-not-told",
        "deepspeed-clips",
        "compiles-late",
    ),
    "rlhf_broken_execution": (
        "boundary-waits",
        "boundary-computes",
        "boundary-draws",
        "boundary-compiles",
        "lazy-boundary",
        "capture-stale",
        "capture-overwrites",
        "capture-lets-item-through",
        "capture-other-error",
    ),
    "rlhf_broken_kernels": (
        "adamw-other-eps",
        "adamw-no-decay",
        "adamw-empty-group",
        "offload-rounds",
        "offload-not-pinned",
        "host-adamw-in-bf16",
        "clip-other-norm",
        "clip-gives-float",
        "weights-truncated",
        "weights-dense",
        "weights-detached",
        "reading-leaves-a-forward",
        "reading-rounds",
        "reading-is-stale",
        "reading-sees-padding",
        "fusing-freezes-norms",
        "fusing-ties-copies",
        "weights-without-offset",
        "attention-sees-padding",
        "attention-sees-empty-columns",
        "attention-of-nothing",
        "attention-mixes-groups",
        "attention-freezes-keys",
        "attention-cannot-be-asked",
    ),
}
"""The names, by the module that holds their classes."""


@hookimpl
def rlhf_accelerators():
    for module, names in BACKENDS.items():
        for name in names:
            yield AcceleratorSpec(
                name=name,
                api_version=2,
                factory=f"{module}:{''.join(part.capitalize() for part in name.split('-'))}",
                probe=PROBES.get(name, usual_probe),
                priority=-10,
            )
