"""The installed torch, read from its version file: probes must not import it."""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TorchBuild:
    """The version of the installed torch, and the versions of the vendors' software that it was built for."""

    version: str
    cuda: tuple[int, int] | None
    hip: str | None
    xpu: str | None = None


def torch_build() -> TorchBuild | None:
    """Return what the installed torch was built for, without importing it; None if torch is not installed."""
    spec = importlib.util.find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if path is None or not path.is_file():
        return None
    text = path.read_text()
    version, cuda, hip, xpu = (_constant(text, name) for name in ("__version__", "cuda", "hip", "xpu"))
    return TorchBuild(str(version), _version(cuda) if cuda else None, hip, xpu)


def _constant(text: str, name: str) -> Any:
    """Return the value of `name = <literal>` or `name: type = <literal>` in a module's text; None if it has none."""
    match = re.search(rf"^{name}\b[^=\n]*=\s*(.+)$", text, re.MULTILINE)
    return ast.literal_eval(match.group(1)) if match else None


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
