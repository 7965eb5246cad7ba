"""Accelerators as plugins: the interface, the built-in backends, and the selection among installed ones.

Trainers call `select()` and get a backend; plugins use the types and `hookimpl`. Importing this package does not
import torch, because some runtimes read their environment when torch is imported, and the selected backend sets it
first.
"""

from typing import TYPE_CHECKING, Any

from accelerators.discovery import Report, available, blame_plugin
from accelerators.errors import AcceleratorError, CaptureError, PluginError, describe_error, find_out_of_memory
from accelerators.hookspecs import hookimpl, hookspec
from accelerators.host import redirect_fd, stdout_to_stderr
from accelerators.kernels import KernelSet
from accelerators.known_devices import DevicePrice, KnownDevice, known_device, known_device_names
from accelerators.portable import missing_features, register_attention
from accelerators.registry import Selection, select, verify_agreement
from accelerators.shapes import ShapePolicy
from accelerators.types import (
    API_VERSION,
    OPERATIONS,
    REFERENCE,
    AcceleratorSpec,
    DeepSpeedView,
    DeviceInfo,
    KernelImpl,
    Memory,
    Precision,
    Probe,
    Problem,
    Support,
)

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator
    from accelerators.deepspeed_device import DeepSpeedDevice
    from accelerators.quantized import QuantizedWeights

__all__ = [
    "API_VERSION",
    "OPERATIONS",
    "REFERENCE",
    "Accelerator",
    "AcceleratorError",
    "AcceleratorSpec",
    "CaptureError",
    "DeepSpeedDevice",
    "DeepSpeedView",
    "DeviceInfo",
    "DevicePrice",
    "KernelImpl",
    "KernelSet",
    "KnownDevice",
    "Memory",
    "PluginError",
    "Precision",
    "Probe",
    "Problem",
    "QuantizedWeights",
    "Report",
    "Selection",
    "ShapePolicy",
    "Support",
    "available",
    "blame_plugin",
    "describe_error",
    "find_out_of_memory",
    "hookimpl",
    "hookspec",
    "known_device",
    "known_device_names",
    "missing_features",
    "redirect_fd",
    "register_attention",
    "select",
    "stdout_to_stderr",
    "verify_agreement",
]


def __getattr__(name: str) -> Any:
    if name == "Accelerator":  # its module imports torch
        from accelerators.accelerator import Accelerator

        return Accelerator
    if name == "QuantizedWeights":  # so does this one
        from accelerators.quantized import QuantizedWeights

        return QuantizedWeights
    if name == "DeepSpeedDevice":  # and this one imports DeepSpeed, which needs the backend's environment
        from accelerators.deepspeed_device import DeepSpeedDevice

        return DeepSpeedDevice
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
