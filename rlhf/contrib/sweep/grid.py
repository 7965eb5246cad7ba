"""Read a grid file, and build the name and the complete configuration of each point of a sweep.

All configurations are built before anything runs, so that an invalid value is an error of the grid. Grid files follow
the rules of recipes: unknown keys are refused, and errors are one line.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from rlhf.config.loader import (
    Origin,
    TrackedDict,
    TrackedList,
    apply_overrides,
    names_model_or_data,
    overlay,
    read_yaml,
)
from rlhf.config.schema import EMBEDDED_RECIPE, EVERY_STAGE, STAGES, Config, Stage, build_config
from rlhf.config.trust import admit_code
from rlhf.config.types import ConfigModel, Folder, explain_validation_error, short_repr
from rlhf.errors import ConfigError
from rlhf.memory.advice import apply_settings
from rlhf.roles.lineage import base_models
from rlhf.runs.resume import find_row_differences
from rlhf.utils.units import parse_bytes

SHARED = "shared"
"""The folder of the shared stages."""

_NAME = re.compile(r"[A-Za-z0-9_][\w.+-]{0,99}", re.ASCII)


class _Exclusion(ConfigModel):
    """Combinations that are excluded, and why."""

    where: dict[str, Any] = Field(
        min_length=1, description="axes, each with the excluded value or label, or a list of them"
    )
    reason: str = Field(min_length=1, description="reason, shown in the table")


class _GridFile(ConfigModel):
    """A sweep: a recipe, and the keys that differ between points."""

    recipe: Folder | None = Field(
        None, description="the recipe that every point starts from; empty: the defaults, or the embedded example"
    )
    base: dict[str, Any] = Field({}, description="keys that replace the recipe's, the same at every point")
    output: Folder | None = Field(None, description="folder of the sweep; empty: runs/ and the name of this file")
    stages: tuple[Stage, ...] = Field(STAGES, min_length=1, description="stages that every point trains")
    share: tuple[Stage, ...] = Field(
        (), description="stages trained once, with recipe and base only; every point starts from their models"
    )
    ranks: int = Field(1, ge=1, description="processes of each point, on this machine")
    memory: str | None = Field(
        None, description="memory of each device, e.g. 80GiB; points that do not fit, by the plan, are refused"
    )
    grid: dict[str, Any] = Field(
        {},
        description="axes: a key with a list of values, or a name with labels that each set keys. The points are all "
        "combinations",
    )
    names: dict[str, Any] = Field(
        {},
        description="how an axis that is a key appears in the names of points: a word before its value, or a label for "
        "each value; empty to omit it",
    )
    points: dict[str, dict[str, Any]] = Field({}, description="further points by name, each with its keys")
    exclude: tuple[_Exclusion, ...] = Field((), description="combinations to exclude, with a reason")

    @field_validator("grid")
    @classmethod
    def _check_axes(cls, grid: dict[str, Any]) -> dict[str, Any]:
        for axis, values in grid.items():
            if not isinstance(values, list | dict) or not values:
                shown = "an empty one" if isinstance(values, list | dict) else short_repr(values)
                raise ValueError(f"{axis} needs a list of values, or labels that set keys, got {shown}")
            for label, keys in values.items() if isinstance(values, dict) else ():
                if keys is not None and not isinstance(keys, dict):
                    raise ValueError(f"{axis}.{label} needs keys and values, got {short_repr(keys)}")
        return grid

    @field_validator("names")
    @classmethod
    def _check_names(cls, names: dict[str, Any]) -> dict[str, Any]:
        for axis, named in names.items():
            words = named.values() if isinstance(named, dict) else [named]
            if not all(isinstance(word, str) for word in words):
                raise ValueError(f"{axis} needs a word, or a label for each value, got {short_repr(named)}")
        return names

    @field_validator("points", mode="before")
    @classmethod
    def _fill_points(cls, points: Any) -> Any:
        """Accept points without keys, which are the base itself."""
        if not isinstance(points, dict):
            return points
        return {name: {} if keys is None else keys for name, keys in points.items()}


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        labels: its label on each axis.
        keys: the keys that it sets.
        config: its complete configuration.
        alone: the configuration without the models of the shared stages, whose shapes are known before training.
        stages: the stages to train.
    """

    name: str
    labels: dict[str, str]
    keys: dict[str, Any]
    config: Config
    alone: Config
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Grid:
    """The contents of a grid file; `memory` is that of a device, in bytes."""

    file: Path
    recipe: Path | None
    output: Path
    ranks: int
    memory: int | None
    axes: tuple[str, ...]
    stages: tuple[Stage, ...]
    points: tuple[Point, ...]
    excluded: dict[str, str]
    shared: Point | None

    def admit_code(self, *, trust: bool = False, dry_run: bool = False) -> None:
        """Print which code the points will run, and refuse that of other users without consent.

        Raises:
            ConfigError: as `rlhf.config.trust.admit_code`, for the grid file and its recipe; or a dry run without
                `trust` would run code.
        """
        points = [*self.points, *([self.shared] if self.shared else [])]
        stages = {stage for point in points for stage in point.stages}
        files = [self.file, *([self.recipe] if self.recipe else [])]
        admit_code([point.config for point in points], files, sorted(stages), trust=trust, dry_run=dry_run)


