"""What a schema finds wrong with the values given to it, as one line."""

from __future__ import annotations

import difflib
from typing import get_args

from pydantic import BaseModel, ValidationError


def explained(error: ValidationError, schema: type[BaseModel]) -> str:
    """The first problem, with the key's full path; an unknown key with the nearest that `schema` knows."""
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = _known_keys(schema, problem["loc"][:-1])
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return f"unknown key {key!r}; {hint}"
    message = problem["msg"].removeprefix("Value error, ")
    given = "" if problem["type"] in {"value_error", "missing"} else f", found {problem['input']!r}"
    return f"{key + ': ' if key else ''}{message}{given}"


def _known_keys(section: type[BaseModel], location: tuple[str | int, ...]) -> list[str]:
    """Keys of the section at `location` in `section`."""
    for part in location:
        if isinstance(part, int):
            continue
        annotation = section.model_fields[part].annotation
        candidates = [annotation, *get_args(annotation)]
        section = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(section.model_fields)
