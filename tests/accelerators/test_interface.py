"""What the interface asks of every backend, and gives to one that says no more than it must."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from accelerators import (
    OPERATIONS,
    RESERVED,
    Accelerator,
    AcceleratorError,
)
from accelerators.cpu import CPU

# what trainers ask for


def test_the_operations_that_no_trainer_asks_for_are_those_marked_so():
    sources = [path.read_text() for path in (Path(__file__).parents[2] / "rlhf").rglob("*.py")]
    asked = {operation for source in sources for operation in re.findall(r'\.kernel\(\s*"(\w+)"', source)}
    if any(re.search(r"\baccelerator\.capture\b", source) for source in sources):
        asked.add("graph_capture")
    assert asked == set(OPERATIONS) - set(RESERVED)


# a backend that says no more than it must


class Terse(CPU):
    """Its `bind` does what its docstring says."""

    def bind(self, local_rank: int) -> torch.device:
        return torch.device("meta", local_rank)


class Careful(Terse):
    def bind(self, local_rank: int) -> torch.device:
        super().bind(local_rank)
        return torch.device("cpu")


class Bound:
    """No accelerator of its own."""

    def bind(self, local_rank: int) -> torch.device:
        return torch.device("meta", local_rank)


class Mixed(Bound, CPU):
    pass


@pytest.mark.parametrize(
    ("backend", "device"),
    [(Terse, torch.device("meta", 1)), (Careful, torch.device("cpu")), (Mixed, torch.device("meta", 1))],
)
def test_the_device_is_the_one_that_bind_returned(backend, device):
    accelerator = backend()
    with pytest.raises(AcceleratorError, match="no device is bound"):
        accelerator.device()
    assert accelerator.bind(1) == device
    assert accelerator.device() == device
    assert accelerator.to_device(torch.ones(2)).device.type == device.type
    assert accelerator.bind(local_rank=0) == accelerator.device()
    with pytest.raises(AcceleratorError, match="no device is bound"):
        backend().device()


def test_bind_stays_a_method_that_every_backend_has_to_write():
    assert "bind" in Accelerator.__abstractmethods__
    assert "bind" in type("Half", (Accelerator,), {"name": "half"}).__abstractmethods__
    assert "bind" not in Terse.__abstractmethods__
    assert Terse.bind.__doc__ is None
    assert CPU.bind.__doc__