@dataclass(frozen=True)
class _Value:
    """One value of an axis: its label, its text in the file, the keys it sets, and where they were written."""

    label: str
    text: str
    keys: TrackedDict
    origin: Origin | None = None


def load_grid(
    path: Path, overrides: Sequence[str] = (), *, options: Mapping[str, Any] | None = None, ranks: int | None = None
) -> Grid:
    """Read a grid file and build every point.

    Args:
        path: the grid file.
        overrides: `key=value` texts that replace keys of the recipe and the base, but not those of axes.
        options: options that are keys (`output` is the sweep's folder).
        ranks: number of processes per point; None for the file's.

    Raises:
        ConfigError: the file cannot be read, a key, a value or a point's configuration is invalid, or two points have
            the same name.
    """
    raw = read_yaml(path, "the name of the grid file")
    file = _validate(raw, str(path))
    options = dict(options or {})
    output = Path(options.pop("output", None) or file.output or Path("runs") / path.stem)
    given = apply_overrides(TrackedDict(), overrides, options)
    axes = _read_axes(file, raw)
    _check_overlaps(path, axes, given)
    chosen, excluded = _combine_axes(file, path, axes)
    chosen |= {name: ({}, [_Value(name, name, raw["points"][name] or TrackedDict())]) for name in file.points}
    _check_keys(file, path, {key for _, values in chosen.values() for key in _list_keys(values)})
    build = partial(_build_point, file, raw, path, given, output)
    points = [build(name, labels, values, file.stages) for name, (labels, values) in chosen.items()]
    shared = build(SHARED, {}, [], file.share) if file.share else None
    if shared:
        for point in points:
            _check_rows(path, point, shared)
    return Grid(
        file=path,
        recipe=file.recipe and Path(file.recipe),
        output=output,
        ranks=ranks or file.ranks,
        memory=parse_bytes(file.memory, f"{path}: memory") if file.memory else None,
        axes=tuple(axes),
        stages=tuple(stage for stage in EVERY_STAGE if stage in file.stages),
        points=tuple(_start_from_shared(point, file, path, output) for point in points),
        excluded=excluded,
        shared=shared,
    )


def _validate(values: Mapping[str, Any], source: str) -> _GridFile:
    try:
        file = _GridFile.model_validate(values)
    except ValidationError as error:
        raise explain_validation_error(error, _GridFile, values, source) from error
    if not file.grid and not file.points:
        raise ConfigError(f"{source}: grid: no axis; add a key with values, e.g. engine.zero_stage: [2, 3]")
    return file


def _read_axes(file: _GridFile, raw: TrackedDict) -> dict[str, list[_Value]]:
    """Return the values of each axis, in the grid's order."""
    lists = [axis for axis, values in file.grid.items() if isinstance(values, list)]
    for axis in file.names:
        if axis not in lists:
            where = raw["names"].origins[axis].text
            raise ConfigError(
                f"{where}: names: {axis!r} is not an axis with a list of values; {_suggest_axis(axis, lists)}"
            )
    axes: dict[str, list[_Value]] = {}
    for axis, values in raw["grid"].items() if file.grid else ():
        if isinstance(values, TrackedList):
            axes[axis] = [
                _Value(
                    _label(axis, value, file.names.get(axis)),
                    _format_value(value),
                    TrackedDict({axis: value}),
                    values.origins[at],
                )
                for at, value in enumerate(values)
            ]
        else:
            axes[axis] = [
                _Value(
                    label, label, keys or TrackedDict(), Origin(f"{values.origins[label].text}: grid.{axis}.{label}")
                )
                for label, keys in values.items()
            ]
    return axes


