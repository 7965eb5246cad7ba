"""The backend of torch.compile in eager mode: counts the graphs that a Gaudi would compile, and runs them as traced.

Like Gaudi's own it gets whole graphs of functional operators, forward and backward apart, from AOT autograd.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

import accelerators.backends.hpu
from gaudi_sim import accounting
from gaudi_sim.build import FRAMEWORKS

_NO_CAUSE = (str(Path(accelerators.backends.hpu.__file__).parent), str(Path(__file__).parents[2]))
_known: dict[str, list[list[str]]] = {}


def _compiler(kind: str) -> Callable[..., Any]:
    def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        accounts = accounting.accounts()
        accounts.compiled(kind, _line(), len(nodes), _difference(kind, [str(nodes[:1]), *map(_described, inputs)]))

        def run(*args: Any) -> Any:
            with accounts.running_graph():
                return graph(*args)

        return make_boxed_func(run)

    return compile_graph


def _line() -> str:
    """Return the innermost line that is neither a library's nor Gaudi's backend."""
    for frame in reversed(traceback.extract_stack()):
        parts = Path(frame.filename).parts
        generated = frame.filename.startswith("<") and frame.filename not in ("<string>", "<stdin>")
        if not generated and not frame.filename.startswith(_NO_CAUSE) and not {*FRAMEWORKS, "functorch"} & {*parts}:
            return f"{frame.filename}:{frame.lineno}"
    return "no line of Python"


def _difference(kind: str, form: list[str]) -> str:
    """Return how a graph's inputs differ from those of the most similar known graph, and remember them."""
    alike = [known for known in _known.setdefault(kind, []) if len(known) == len(form) and known[0] == form[0]]
    _known[kind].append(form)
    if not alike:
        return f"the first {kind} graph of this code"
    nearest = min(alike, key=lambda known: sum(old != new for old, new in zip(known, form)))
    for number, (old, new) in enumerate(zip(nearest, form)):
        if old != new:
            return f"input {number - 1} is {new}, was {old}"  # after the first operator
    return "the inputs are as before, but another guard failed (TORCH_LOGS=recompiles shows it)"


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return repr(value)


hpu_backend = aot_autograd(
    fw_compiler=_compiler("forward"), bw_compiler=_compiler("backward"), inference_compiler=_compiler("inference")
)
torch._dynamo.register_backend(hpu_backend, name="hpu_backend")
