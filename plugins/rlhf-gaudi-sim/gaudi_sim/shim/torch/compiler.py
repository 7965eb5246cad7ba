"""The backend of torch.compile in eager mode: it compiles nothing, and says so."""

import sys
from collections.abc import Callable
from typing import Any

import torch

from gaudi_sim.activation import NAME

_said = False


def hpu_backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Return the traced graph, to be run operator by operator."""
    global _said
    if not _said:
        print(f"{NAME}: torch.compile traces for hpu_backend, which runs the traces as they are", file=sys.stderr)
        _said = True
    return graph.forward


torch._dynamo.register_backend(hpu_backend, name="hpu_backend")