def _check_overlaps(path: Path, axes: Mapping[str, list[_Value]], given: TrackedDict) -> None:
    """Check that no two axes, and no axis and the command line, set the same key."""
    keys_of = {axis: _list_keys(values) for axis, values in axes.items()}
    for axis, keys in keys_of.items():
        if key := _find_overlap((key for key, _ in _flatten(given)), keys):
            raise ConfigError(f"{key}: set by the axis {axis} of {path}; change it there, or remove this option")
    for (axis, keys), (other, other_keys) in itertools.combinations(keys_of.items(), 2):
        if key := _find_overlap(keys, other_keys):
            raise ConfigError(f"{path}: {key}: set by both axes {axis} and {other}; remove it from one of them")


def _find_overlap(keys: Iterable[str], others: Iterable[str]) -> str | None:
    """Return a key that is one of the others, or a section that contains one, or is contained in one."""
    for key, other in itertools.product(keys, others):
        if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
            return key
    return None


def _combine_axes(
    file: _GridFile, path: Path, axes: Mapping[str, list[_Value]]
) -> tuple[dict[str, tuple[dict[str, str], list[_Value]]], dict[str, str]]:
    """Return (the labels and values of each combination by name, the reasons for excluded ones by name)."""
    for exclusion in file.exclude:
        _check_exclusion(exclusion, path, axes)
    chosen: dict[str, tuple[dict[str, str], list[_Value]]] = {}
    excluded: dict[str, str] = {}
    for values in itertools.product(*axes.values()) if axes else ():
        choice = dict(zip(axes, values, strict=True))
        labels = {axis: value.label for axis, value in choice.items()}
        name = "-".join(filter(None, labels.values())) or "base"
        if name in chosen or name in excluded:
            raise ConfigError(f"{path}: two points are called {name}; set different labels in `names`, or in the axis")
        if reason := next((exclusion.reason for exclusion in file.exclude if _is_excluded(exclusion, choice)), None):
            excluded[name] = " ".join(reason.split())
        else:
            chosen[name] = (labels, [*values])
    for name in (*chosen, *file.points):
        if name in file.points and (name in chosen or name in excluded):
            raise ConfigError(f"{path}: points.{name}: the grid has a point with this name; choose another")
        if not _NAME.fullmatch(name) or name in (SHARED, "recipes"):
            raise ConfigError(
                f"{path}: {name!r} is not a valid name of a point (a folder); use at most 100 letters, digits "
                "and any of _.+- in `names` or as labels"
            )
    if not chosen and not file.points:
        raise ConfigError(f"{path}: exclude: all points are excluded; remove some of these entries")
    return chosen, excluded


def _check_exclusion(exclusion: _Exclusion, path: Path, axes: Mapping[str, list[_Value]]) -> None:
    for axis, wanted in exclusion.where.items():
        if axis not in axes:
            raise ConfigError(f"{path}: exclude: unknown axis {axis!r}; {_suggest_axis(axis, axes)}")
        known = {word for value in axes[axis] for word in (value.label, value.text)}
        if unknown := [text for text in _format_values(wanted) if text not in known]:
            raise ConfigError(
                f"{path}: exclude: the axis {axis} has no value {unknown[0]!r}; it has "
                f"{', '.join(value.label or repr(value.text) for value in axes[axis])}"
            )


def _is_excluded(exclusion: _Exclusion, choice: Mapping[str, _Value]) -> bool:
    return all(
        {choice[axis].label, choice[axis].text} & {*_format_values(wanted)} for axis, wanted in exclusion.where.items()
    )


