"""Kinds of values that keys of the schema take: names, folders, shares; in each form that they may be written in.

`ConfigModel` is what holds them: strict about its keys, and about numbers that pydantic would guess.
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

_MOST = 2**53
"""Whole numbers beyond this are a slip, and no floating-point number holds them."""


class ConfigModel(BaseModel):
    """Base of every section: immutable, and strict about its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, values: Any) -> Any:
        """A section whose keys are all commented out is empty; `yes` is no number.

        Raises:
            PydanticCustomError: a number is true or false, or beyond all use.
        """
        if not isinstance(values, Mapping):
            return {} if values is None else values
        for name, value in values.items():
            annotation = cls.model_fields[name].annotation if name in cls.model_fields else None
            kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
            if isinstance(value, bool) and (int in kinds or float in kinds):
                raise error_at(str(name), f"expected a number, got {short_repr(value)}")
            if isinstance(value, int) and abs(value) > _MOST:
                raise error_at(str(name), f"expected a number of at most {_MOST:,}, got {short_repr(value)}")
        return values


def _name(name: Any) -> Any:
    """A name in the settings, its path from the working directory: `~` and the folder of a recipe are put before.

    Raises:
        ValueError: it stands in a recipe for a hub's, and would be taken for what the working directory holds.
    """
    if isinstance(name, TrackedStr) and name:
        found = paths.resolve_relative_to(name.folder, name)
        if paths.is_local_only(found):
            path = os.path.relpath(name, name.folder or os.curdir)
            raise ValueError(
                f"{name} is not beside the recipe but in the working directory; write {path} for that one, or start "
                "rlhf in another folder for the hub's"
            )
        return found
    return os.path.expanduser(name) if isinstance(name, str) else name


def _folder(path: Any) -> Any:
    """`_name` of what can only be a path."""
    if isinstance(path, TrackedStr):
        return paths.join_path(path.folder, path)
    return os.path.expanduser(path) if isinstance(path, str | Path) else path


def _shares(value: Any) -> tuple[float, ...]:
    """What `data.stage_split` is given: 2:4:4 or [2, 4, 4].

    Raises:
        ValueError: it is something else.
    """
    parts = value.split(":") if isinstance(value, str) else value
    try:
        shares = tuple(float(part) for part in parts) if isinstance(parts, list | tuple) else ()
    except (TypeError, ValueError, OverflowError):
        shares = ()
    if len(shares) != 3:
        raise ValueError(f"expected shares of sft, reward and ppo, for example 2:4:4, got {short_repr(value)}")
    if not all(share >= 0 for share in shares) or not 0 < sum(shares) < math.inf:
        raise ValueError(f"{short_repr(value)} needs shares >= 0, one of them positive; for example 2:4:4")
    return shares


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
# JSON is read from other working directories: there, paths are absolute.
PathOrHubId = Annotated[
    str, Field(min_length=1), BeforeValidator(_name), PlainSerializer(paths.make_absolute, when_used="json")
]
OptionalPathOrHubId = Annotated[
    str | None,
    BeforeValidator(lambda name: _name(name) or None),
    PlainSerializer(lambda name: name and paths.make_absolute(name), when_used="json"),
]
Folder = Annotated[
    Path,
    BeforeValidator(_folder),
    PlainSerializer(lambda path: paths.join_path(os.getcwd(), str(path)), when_used="json"),
]
Shares = Annotated[tuple[float, float, float], BeforeValidator(_shares)]
