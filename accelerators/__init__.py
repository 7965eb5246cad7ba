"""Accelerators as plugins: the interface, the built-in backends, and the selection among installed ones.

Trainers call `select()` and get a backend; plugins use the types and `hookimpl`. Importing this package does not
import torch, because some runtimes read their environment when torch is imported, and the selected backend sets it
first.
"""

import importlib
from typing import TYPE_CHECKING, Any

from accelerators.compatibility import former_name
from accelerators.discovery import Report, available, blame_plugin
from accelerators.errors import AcceleratorError, CaptureError, PluginError, describe_error, find_out_of_memory
from accelerators.hookspecs import hookimpl, hookspec
from accelerators.host import describe_files, read_command, read_text, redirect_fd, run_tool, stdout_to_stderr
from accelerators.kernels import KernelSet
from accelerators.known_devices import DevicePrice, KnownDevice, known_device, known_device_names
from accelerators.portable import (
    FUSED_ADAMW,
    always,
    missing_features,
    portable_kernels,
    register_attention,
    stream_graphs,
    takes_real_tokens,
)
from accelerators.registry import Selection, select, verify_agreement
from accelerators.shapes import ShapePolicy
from accelerators.torch_build import TorchBuild, torch_build
from accelerators.types import (
    API_VERSION,
    OPERATIONS,
    REFERENCE,
    AcceleratorSpec,
    DeclaredException,
    DeepSpeedView,
    DeviceInfo,
    Health,
    KernelImpl,
    Memory,
    Precision,
    Probe,
    Problem,
    Support,
)

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator
    from accelerators.capture import StreamGraphs
    from accelerators.deepspeed_device import DeepSpeedDevice
    from accelerators.invariance import find_batch_dependence
    from accelerators.marks import EventMark
    from accelerators.precisions import choose_precision
    from accelerators.quantized import QuantizedWeights
    from accelerators.real_tokens import RealTokens
    from accelerators.streams import StreamAccelerator

__all__ = [
    "API_VERSION",
    "FUSED_ADAMW",
    "OPERATIONS",
    "REFERENCE",
    "Accelerator",
    "AcceleratorError",
    "AcceleratorSpec",
    "CaptureError",
    "DeclaredException",
    "DeepSpeedDevice",
    "DeepSpeedView",
    "DeviceInfo",
    "DevicePrice",
    "EventMark",
    "Health",
    "KernelImpl",
    "KernelSet",
    "KnownDevice",
    "Memory",
    "PluginError",
    "Precision",
    "Probe",
    "Problem",
    "QuantizedWeights",
    "RealTokens",
    "Report",
    "Selection",
    "ShapePolicy",
    "StreamAccelerator",
    "StreamGraphs",
    "Support",
    "TorchBuild",
    "always",
    "available",
    "blame_plugin",
    "choose_precision",
    "describe_error",
    "describe_files",
    "find_batch_dependence",
    "find_out_of_memory",
    "hookimpl",
    "hookspec",
    "known_device",
    "known_device_names",
    "missing_features",
    "portable_kernels",
    "read_command",
    "read_text",
    "redirect_fd",
    "register_attention",
    "run_tool",
    "select",
    "stdout_to_stderr",
    "stream_graphs",
    "takes_real_tokens",
    "torch_build",
    "verify_agreement",
]

_LAZY = {
    "Accelerator": "accelerator",
    "EventMark": "marks",
    "DeepSpeedDevice": "deepspeed_device",  # it imports DeepSpeed, which needs the backend's environment
    "QuantizedWeights": "quantized",
    "RealTokens": "real_tokens",
    "StreamAccelerator": "streams",
    "StreamGraphs": "capture",
    "choose_precision": "precisions",
    "find_batch_dependence": "invariance",
}
"""Names of modules that import torch, and their modules."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    return former_name(name)
