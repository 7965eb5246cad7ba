"""Turn pydantic's validation errors into one line that names the origin, the key, the problem and the remedy."""

from __future__ import annotations

import difflib
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from rlhf.config.loader import find_origin

_MAX_SHOWN = 60  # characters of a value in an error

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "int_from_float": "a whole number",
    "finite_number": "a finite number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "string_too_short": "a name",
    "path_type": "a path",
    "literal_error": "{expected}",
    "tuple_type": "a list",
    "model_type": "keys and values",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "too_short": "at least {min_length} item",
    "too_long": "{max_length} items",
}
"""The expected kind of value, by pydantic's type of error."""


def error_at(key: str, text: str) -> PydanticCustomError:
    """Return the error that a section's validator raises about its `key`."""
    return PydanticCustomError("at_key", "{text}", {"key": key, "text": text})


def format_validation_error(error: ValidationError, schema: type[BaseModel], values: Any, source: str) -> str:
    """Return one line about the first problem: where the value was written, the key's full path, what is wrong.

    An unknown key comes with the closest known one.

    Args:
        error: pydantic's error.
        schema: the model that the values were validated with.
        values: the values, tracked if they come from a file or the command line.
        source: where the values come from, if their origin is not tracked.
    """
    problem = error.errors()[0]
    location = problem["loc"]
    if problem["type"] == "at_key":
        location += tuple(problem["ctx"]["key"].split("."))
    if problem["type"] == "missing" and isinstance(location[-1], int):  # an item of a list of fixed length
        location = location[:-1]
    key = ".".join(str(part) for part in location)
    origin = find_origin(values, location)
    text = _describe_problem(problem, key, schema)
    if problem["type"] != "extra_forbidden" and key and not (origin and origin.key == key):
        text = f"{key}: {text}"
    return f"{origin.text if origin else source}: {text}"


def short_repr(value: Any) -> str:
    """Return a value on one line, shortened if it is long."""
    if value is None:
        return "nothing"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _describe_problem(problem: ErrorDetails, key: str, schema: type[BaseModel]) -> str:
    kind, location, value = problem["type"], problem["loc"], problem["input"]
    if kind == "extra_forbidden":
        known = _known_keys(schema, location[:-1])
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(known)}"
        return f"unknown key {key!r}; {hint}"
    if kind in ("value_error", "at_key"):
        return problem["msg"].removeprefix("Value error, ")
    if kind == "missing" and isinstance(location[-1], str):
        return "missing; set a value"
    if kind == "missing":
        return f"expected more items, got {short_repr(value)}"
    if kind not in _EXPECTED:
        return f"{problem['msg']}, got {short_repr(value)}"
    expected = _EXPECTED[kind].format(**problem.get("ctx", {})).replace("True", "true").replace("False", "false")
    quote = "; put it in quotes" if expected in ("text", "a path") and isinstance(value, bool | int | float) else ""
    return f"expected {expected}, got {short_repr(value)}{quote}"


def _known_keys(section: type[BaseModel], location: tuple[str | int, ...]) -> list[str]:
    """Return the keys of the section at `location` below `section`."""
    for part in location:
        if isinstance(part, int):
            continue
        annotation = section.model_fields[part].annotation
        candidates = [annotation, *get_args(annotation)]
        section = next(c for c in candidates if isinstance(c, type(BaseModel)))  # on Python 3.10 list[str] is a type
    return list(section.model_fields)
