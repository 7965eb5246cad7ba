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
from typing import TYPE_CHECKING
from unittest import mock

import accelerators
from accelerators.registry import ENV
from accelerators.types import AUTO

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
    Check("discovery", "processes", "discovery imports no torch"),
    Check(
        "probe",
        "processes",
        "the probe is quick, imports no torch, opens no device and uses the common names of devices",
    ),
    # in other processes: before this one opens the device, because some devices take one process only
    Check("collectives", "processes", "two ranks exchange tensors and objects"),
    Check("deepspeed", "processes", "DeepSpeed uses the same device"),
    *(
        Check("deepspeed-step", "processes", "DeepSpeed trains as plain PyTorch does in fp32", stage)
        for stage in range(4)
    ),
    Check("run", "processes", "the three stages run, and compile nothing after two steps"),
    # the backend's description of itself
    Check("interface", "capabilities", "every method takes the arguments that the interface passes"),
    Check("types", "capabilities", "every method returns the type that the interface promises"),
    Check("operations", "capabilities", "every supported operation can be used"),
    Check("shapes", "capabilities", "padded lengths are buckets: idempotent, monotone, never too short"),
    Check("precision", "capabilities", "every precision is granted as requested, or refused with a reason"),
    Check("deterministic", "capabilities", "a backend that promises equal results repeats a step bit for bit"),
    Check("health", "memory_and_rng", "health is reported quickly and in words, and counts of errors never fall"),
    # state
    Check("placement", "memory_and_rng", "the device is known after bind, and whole batches move there"),
    Check("random-numbers", "memory_and_rng", "a seed and a saved state reproduce samples"),
    Check("memory", "memory_and_rng", "memory figures follow a large allocation"),
    Check("out-of-memory", "memory_and_rng", "out-of-memory errors are recognized"),
    # execution
    Check("step-boundary", "capture", "step boundaries change no value, and cost nothing in eager execution"),
    Check("timing", "capture", "marks measure the device's work in seconds, and ranges show in a profile"),
    Check("capture", "capture", "a captured function computes the same numbers as the plain one"),
    Check("capture-refusal", "capture", "capture refuses host reads and names the line"),
    # kernels
    Check("adamw", "optimizers", "AdamW takes torch's steps"),
    Check("offload", "optimizers", "tensors move to the host and back unchanged, and AdamW steps there"),
    Check("clip-grad-norm", "optimizers", "gradients are clipped as torch clips them"),
    Check("attention", "attention", "attention matches float64, with padding and in a static cache, backward too"),
    Check(
        "quantized-weights",
        "quantized",
        "weights of 8 and 4 bits are restored within half a step, and multiply as restored",
    ),
    Check(
        "inference-weights",
        "layers",
        "weights prepared for reading give the same numbers, and are restored bit for bit",
    ),
    Check("fused-layers", "layers", "fused layers give float32's logits and gradients, in copies too"),
    Check("sampling", "sampling", "tokens and their log-probabilities are those of the distribution in float64"),
    Check(
        "batch-invariant",
        "invariance",
        "a row's numbers are the same bits alone and in batches, padded, and decoded with a cache",
    ),
    # the end: some runtimes cannot be used by others in this process afterwards
    Check("teardown", "memory_and_rng", "teardown gives the device back, and it can be bound again"),
)


class Subject:
    """The backend under test: selected for the `with` block, created and bound when a check first asks for that.

    Args:
        name: the backend; auto: the one that a run would take.
    """

    def __init__(self, name: str) -> None:
        choice = {key: value for key, value in os.environ.items() if name == AUTO or key != ENV}
        self.selection: Selection = accelerators.select(name, environ=choice)
        environ = dict(os.environ)  # after the selection: plugins may have set variables while they were loaded
        self.selection.export(environ)
        self._environ = mock.patch.dict(os.environ, environ)

    def __enter__(self) -> Subject:
        self._environ.start()
        return self

    def __exit__(self, *exception: object) -> None:
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
        from accelerators.testing.processes import worker

        return worker("deepspeed", self.name)
