"""Types of configuration values, the base of every section, and the one-line errors about what is wrong in them.

Paths, hub ids and shares are accepted in each form that users may write. `ConfigModel` is strict about keys, and about
numbers that pydantic would guess.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from rlhf.config import paths
from rlhf.config.loader import TrackedStr, find_origin
from rlhf.errors import InvalidValuesError

_LARGEST = 2**53  # the largest whole number; floating-point numbers do not represent larger ones exactly
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


class ConfigModel(BaseModel):
    """Base of every section: immutable, and strict about its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_numbers(cls, values: Any) -> Any:
        """Turn a section without keys into an empty one, and refuse true, false and huge values for numbers.

        Raises:
            PydanticCustomError: a number is true, false or too large.
        """
        if not isinstance(values, Mapping):
            return {} if values is None else values
        for name, value in values.items():
            annotation = cls.model_fields[name].annotation if name in cls.model_fields else None
            kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
            if isinstance(value, bool) and (int in kinds or float in kinds):
                raise error_at(str(name), f"expected a number, got {short_repr(value)}")
            if isinstance(value, int) and abs(value) > _LARGEST:
                raise error_at(str(name), f"expected a number of at most {_LARGEST:,}, got {short_repr(value)}")
        return values


def _resolve_name(name: Any) -> Any:
    """Return a path or hub id, the path relative to the working directory; `~` is expanded.

    Raises:
        ValueError: a hub id in a recipe has the name of a file or folder in the working directory.
    """
    if isinstance(name, TrackedStr) and name:
        resolved = paths.resolve_relative_to(name.folder, name)
        if paths.is_local_only(resolved):
            path = os.path.relpath(name, name.folder or os.curdir)
            raise ValueError(
                f"{name} is in the working directory, but paths in a recipe are relative to the recipe; write {path} "
                "for that folder, or start rlhf elsewhere to use the hub's"
            )
        return resolved
    return os.path.expanduser(name) if isinstance(name, str) else name


def _resolve_path(path: Any) -> Any:
    """Return a path relative to the working directory; `~` is expanded."""
    if isinstance(path, TrackedStr):
        return paths.join_path(path.folder, path)
    return os.path.expanduser(path) if isinstance(path, str | Path) else path


def _parse_shares(value: Any) -> tuple[float, ...]:
    """Return the shares in `data.stage_split`, 2:4:4 or [2, 4, 4].

    Raises:
        ValueError: there are not three shares, or they are negative or all 0.
    """
    parts = value.split(":") if isinstance(value, str) else value
    try:
        shares = tuple(float(part) for part in parts) if isinstance(parts, list | tuple) else ()
    except (TypeError, ValueError, OverflowError):
        shares = ()
    if len(shares) != 3:
        raise ValueError(f"expected shares of sft, reward and ppo, for example 2:4:4, got {short_repr(value)}")
    if not all(share >= 0 for share in shares) or not 0 < sum(shares) < math.inf:
        raise ValueError(f"expected shares >= 0 with one above 0, for example 2:4:4, got {short_repr(value)}")
    return shares


def _check_encodable(path: Path) -> Path:
    """Refuse a path that no file of settings can name: its bytes are no UTF-8."""
    absolute = paths.join_path(os.getcwd(), str(path))
    if absolute.encode("utf-8", "ignore").decode() != absolute:
        raise ValueError(f"expected a path in UTF-8, got {absolute!a}")
    return path


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
# JSON is read from other working directories, so its paths are absolute.
PathOrHubId = Annotated[
    str, Field(min_length=1), BeforeValidator(_resolve_name), PlainSerializer(paths.make_absolute, when_used="json")
]
OptionalPathOrHubId = Annotated[
    str | None,
    BeforeValidator(lambda name: _resolve_name(name) or None),
    PlainSerializer(lambda name: name and paths.make_absolute(name), when_used="json"),
]
Folder = Annotated[
    Path,
    BeforeValidator(_resolve_path),
    AfterValidator(_check_encodable),
    PlainSerializer(lambda path: paths.join_path(os.getcwd(), str(path)), when_used="json"),
]
Shares = Annotated[tuple[float, float, float], BeforeValidator(_parse_shares)]


def error_at(key: str, text: str) -> PydanticCustomError:
    """Return the error that a section's validator raises about its `key`."""
    return PydanticCustomError("at_key", "{text}", {"key": key, "text": text})


def explain_validation_error(
    error: ValidationError, schema: type[BaseModel], values: Any, source: str
) -> InvalidValuesError:
    """Return the error with one line for each problem: where the value was written, the key's path, what is wrong.

    An unknown key comes with the closest known ones.

    Args:
        error: pydantic's error.
        schema: the model that the values were validated with.
        values: the values, tracked if they come from a file or the command line.
        source: where the values come from, if their origin is not tracked.
    """
    problems = error.errors()
    locations = [problem["loc"] for problem in problems]
    return InvalidValuesError(
        _format_problem(problem, schema, values, source)
        for place, problem in enumerate(problems)
        # A list without a valid item counts as too short, too.
        if not any(other[: len(problem["loc"])] == problem["loc"] for other in locations[:place])
    )


def _format_problem(problem: ErrorDetails, schema: type[BaseModel], values: Any, source: str) -> str:
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
        close = difflib.get_close_matches(str(location[-1]), known, n=1) or _find_elsewhere(str(location[-1]), schema)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"use one of {', '.join(known)}"
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


def _find_elsewhere(name: str, schema: type[BaseModel]) -> list[str]:
    """Return the paths of up to three keys of any section whose name is like `name`."""
    paths = list(_all_keys(schema))
    names = difflib.get_close_matches(name, {path.rpartition(".")[2] for path in paths}, n=1, cutoff=0.8)
    return [path for path in paths if path.rpartition(".")[2] in names][:3]


def _all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the paths of all keys of a section, without those of items of lists."""
    for name, field in section.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type(BaseModel)):
            yield from _all_keys(field.annotation, f"{prefix}{name}.")


def _known_keys(section: type[BaseModel], location: tuple[str | int, ...]) -> list[str]:
    """Return the keys of the section at `location` below `section`."""
    for part in location:
        if isinstance(part, int):
            continue
        annotation = section.model_fields[part].annotation
        candidates = [annotation, *get_args(annotation)]
        section = next(c for c in candidates if isinstance(c, type(BaseModel)))  # on Python 3.10 list[str] is a type
    return list(section.model_fields)
