"""The checks of the conformance kit, in the order in which they run: each is a method, its docstring the title.

A backend's name flows in; every check passes, fails with one line that says what was found and what is expected, or
is skipped with a reason (`unittest.SkipTest`, which pytest knows too). A check's parameters name what it is given: a
part of `Subject`, the ZeRO `stage`, or `note`, which adds a line to the report. What a check does is in the modules
beside this one, which import torch: the backend sets its environment first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING
from unittest import mock

import accelerators
from accelerators.registry import ENV

if TYPE_CHECKING:
    from accelerators import Accelerator, Selection
    from accelerators.testing.processes import Outcome

STAGES = (0, 1, 2, 3)
"""The ZeRO stages, each a check of its own."""


class Subject:
    """The backend that is checked: selected with the block, created and bound when a check first asks for that."""

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
        """What a process with DeepSpeed found out, as far as it got."""
        from accelerators.testing import processes

        return processes.worker("deepspeed", self.selection.name)


class Suite:
    """The checks of one backend.

    Those that look at imports, ranks, DeepSpeed or a whole run start processes of their own.
    """

    name: str
    """The backend, as `rlhf accelerators list` names it; it must be available here."""

    # before torch

    def test_discovery(self) -> None:
        """discovery imports no torch"""
        from accelerators.testing import subprocess_checks

        subprocess_checks.check_discovery(self.name)

    def test_probe(self) -> None:
        """the probe is quick, imports no torch, opens no device and names it as others would"""
        from accelerators.testing import subprocess_checks

        subprocess_checks.check_probe(self.name)

    # processes: before this one opens the device, for some devices take one process only

    def test_collectives(self, unbound: Accelerator) -> None:
        """two ranks exchange tensors and objects"""
        from accelerators.testing import subprocess_checks

        subprocess_checks.check_collectives(unbound)

    def test_deepspeed(self, deepspeed_report: Outcome) -> None:
        """DeepSpeed uses the same device"""
        from accelerators.testing import subprocess_checks

        subprocess_checks.check_deepspeed(deepspeed_report)

    def test_deepspeed_step(self, deepspeed_report: Outcome, stage: int) -> None:
        """DeepSpeed trains as plain PyTorch does in fp32"""
        from accelerators.testing import subprocess_checks

        subprocess_checks.check_deepspeed_step(deepspeed_report, stage)

    def test_run(self, unbound: Accelerator, note: Callable[[str], None]) -> None:
        """the three stages run, and compile nothing after two steps"""
        from accelerators.testing import subprocess_checks

        note(subprocess_checks.check_run(unbound))

    # what the backend says

    def test_operations(self, accelerator: Accelerator) -> None:
        """every operation is offered, or refused with a reason"""
        from accelerators.testing import capabilities

        capabilities.check_operations(accelerator)

    def test_shapes(self, accelerator: Accelerator) -> None:
        """padded lengths are buckets: idempotent, monotone, never too short"""
        from accelerators.testing import capabilities

        capabilities.check_shapes(accelerator)

    def test_precision(self, accelerator: Accelerator) -> None:
        """every precision is given as asked, or refused with a reason"""
        from accelerators.testing import precision

        precision.check_precision(accelerator)

    # state

    def test_placement(self, selection: Selection) -> None:
        """the device is known once bound, and whole batches move there"""
        from accelerators.testing import memory_and_rng

        memory_and_rng.check_placement(selection.create())

    def test_random_numbers(self, accelerator: Accelerator) -> None:
        """a seed and a saved state reproduce samples"""
        from accelerators.testing import memory_and_rng

        memory_and_rng.check_random_numbers(accelerator)

    def test_memory(self, accelerator: Accelerator) -> None:
        """memory figures follow a large allocation"""
        from accelerators.testing import memory_and_rng

        memory_and_rng.check_memory(accelerator)

    def test_out_of_memory(self, accelerator: Accelerator) -> None:
        """a lack of memory is told from other errors"""
        from accelerators.testing import memory_and_rng

        memory_and_rng.check_out_of_memory(accelerator)

    # execution

    def test_step_boundary(self, accelerator: Accelerator) -> None:
        """step boundaries change no value, and cost nothing where execution is eager"""
        from accelerators.testing import capture

        capture.check_step_boundary(accelerator)

    def test_capture(self, accelerator: Accelerator) -> None:
        """a captured function computes what the plain one does"""
        from accelerators.testing import capture

        capture.check_capture(accelerator)

    def test_capture_refusal(self, accelerator: Accelerator) -> None:
        """capture refuses host reads and names the line"""
        from accelerators.testing import capture

        capture.check_capture_refusal(accelerator)

    # kernels

    def test_adamw(self, accelerator: Accelerator) -> None:
        """AdamW takes torch's steps"""
        from accelerators.testing import precision

        precision.check_adamw(accelerator)

    def test_offload(self, accelerator: Accelerator) -> None:
        """what waits on the host comes and goes unchanged, and AdamW steps there"""
        from accelerators.testing import offload

        offload.check_offload(accelerator)

    def test_clip_grad_norm(self, accelerator: Accelerator) -> None:
        """gradients are clipped as torch clips them"""
        from accelerators.testing import precision

        precision.check_clip_grad_norm(accelerator)

    def test_attention(self, accelerator: Accelerator) -> None:
        """attention gives float64's numbers and gradients, with padding and in a static cache"""
        from accelerators.testing import attention

        attention.check_attention(accelerator)

    def test_quantized_weights(self, accelerator: Accelerator) -> None:
        """weights of 8 and 4 bits come back within half a step, and multiply as what comes back does"""
        from accelerators.testing import quantized

        quantized.check_quantized_weights(accelerator)

    def test_inference_weights(self, accelerator: Accelerator) -> None:
        """weights prepared for reading give the same numbers, and are put back to the bit"""
        from accelerators.testing import inference_weights

        inference_weights.check_inference_weights(accelerator)

    def test_fused_layers(self, accelerator: Accelerator) -> None:
        """fused layers give float32's logits and gradients, in copies too"""
        from accelerators.testing import fused

        fused.check_fused_layers(accelerator)
