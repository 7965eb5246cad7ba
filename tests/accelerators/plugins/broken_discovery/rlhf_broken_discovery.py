"""Imports torch before a backend is chosen."""

import torch

from accelerators import AcceleratorSpec, Probe, hookimpl


@hookimpl
def rlhf_accelerators():
    yield AcceleratorSpec(
        name="early-torch",
        api_version=2,
        factory="accelerators.backends.cpu.backend:CPU",
        probe=lambda: Probe(True, f"torch {torch.__version__}"),
        priority=-10,
    )
