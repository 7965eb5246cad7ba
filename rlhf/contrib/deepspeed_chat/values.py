"""Values of flags and variables as the settings have them: text flows in, what a key takes flows out.

A function raises `ValueError` that says what was expected; `NOTHING` is a value that asks for nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

NOTHING = object()
"""What a value becomes that is the same as leaving the flag or variable out."""

SCHEDULES = {
    "linear": "linear",
    "polynomial": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
"""A schedule there -> the one here; polynomial is of degree 1 there, and restarts once, which is not at all."""


def text(value: str) -> str:
    """As written."""
    return value


def whole(value: str) -> int:
    """A whole number, 0 or more."""
    if not value.strip().isdecimal():
        raise ValueError("a whole number")
    return int(value)


def positive(value: str) -> Any:
    """A number of steps; 0 is no limit."""
    return whole(value) or NOTHING


def several(value: str) -> Any:
    """A number of machines; one is what there is."""
    return NOTHING if whole(value) == 1 else whole(value)


def number(value: str) -> float:
    """Any number that is finite."""
    try:
        found = float(value)
    except ValueError:
        found = float("nan")
    if not abs(found) < float("inf"):
        raise ValueError("a number")
    return found


def half(value: str) -> int:
    """Tokens of a prompt, and of a completion, of so many in all."""
    if whole(value) < 2:
        raise ValueError("a whole number of at least 2")
    return whole(value) // 2


def switch(value: str) -> bool:
    """0 or 1."""
    if value not in ("0", "1"):
        raise ValueError("0 or 1")
    return value == "1"


def capture(value: str) -> Any:
    """Whether rollouts are recorded as graphs, which they are unless told otherwise."""
    return NOTHING if switch(value) else "none"


def only_adapters(value: str) -> list[str]:
    """What is trained beside the adapters."""
    return [] if switch(value) else ["norms", "biases", "embeddings"]


def names(value: str) -> list[str]:
    """Names with spaces between them."""
    return value.split()


def sources(value: str) -> list[Any]:
    """Sources of rows; of several all rows are taken, where rlhf would blend them in equal parts."""
    found = value.split()
    return found if len(found) < 2 else [{"path": name, "weight": "all"} for name in found]


def schedule(value: str) -> str:
    """The name of a schedule there; `SCHEDULES` has ours."""
    if value not in SCHEDULES:
        raise ValueError(f"one of {', '.join(SCHEDULES)}")
    return value


def precision(value: str) -> str:
    """The numbers that are computed in."""
    if value not in ("fp16", "bf16"):
        raise ValueError("fp16 or bf16")
    return value


def shares(value: str) -> list[float]:
    """Proportions of the three steps, with commas between them."""
    parts = value.split(",")
    if len(parts) != 3:
        raise ValueError("three shares, for example 2,4,4")
    return [int(part) if part.isdecimal() else number(part) for part in parts]


READERS: Mapping[str, Callable[[str], Any]] = {
    function.__name__: function
    for function in (
        *(text, whole, positive, several, number, half, switch, capture, only_adapters, names, schedule, precision),
        *(shares, sources),
    )
}
"""By the name that the tables know them by."""
