"""Where an operator runs: its module and the line that called it; a backward operator has those of its forward."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

_OWN = f"{Path(__file__).parent}{os.sep}"
_PACKAGES = {
    f"{package}{os.sep}": len(str(package.parent)) + 1
    for package in (Path(__file__).parents[1], Path(transformers.__file__).parent)
}
"""The folders of rlhf and transformers, and the part of a file's path that a report leaves out."""


@dataclass
class CallSite:
    """The module and the line that called an operator; `backward` if it belongs to a backward pass."""

    module: str
    line: str
    backward: bool = False


@dataclass
class Places:
    """The modules that are running, and the places of forward operators by autograd's sequence numbers."""

    _modules: list[str] = field(default_factory=list)
    _forward: dict[int, CallSite] = field(default_factory=dict)

    @contextmanager
    def follow(self, models: Mapping[str, Any]) -> Iterator[None]:
        """Follow the modules of `models`, by role, in this block."""
        with ExitStack() as stack:
            for role, model in models.items():
                bare: nn.Module = getattr(model, "module", model)  # without DeepSpeed
                for name, module in bare.named_modules():
                    stack.callback(module.register_forward_pre_hook(self._entering(f"{role}:{name}")).remove)
                    stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            yield

    def current(self) -> CallSite:
        """Return the place of the operator that runs now."""
        node = torch._C._current_autograd_node()
        if node is not None:
            known = self._forward.get(node._sequence_nr())
            if known:
                return CallSite(known.module, known.line, backward=True)
            return CallSite(self._module, node.name(), backward=True)
        place = CallSite(self._module, find_line())
        # The operator's node has been made: its number is the last that was given. The first operator after it counts.
        self._forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, place)
        return place

    @property
    def _module(self) -> str:
        return self._modules[-1] if self._modules else ""

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self._modules.append(name)

        return enter

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if self._modules:
            self._modules.pop()


def find_line() -> str:
    """Return the innermost line of rlhf or transformers on the stack, as `file:line`; empty if there is none."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file: str = frame.f_code.co_filename
        for package, start in _PACKAGES.items():
            if file.startswith(package) and not file.startswith(_OWN):
                return f"{file[start:]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
