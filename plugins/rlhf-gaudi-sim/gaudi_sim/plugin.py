"""The entry point. It offers no backend: with RLHF_GAUDI_SIM=1, the built-in `hpu` backend finds a simulated Gaudi.

rlhf loads every plugin before it probes any backend, so the probe of `hpu` meets the simulation. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from accelerators import AcceleratorError, AcceleratorSpec, Problem, hookimpl
from gaudi_sim import activation

if TYPE_CHECKING:
    from accelerators import Accelerator  # imports torch


def _activate() -> AcceleratorError | None:
    """Install the simulation where the environment asks for it; why it could not be done."""
    try:
        if activation.is_wanted():
            activation.install()
    except AcceleratorError as error:
        return error
    return None


_refusal = _activate()


@hookimpl
def rlhf_accelerators() -> Iterable[AcceleratorSpec]:
    """Offer no backend; fail if the simulation was requested and cannot be installed."""
    if _refusal:  # raised here and not on import: the plugin stays, and can object to the run below
        raise _refusal
    return []


@hookimpl
def rlhf_check_run(accelerator: Accelerator, run: Mapping[str, Any]) -> Iterable[Problem]:
    """Object to a run that requested a simulation and would get a real card instead."""
    if _refusal:
        reason, _, remedy = str(_refusal).partition("; ")
        yield Problem(reason, remedy)
