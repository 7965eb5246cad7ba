"""Inputs for the fuzz tests: valid bytes and values, changed at a few places by hypothesis."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

PIECES = [
    *(b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"1.5", b"9" * 5000, b"[" * 3000, b'{"a":' * 3000),
    *(b"{}", b"[]", b'""', b'"', b"'", b"\\", b"\n", b"\r", b"\t", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\\ud800"),
    *(b": ", b"- ", b"&a ", b"*a", b"<<: *a", b"!!bool ", b"!!python/object:os.system ", b"%", b"#", b"|", b"..", b"/"),
    *(b"$", b"${", b"$((", b"`", b"&&", b"=", b"--", b" ", b"\x1b[2J", "\u2028\u00e9\U0001f600".encode()),
]
"""Bytes that mean something to one of the parsers."""

ODD = [
    *(
        "",
        " ",
        "0",
        "-1",
        "nan",
        "auto",
        "none",
        "step",
        "path",
        "../up",
        "/",
        "~",
        "\0",
        "\x1b[2J",
        "\ud800",
        "x" * 5000,
    ),
    *(0, 1, -1, 2, 0.0, -0.5, 1e308, 10**30, 10**400, -(2**63), math.nan, math.inf, True, False, None),
    *([], {}, [None], [[]], [0, "a"], {"": 0}, {"path": 0}, {"a": {"a": []}}),
]
"""Values at the edges of what readers expect."""

values: SearchStrategy[Any] = st.sampled_from(ODD) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)

_places = st.integers(0, 2**20)


def changed_bytes(*valid: bytes) -> SearchStrategy[bytes]:
    """One of `valid` with up to four places flipped, cut, replaced, duplicated, or spliced with another."""
    piece = st.sampled_from(PIECES) | st.binary(max_size=4)
    edits = st.tuples(st.sampled_from(["flip", "cut", "end", "put", "double", "splice"]), _places, _places, piece)

    def change(content: bytes, changes: list[tuple[str, int, int, bytes]]) -> bytes:
        for kind, first, second, new in changes:
            at = first % (len(content) + 1)
            end = at + second % 64
            head, middle, tail = content[:at], content[at:end], content[end:]
            other = valid[second % len(valid)]
            content = {
                "flip": head + bytes(byte ^ (1 << second % 8) for byte in middle[:1]) + content[at + 1 :],
                "cut": head + tail,
                "end": head,
                "put": head + new + (tail if second % 2 else middle + tail),
                "double": head + middle + middle + tail,
                "splice": head + other[first % (len(other) + 1) :],
            }[kind]
        return content

    return st.builds(change, st.sampled_from(valid), st.lists(edits, max_size=4))


def changed_value(valid: Any) -> SearchStrategy[Any]:
    """A copy of `valid` with up to three items set, removed, renamed, nested or repeated."""
    edits = st.tuples(
        st.lists(_places, max_size=6),
        st.sampled_from(["set", "set", "set", "remove", "rename", "nest", "repeat"]),
        values,
    )

    def change(changes: list[tuple[list[int], str, Any]]) -> Any:
        value = copy.deepcopy(valid)
        for path, kind, new in changes:
            value = _change_at(value, path, kind, copy.deepcopy(new))
        return value

    return st.builds(change, st.lists(edits, min_size=1, max_size=3))


def _change_at(value: Any, path: Sequence[int], kind: str, new: Any) -> Any:
    if not path or not isinstance(value, dict | list) or not value:
        return [value] if kind == "nest" else new
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = keys[path[0] % len(keys)]
    inside = isinstance(value[key], dict | list) and len(path) > 1
    if inside or kind in ("set", "nest"):
        value[key] = _change_at(value[key], path[1:], kind, new)
    elif kind == "remove":
        del value[key]
    elif isinstance(value, list):
        value += copy.deepcopy(value[key:])
    else:
        value[str(new)[:20]] = value.pop(key) if kind == "rename" else value[key]
    return value


def changed_json(*valid: bytes) -> SearchStrategy[bytes]:
    """One of `valid`, JSON texts, with changed values, or changed bytes."""
    of_values = [changed_value(json.loads(content)).map(lambda value: json.dumps(value).encode()) for content in valid]
    return st.one_of(*of_values, changed_bytes(*valid))


def changed_json_lines(*valid: bytes) -> SearchStrategy[bytes]:
    """The same for JSON Lines."""

    def write(lines: list[Any]) -> bytes:
        return "".join(json.dumps(line) + "\n" for line in lines).encode()

    of_values = [changed_value([json.loads(line) for line in content.splitlines()]) for content in valid]
    as_lines = [value.map(lambda lines: write(lines if isinstance(lines, list) else [lines])) for value in of_values]
    return st.one_of(*as_lines, changed_bytes(*valid))
