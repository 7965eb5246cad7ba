"""Every place where rlhf raises an error of the user's, as `file: its words`, read from the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ERRORS = {
    "ConfigError",
    "DataError",
    "DivergedError",
    "ModelError",
    "OutOfMemory",
    "RunError",
    "AcceleratorError",
    "CaptureError",
    "PluginError",
    "RewardError",
    "Unknown",  # rlhf.rewards: of a plugin's function
    "Unusable",  # rlhf.rewards: of any function, in its own process
    "error",  # rlhf.models.hub: of a model or of a data set
    "ValueError",  # in the schema: pydantic turns it into a ConfigError
}


def raised(*folders: str) -> list[str]:
    """One line for each place in `folders` (files or folders) that makes an error; what is filled in is `{}`."""
    return sorted(
        f"{path.relative_to(ROOT)}: {words}"
        for folder in folders
        for path in sorted([ROOT / folder] if folder.endswith(".py") else (ROOT / folder).rglob("*.py"))
        for words in _messages(ast.parse(path.read_text(encoding="utf-8")))
    )


def _messages(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and _name(node.func) in ERRORS:
            yield " ".join(_words(node.args[0]).split())


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", "") or getattr(function, "id", "")


def _words(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_words(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _words(node.left) + _words(node.right)
    return "{}"
