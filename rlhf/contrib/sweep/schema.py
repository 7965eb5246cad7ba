"""What a grid file may say, by the same rules as a recipe: strict about its keys, errors of one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError, field_validator

from rlhf.config.schema import STAGES, Stage
from rlhf.config.types import ConfigModel, Folder
from rlhf.config.validation_errors import format_validation_error, short_repr
from rlhf.errors import ConfigError


class Exclusion(ConfigModel):
    """Points that are left out, and why."""

    where: dict[str, Any] = Field(
        min_length=1, description="axes, each with the value, the label, or the list of them that is left out"
    )
    reason: str = Field(min_length=1, description="why; the table shows it")


class GridFile(ConfigModel):
    """A sweep: a recipe, and what differs at each point."""

    recipe: Folder | None = Field(
        None, description="the recipe that every point starts from; empty: the defaults, or the embedded example"
    )
    base: dict[str, Any] = Field({}, description="keys above the recipe's, the same at every point")
    output: Folder | None = Field(None, description="folder of the sweep; empty: runs/ and the name of this file")
    stages: tuple[Stage, ...] = Field(STAGES, min_length=1, description="stages that every point trains")
    share: tuple[Stage, ...] = Field(
        (), description="stages trained once, with the base alone; every point starts from what they leave"
    )
    ranks: int = Field(1, ge=1, description="processes of each point, on this machine")
    memory: str | None = Field(
        None, description="memory of each device, e.g. 80GiB; points that the plan finds too large are refused"
    )
    grid: dict[str, Any] = Field(
        {},
        description="axes: a key with a list of values; or a name with labels, each with keys of its own. The points "
        "are all combinations",
    )
    names: dict[str, Any] = Field(
        {},
        description="how an axis that is a key is written in the names of points: a word before its value, or a label "
        "for each value; an empty one leaves it out",
    )
    points: dict[str, dict[str, Any]] = Field({}, description="further points by name, each with its keys")
    exclude: tuple[Exclusion, ...] = Field((), description="combinations that are left out, with a reason")

    @field_validator("grid")
    @classmethod
    def _axes(cls, grid: dict[str, Any]) -> dict[str, Any]:
        for axis, values in grid.items():
            if not isinstance(values, list | dict) or not values:
                raise ValueError(f"{axis} needs a list of values, or labels with keys of their own, got {_of(values)}")
            for label, keys in values.items() if isinstance(values, dict) else ():
                if keys is not None and not isinstance(keys, dict):
                    raise ValueError(f"{axis}.{label} needs keys and values, got {short_repr(keys)}")
        return grid

    @field_validator("names")
    @classmethod
    def _words(cls, names: dict[str, Any]) -> dict[str, Any]:
        for axis, named in names.items():
            words = named.values() if isinstance(named, dict) else [named]
            if not all(isinstance(word, str) for word in words):
                raise ValueError(f"{axis} needs a word, or a label for each value, got {short_repr(named)}")
        return names

    @field_validator("points", mode="before")
    @classmethod
    def _bare(cls, points: Any) -> Any:
        """A point without keys is the base itself."""
        return (
            {name: {} if keys is None else keys for name, keys in points.items()}
            if isinstance(points, dict)
            else points
        )


def parsed(values: Mapping[str, Any], source: str) -> GridFile:
    """The grid in nested values.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
    """
    try:
        found = GridFile.model_validate(values)
    except ValidationError as error:
        raise ConfigError(format_validation_error(error, GridFile, values, source)) from error
    if not found.grid and not found.points:
        raise ConfigError(f"{source}: grid: has no axis; give it a key with values, e.g. engine.zero_stage: [2, 3]")
    return found


def _of(values: Any) -> str:
    return "an empty one" if isinstance(values, list | dict) else short_repr(values)
