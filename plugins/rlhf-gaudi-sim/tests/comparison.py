"""Compares an operator on the simulated device with the CPU, on the samples of PyTorch's own operator database.

Both get the same values and the same seed; results and gradients must be close by the tolerances of `torch.testing`.
What an operator leaves uninitialized is compared by its shape.
"""

from __future__ import annotations

from itertools import islice
from typing import Any
from unittest import mock

import torch
from simulated import device
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

SEED = 1234
SAMPLES = 25
"""Samples taken per operator and dtype; a few operators have thousands."""


class Difference(AssertionError):
    """The device and the CPU disagree."""


def compare(op: OpInfo, dtype: torch.dtype, samples: int = SAMPLES) -> int:
    """Run `op` on both devices, backward too where it has one; -> how many samples the CPU could run.

    Raises:
        Difference: how the device differs, in one line.
    """
    compared = 0
    with_gradient = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    torch.manual_seed(SEED)
    with mock.patch("torch.manual_seed", _seed_both):  # the database's operators seed themselves
        for sample in islice(op.sample_inputs("cpu", dtype, requires_grad=with_gradient), samples):
            try:
                expected = _run(op, sample, with_gradient)
            except Exception:  # what the CPU cannot do there is nothing to compare with
                continue
            try:
                actual = _on_cpu(_run(op, _on_device(sample), with_gradient))
                if "empty" in op.name:
                    actual, expected = ([value.shape for value in values] for values in (actual, expected))
                torch.testing.assert_close(actual, expected, equal_nan=True)
            except Exception as error:
                raise Difference(" ".join(str(error).split())[:300]) from error
            compared += 1
    return compared


_seed_cpu = torch.manual_seed


def _seed_both(seed: int) -> torch.Generator:
    device.default_generator().manual_seed(seed)
    return _seed_cpu(seed)


def _run(op: OpInfo, sample: SampleInput, with_gradient: bool) -> list[Any]:
    """Results, then gradients of the leaves."""
    torch.manual_seed(SEED)
    result = op(sample.input, *sample.args, **sample.kwargs)
    outputs = _tensors(sample.output_process_fn_grad(result)) if with_gradient else []
    differentiable = [output for output in outputs if output.requires_grad]
    values: list[Any] = [
        leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, (torch.Tensor, bool, int, float))
    ]
    leaves = [leaf for leaf in _tensors((sample.input, sample.args, sample.kwargs)) if leaf.requires_grad]
    if differentiable and leaves:
        weights = [torch.ones_like(output) for output in differentiable]
        gradients = torch.autograd.grad(differentiable, leaves, weights, allow_unused=True)
        values += [gradient for gradient in gradients if gradient is not None]
    return values


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _on_device(sample: SampleInput) -> SampleInput:
    values, args, kwargs = pytree.tree_map(_moved, (sample.input, sample.args, dict(sample.kwargs)))
    if "device" in kwargs:
        kwargs["device"] = "hpu"
    return SampleInput(values, args=args, kwargs=kwargs, output_process_fn_grad=sample.output_process_fn_grad)


def _moved(value: Any) -> Any:
    """On the device, with the same strides in a storage of the same size."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout != torch.strided:
        return value.to("hpu")
    with torch.no_grad():
        storage = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).to("hpu")
        moved = storage.as_strided(value.shape, value.stride(), value.storage_offset())
    return moved.requires_grad_(value.requires_grad)


def _on_cpu(values: list[Any]) -> list[Any]:
    return [value.detach().cpu() if isinstance(value, torch.Tensor) else value for value in values]
