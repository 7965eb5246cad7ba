"""Types of configuration values: paths, hub ids and shares, in each form that users may write; and `ConfigModel`.

`ConfigModel` is the base of every section. It is strict about keys, and about numbers that pydantic would guess.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from rlhf.config import paths
from rlhf.config.loader import TrackedStr
from rlhf.config.validation_errors import error_at, short_repr

_LARGEST = 2**53
"""The largest whole number that is accepted; floating-point numbers do not represent larger ones exactly."""


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
    PlainSerializer(lambda path: paths.join_path(os.getcwd(), str(path)), when_used="json"),
]
Shares = Annotated[tuple[float, float, float], BeforeValidator(_parse_shares)]