def _check_keys(file: _GridFile, path: Path, keys: set[str]) -> None:
    """Check that no point sets its folder, or a key that a shared stage reads."""
    for stage in file.share:
        if stage in file.stages:
            raise ConfigError(f"{path}: share: {stage} is also in `stages`; remove it from one of them")
        for key in sorted(keys):
            if key.startswith(f"{stage}."):
                raise ConfigError(
                    f"{path}: {key}: differs between points, but the shared stage {stage} reads it; remove {stage} "
                    "from `share`, or the key from the grid"
                )
    if "output" in keys:
        raise ConfigError(f"{path}: output: each point has its own folder; remove this key")


def _check_rows(path: Path, point: Point, shared: Point) -> None:
    """Check that a point divides the rows as the shared stages do; otherwise it holds out rows that they train on."""
    for key, there, here in find_row_differences(shared.config, point.config, shared.stages):
        stages = " and ".join(shared.stages)
        remedy = "set data.seed in `base`, which seeds the rows alone" if key == "seed" else "set it in `base`"
        raise ConfigError(
            f"{path}: {key}: decides which rows or which model each stage gets, so all points must have the value "
            f"of the shared {stages}, {short_repr(there)}, got {short_repr(here)} in {point.name}; {remedy}, or remove "
            f"{stages} from `share`"
        )


def _build_point(
    file: _GridFile,
    raw: TrackedDict,
    path: Path,
    given: TrackedDict,
    output: Path,
    name: str,
    labels: dict[str, str],
    choice: Sequence[_Value],
    stages: Sequence[Stage],
) -> Point:
    """Build a point: the recipe, then the base, then the `given` options, then the keys of its `choice`."""
    keys = TrackedDict()
    for value in choice:
        overlay(keys, value.keys, value.origin)
    above = overlay(overlay(overlay(TrackedDict(), raw.get("base") or TrackedDict()), given), keys)
    start = file.recipe or (None if names_model_or_data(above) else EMBEDDED_RECIPE)
    values = overlay(read_yaml(start, f"`recipe` in {path}") if start else TrackedDict(), above)
    values["output"] = str(output / name)
    try:
        config = build_config(values, source=str(path))
    except ConfigError as error:
        raise ConfigError(f"{error} (point {name})") from error
    ordered = tuple(stage for stage in EVERY_STAGE if stage in stages)
    return Point(name, labels, dict(_flatten(keys)), config, config, ordered)


def _start_from_shared(point: Point, file: _GridFile, path: Path, output: Path) -> Point:
    """Return the point with the models of the shared stages as base models.

    Raises:
        ConfigError: a stage starts from a stage that the sweep does not train.
    """
    config = point.config
    for stage in point.stages:
        for ref in base_models(config, stage):
            if ref.named_in(config) or ref.trained_by is None or ref.trained_by in point.stages:
                continue
            if ref.trained_by not in file.share:
                raise ConfigError(
                    f"{path}: stages: {stage} starts from the model of {ref.trained_by}, which no point trains; add "
                    f"it to `stages` or to `share`, or set {ref.key} (point {point.name})"
                )
            config = apply_settings(config, {ref.key: str(output / SHARED / ref.trained_by / "model")})
    return replace(point, config=config)


def _label(axis: str, value: Any, named: Any) -> str:
    """Return the label of a value in the name of a point; `named` is the axis' entry in `names`."""
    text = _format_value(value)
    if isinstance(named, dict) and text in named:
        return str(named[text])
    word = named if isinstance(named, str) else axis.rpartition(".")[2]
    if isinstance(value, bool):
        return word if value else f"no-{word}"
    parts = [str(part) for part in value] if isinstance(value, list) else [text]
    return word + "_".join(re.sub(r"[^\w.+-]+", "_", Path(part).name) for part in parts)


def _format_value(value: Any) -> str:
    """Return a value as people write it in YAML: `true`, `null`, `1e-5`."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return re.sub(r"e([-+])0(?=\d)", r"e\1", str(value)) if isinstance(value, float) else str(value)


def _format_values(values: Any) -> list[str]:
    return [_format_value(value) for value in (values if isinstance(values, list) else [values])]


def _suggest_axis(axis: str, axes: Iterable[str]) -> str:
    near = difflib.get_close_matches(axis, list(axes), n=1)
    return f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(axes) or '(no axes)'}"


def _list_keys(values: Iterable[_Value]) -> list[str]:
    return [key for value in values for key, _ in _flatten(value.keys)]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, TrackedDict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
