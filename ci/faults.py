"""Planted faults: their list, and finding their places in the code.

A fault names its `file`, the `symbol` in it (`PPO.collect`; none: outside of functions and classes) and an expression,
a keyword argument, the header of an `if`, `for`, `while` or `with`, or statements as they are (`old`) and as they must
not be (`new`). `old` is compared as a syntax tree and must occur once in its symbol, or `nth` says which one is meant.
In C, `symbol` is a function, and `old` is text in which any white space equals any other. `tests` are arguments of
pytest, quoted as in a shell.
"""

from __future__ import annotations

import ast
import contextlib
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "ci" / "mutants"
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class PlaceError(ValueError):
    """A fault cannot be planted: its place is gone or is not the only one."""


@dataclass(frozen=True)
class Fault:
    """One change that no test suite should let pass."""

    name: str
    file: str
    symbol: str
    old: str
    new: str
    tests: tuple[str, ...]
    nth: int | None = None

    @property
    def place(self) -> str:
        return f"{self.file}, {self.symbol}" if self.symbol else self.file

    def plant(self, text: str) -> str:
        """Return `text`, the content of the file, with the fault in it; its lines keep their numbers.

        Raises:
            PlaceError: the symbol is not there, or does not hold `old` exactly once.
        """
        if self.file.endswith(".py"):
            places = _find_python(text, self.symbol, self.old, self.new)
        else:
            places = [(*span, self.new) for span in _find_c(text, self.symbol, self.old)]
        if not places or (len(places) > 1 and self.nth is None) or len(places) < (self.nth or 1):
            raise PlaceError(f"{self.name}: {self.place} holds its `old` {len(places)} times: {self.old}")
        start, end, new = sorted(places)[(self.nth or 1) - 1]
        return text[:start] + new + text[end:]

    def find_problem(self, root: Path = ROOT) -> str | None:
        """Return the reason why this fault cannot be tried in the repository at `root`, or None if it can."""
        path = root / self.file
        if not path.is_file():
            return f"{self.name}: {self.file} is gone (symbol {self.symbol})"
        try:
            text = path.read_text(encoding="utf-8")
            planted = self.plant(text)
            if planted == text or (self.file.endswith(".py") and ast.dump(ast.parse(planted)) == _dump(text)):
                return f"{self.name}: its `new` is its `old`"
        except (PlaceError, SyntaxError) as error:
            return str(error) if isinstance(error, PlaceError) else f"{self.name}: {self.place}: {error}"
        for argument in self.tests:
            file, _, test = argument.partition("::")
            if argument.startswith("tests/") and not (root / file).exists():
                return f"{self.name}: {file} is gone"
            function = test.partition("[")[0].rpartition("::")[2]
            if function and not re.search(rf"def {function}\b", (root / file).read_text(encoding="utf-8")):
                return f"{self.name}: {file} has no {function}"
        return None


def read_faults(folder: Path = FAULTS) -> list[Fault]:
    """Return every fault, in the order of the files."""
    return [
        Fault(**entry | {"symbol": entry.get("symbol", ""), "tests": tuple(shlex.split(entry["tests"]))})
        for path in sorted(folder.glob("*.yaml"))
        for entry in YAML(typ="safe").load(path)
    ]


def _find_python(text: str, symbol: str, old: str, new: str) -> list[tuple[int, int, str]]:
    """(start, end, replacement) of each place in `symbol` whose syntax tree is that of `old`."""
    starts = [0]  # of each line, in bytes, as ast counts columns
    raw = text.encode()
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(first: Any, last: Any) -> tuple[int, int]:
        ends = starts[first.lineno - 1] + first.col_offset, starts[last.end_lineno - 1] + last.end_col_offset
        return len(raw[: ends[0]].decode()), len(raw[: ends[1]].decode())

    readings = _read(old, new)
    if not readings:
        raise PlaceError(f"{old!r} is no Python that {new!r} could replace")
    roots = _find_symbol(ast.parse(text), symbol)
    nodes = [node for root in roots for node in _walk(root, scopes=bool(symbol))]
    if not symbol:
        nodes = [node for node in nodes if not isinstance(node, _SCOPES)]
    places = []
    for kind, wanted, written in readings:
        for node in nodes:
            for first, last in _match(kind, wanted, node):
                missing = "\n" * (last.end_lineno - first.lineno - written.count("\n"))
                replacement = written
                if kind == "expression":
                    replacement = f"({written}{missing})"
                elif kind == "statements":
                    replacement = textwrap.indent(written, " " * first.col_offset).lstrip() + missing
                places.append((*span(first, last), replacement))
    return places


