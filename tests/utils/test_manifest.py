"""A manifest that is damaged itself, in any way, is damage of its folder and no traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf.utils.manifest import MANIFEST, find_damage, hash_json, write_manifest


def replaced(files: Any) -> str:
    """The text of a manifest with these files, whose own digest is right."""
    return json.dumps({"files": files, "sha256": hash_json(files)})


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no JSON": lambda path: path.write_text("{"),
    "another encoding": lambda path: path.write_bytes(b"\xff"),
    "lists without end": lambda path: path.write_text("[" * 100_000),
    "a list": lambda path: path.write_text("[]"),
    "no files": lambda path: path.write_text("{}"),
    "another digest": lambda path: path.write_text(path.read_text().replace('"sha256": "', '"sha256": "0', 1)),
    "a size that is a text": lambda path: path.write_text(replaced({"a": {"size": "1", "sha256": "0"}})),
    "a digest that is a number": lambda path: path.write_text(replaced({"a": {"size": 1, "sha256": 0}})),
    "files in a list": lambda path: path.write_text(replaced([1])),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_manifest_is_damage(tmp_path: Path, damage: str) -> None:
    (tmp_path / "a").write_text("x")
    write_manifest(tmp_path)
    assert find_damage(tmp_path) is None
    DAMAGES[damage](tmp_path / MANIFEST)
    assert find_damage(tmp_path) == f"{MANIFEST} is damaged"
