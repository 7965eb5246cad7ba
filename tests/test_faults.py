"""Planted faults keep their place when code is reformatted or moved, and say so when it is gone."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from ci.faults import Fault, PlaceError

CODE = '''
LIMIT = 3 * 2


class Loss:
    """A loss, of which `a + b` is a part."""

    scale: float = 3 * 2

    def forward(self, a, b):
        total = a + b  # é
        if total > self.scale:
            total = mean(a, weights=b, axis=0)
        return f"{total * 2}", total * 2


def backward(a, b):
    return a + b
'''


def fault(symbol: str, old: str, new: str, **others: Any) -> Fault:
    return Fault("a fault", others.pop("file", "code.py"), symbol, old, new, ("tests",), **others)


@pytest.mark.parametrize(
    ("symbol", "old", "new", "line"),
    [
        ("Loss.forward", "a + b", "a - b", "        total = (a - b)  # é"),
        ("Loss.forward", "a   +\n  b", "a - b", "        total = (a - b)  # é"),
        ("Loss.forward", "if total > self.scale:", "if False:", "        if False:"),
        ("Loss.forward", "weights=b", "weights=a", "            total = mean(a, weights=a, axis=0)"),
        ("Loss.forward", "weights=b", "**{}", "            total = mean(a, **{}, axis=0)"),
        ("Loss.forward", "total = a + b", "total = a\ntotal -= b", "        total = a\n        total -= b  # é"),
        ("Loss.forward", "total * 2", "total", '        return f"{total * 2}", (total)'),
        ("Loss.scale", "3 * 2", "3", "    scale: float = (3)"),
        ("LIMIT", "3 * 2", "3", "LIMIT = (3)"),
        ("", "3 * 2", "3", "LIMIT = (3)"),
        ("backward", "a + b", "pass", "    return a + b"),
    ],
)
def test_plant_code_replaces_syntax_tree(symbol: str, old: str, new: str, line: str) -> None:
    if new == "pass":  # an expression gives way to none
        with pytest.raises(PlaceError):
            fault(symbol, old, new).plant(CODE)
        return
    planted = fault(symbol, old, new).plant(CODE)
    ast.parse(planted)
    assert line in planted and line not in CODE
    assert len(planted.splitlines()) == len(CODE.splitlines()) + line.count("\n")


def test_plant_reformatted_code_keeps_line_numbers() -> None:
    moved = CODE.replace(
        "mean(a, weights=b, axis=0)", "mean(\n                a,\n                weights=b,\n  axis=0)"
    )
    planted = fault("Loss.forward", "mean(a, weights=b, axis=0)", "0").plant("import other\n" + moved)
    ast.parse(planted)
    assert planted.splitlines().index("def backward(a, b):") == moved.splitlines().index("def backward(a, b):") + 1


@pytest.mark.parametrize(
    ("symbol", "old"), [("Loss.backward", "a + b"), ("Loss.forward", "a - b"), ("", "a + b"), ("forward", "a + b")]
)
def test_plant_missing_place_raises(symbol: str, old: str) -> None:
    with pytest.raises(PlaceError):
        fault(symbol, old, "0").plant(CODE)


def test_plant_ambiguous_place_raises_without_nth() -> None:
    code = "def f(a):\n    return a + 1, a + 1\n"
    with pytest.raises(PlaceError, match="2 times"):
        fault("f", "a + 1", "a").plant(code)
    assert "a + 1, (a)" in fault("f", "a + 1", "a", nth=2).plant(code)


def test_plant_c_ignores_white_space() -> None:
    code = "int f(int a)\n{\n    if (a) { return a\n        + 1; }\n}\nint g(int a) { return a + 1; }\n"
    assert "return a; }\n}\nint g(int a) { return a + 1; }" in fault("f", "a + 1", "a", file="code.c").plant(code)
    with pytest.raises(PlaceError):
        fault("h", "a + 1", "a", file="code.c").plant(code)


def test_find_problem_names_missing_places_and_tests(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_code.py").write_text("def test_it():\n    pass\n", encoding="utf-8")

    def find(old: str, test: str) -> str | None:
        return Fault("a fault", "code.py", "Loss.forward", old, "0", (test,)).find_problem(tmp_path)

    assert find("a + b", "tests/test_code.py::test_it[a case]") is None
    assert "test_other" in (find("a + b", "tests/test_code.py::test_other") or "")
    assert "is gone" in (find("a + b", "tests/test_gone.py") or "")
    assert "a fault" in (find("a - b", "tests/test_code.py") or "")
    assert "Loss.forward" in (find("a - b", "tests/test_code.py") or "")
