"""The table of checks, in the order in which they run, and the backend that they check.

A check is a function `check_<name>` of a module in this package. It passes, fails with an AssertionError of one line,
or is skipped with a reason (`unittest.SkipTest`, which pytest knows too); it may return a note. Its parameters name
attributes of `Subject`, or the ZeRO `stage`. The modules import torch, so they are imported when their checks run,
after the backend has set its environment.
"""

from __future__ import annotations

import importlib
import inspect
import os
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING
from unittest import mock

import accelerators
from accelerators.registry import ENV

if TYPE_CHECKING:
    from accelerators import Accelerator, Selection
    from accelerators.testing.processes import Outcome


@dataclass(frozen=True)
class Check:
    """One promise of the interface.

    Attributes:
        name: name for users; the function is `check_` and the name with underscores.
        module: the module of this package that contains the function.
        title: the promise.
        stage: the ZeRO stage, for checks that run once for each stage.
    """

    name: str
    module: str
    title: str
    stage: int | None = None

    def __str__(self) -> str:
        return self.name if self.stage is None else f"{self.name}[zero-{self.stage}]"

    def run(self, subject: Subject) -> str:
        """Run the check and return its note, or ""."""
        function = getattr(
            importlib.import_module(f"{__package__}.{self.module}"), f"check_{self.name}".replace("-", "_")
        )
        parameters = inspect.signature(function).parameters
        arguments = {key: self.stage if key == "stage" else getattr(subject, key) for key in parameters}
        return function(**arguments) or ""


CHECKS = (
    # before torch is imported
    Check("discovery", "subprocess_checks", "discovery imports no torch"),
    Check(
        "probe",
        "subprocess_checks",
        "the probe is quick, imports no torch, opens no device and uses the common names of devices",
    ),
    # in other processes: before this one opens the device, because some devices take one process only
    Check("collectives", "subprocess_checks", "two ranks exchange tensors and objects"),
    Check("deepspeed", "subprocess_checks", "DeepSpeed uses the same device"),
    *(
        Check("deepspeed-step", "subprocess_checks", "DeepSpeed trains as plain PyTorch does in fp32", stage)
        for stage in range(4)
    ),
    Check("run", "subprocess_checks", "the three stages run, and compile nothing after two steps"),
    # the backend's description of itself
    Check("types", "capabilities", "every method returns the type that the interface promises"),
    Check("operations", "capabilities", "every supported operation can be used"),
    Check("shapes", "capabilities", "padded lengths are buckets: idempotent, monotone, never too short"),
    Check("precision", "precision", "every precision is granted as requested, or refused with a reason"),
    # state
    Check("placement", "memory_and_rng", "the device is known after bind, and whole batches move there"),
    Check("random-numbers", "memory_and_rng", "a seed and a saved state reproduce samples"),
    Check("memory", "memory_and_rng", "memory figures follow a large allocation"),
    Check("out-of-memory", "memory_and_rng", "out-of-memory errors are recognized"),
    # execution
    Check("step-boundary", "capture", "step boundaries change no value, and cost nothing in eager execution"),
    Check("capture", "capture", "a captured function computes the same numbers as the plain one"),
    Check("capture-refusal", "capture", "capture refuses host reads and names the line"),
    # kernels
    Check("adamw", "precision", "AdamW takes torch's steps"),
    Check("offload", "offload", "tensors move to the host and back unchanged, and AdamW steps there"),
    Check("clip-grad-norm", "precision", "gradients are clipped as torch clips them"),
    Check("attention", "attention", "attention matches float64, with padding and in a static cache, backward too"),
    Check(
        "quantized-weights",
        "quantized",
        "weights of 8 and 4 bits are restored within half a step, and multiply as restored",
    ),
    Check(
        "inference-weights",
        "inference_weights",
        "weights prepared for reading give the same numbers, and are restored bit for bit",
    ),
    Check("fused-layers", "fused", "fused layers give float32's logits and gradients, in copies too"),
)


class Subject:
    """The backend under test: selected for the `with` block, created and bound when a check first asks for that."""

    def __init__(self, name: str) -> None:
        environ = {key: value for key, value in os.environ.items() if key != ENV}
        self.selection: Selection = accelerators.select(name, environ=environ)
        self.selection.export(environ)
        self._environ = mock.patch.dict(os.environ, environ)

    def __enter__(self) -> Subject:
        self._environ.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._environ.stop()

    @property
    def name(self) -> str:
        """The backend's name."""
        return self.selection.name

    @cached_property
    def unbound(self) -> Accelerator:
        """The backend, whose device is still free for other processes."""
        return self.selection.create()

    @cached_property
    def accelerator(self) -> Accelerator:
        """The backend, bound to local rank 0."""
        self.unbound.bind(0)
        return self.unbound

    @cached_property
    def deepspeed_report(self) -> Outcome:
        """The results of a process with DeepSpeed, as far as it got."""
        from accelerators.testing import processes

        return processes.worker("deepspeed", self.name)