def _match(kind: str, wanted: list[Any], node: Any) -> Iterator[tuple[Any, Any]]:
    """The first and the last node of each place directly at `node` that is as `wanted`."""
    if kind == "statements":
        for field in ("body", "orelse", "finalbody"):
            block: Any = getattr(node, field, None)
            for at in range(len(block) - len(wanted) + 1) if isinstance(block, list) else ():
                if all(map(_same, block[at:], wanted)):
                    yield block[at], block[at + len(wanted) - 1]
    elif kind == "header":
        parts = _header(node)
        same = type(node) is type(wanted[0]) and len(parts) == len(_header(wanted[0]))
        if same and all(map(_same, parts, _header(wanted[0]))):
            yield parts[0], parts[-1]
    elif _same(node, wanted[0]):
        yield node, node


def _read(old: str, new: str) -> list[tuple[str, list[Any], str]]:
    """(kind, nodes, replacement) of each way in which `old` is Python that `new` may replace."""

    def parse(code: str) -> Any:
        with contextlib.suppress(SyntaxError):
            return ast.parse(code).body
        return None

    old, new = textwrap.dedent(old).strip(), textwrap.dedent(new).strip()
    expressions: list[Any] = [parse(f"(\n{code}\n)") if code else None for code in (old, new)]
    if all(expressions):
        return [("expression", [expressions[0][0].value], new)]
    readings: list[tuple[str, list[Any], str]] = []
    if old.endswith(":") and new.endswith(":"):
        headers = [parse(f"{code}\n    pass") for code in (old, new)]
        if all(headers):
            return [("header", headers[0], new[:-1].partition(" ")[2])]
        return []
    calls = [parse(f"f({code}\n)") for code in (old, new)]
    if all(calls) and len(calls[0][0].value.keywords) == 1 and not calls[0][0].value.args:
        readings.append(("keyword", calls[0][0].value.keywords, new))
    statements = [parse(code) for code in (old, new)]
    if all(statements):
        readings.append(("statements", statements[0], new))
    return readings


def _find_symbol(tree: ast.Module, symbol: str) -> list[ast.AST]:
    """The definitions, or assignments, of a qualified name."""
    roots: list[ast.AST] = [tree]
    for name in filter(None, symbol.split(".")):
        inside = [node for root in roots for node in _walk(root, scopes=False) if node is not root]
        roots = [node for node in inside if name in _names(node)]
    if not roots:
        raise PlaceError(f"no symbol {symbol}")
    return roots


def _names(node: Any) -> list[str]:
    if isinstance(node, _SCOPES):
        return [node.name]
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(node, ast.stmt) and isinstance(target, ast.Name)]


def _walk(root: ast.AST, *, scopes: bool) -> Iterator[ast.AST]:
    """The node and all below it but parts of f-strings; without `scopes`, not the insides of functions and classes."""
    yield root
    if isinstance(root, ast.JoinedStr):  # Python 3.11 does not know the positions of its parts
        return
    for child in ast.iter_child_nodes(root):
        if scopes or not isinstance(child, _SCOPES):
            yield from _walk(child, scopes=scopes)
        else:
            yield child


def _header(node: Any) -> list[ast.AST]:
    if isinstance(node, (ast.If, ast.While)):
        return [node.test]
    if isinstance(node, (ast.For, ast.AsyncFor)):
        return [node.target, node.iter]
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return [part for item in node.items for part in (item.context_expr, item.optional_vars) if part]
    return []


def _same(left: ast.AST, right: ast.AST) -> bool:
    return type(left) is type(right) and ast.dump(left) == ast.dump(right)


def _dump(text: str) -> str:
    return ast.dump(ast.parse(text))


def _find_c(text: str, symbol: str, old: str) -> list[tuple[int, int]]:
    start, end = 0, len(text)
    if symbol:
        definition = re.search(rf"\b{symbol}\s*\([^;{{}}]*\)\s*\{{", text)
        if not definition:
            raise PlaceError(f"no function {symbol}")
        start, depth, end = definition.start(), 1, definition.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
    pattern = re.compile(r"\s+".join(re.escape(word) for word in old.split()))
    return [match.span() for match in pattern.finditer(text, start, end)]
