"""Where an operator runs: its module and the line that called it; a backward operator has those of its forward."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

_LIBRARIES = ("/rlhf/", "/transformers/")
_OWN = str(Path(__file__).parent)


@dataclass
class Place:
    """The module and the line that called an operator; `backward` if it belongs to a backward pass."""

    module: str
    line: str
    backward: bool = False


@dataclass
class Places:
    """The modules that are running, and the places of forward operators by autograd's sequence numbers."""

    _modules: list[str] = field(default_factory=list)
    _forward: dict[int, Place] = field(default_factory=dict)

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

    def current(self) -> Place:
        """Return the place of the operator that runs now."""
        node = torch._C._current_autograd_node()
        if node is not None:
            known = self._forward.get(node._sequence_nr())
            if known:
                return Place(known.module, known.line, backward=True)
            return Place(self._module, node.name(), backward=True)
        place = Place(self._module, find_line())
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
    """Return the innermost line of rlhf or transformers on the stack, as `file:line`; else the innermost of all."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if any(part in file for part in _LIBRARIES) and not file.startswith(_OWN):
            start = max(file.rfind(part) for part in _LIBRARIES)
            return f"{file[start + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
