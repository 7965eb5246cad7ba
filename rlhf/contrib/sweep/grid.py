"""The points of a sweep: a grid file flows in; names, what each point sets, and its whole configuration flow out.

Every point's configuration is built before anything runs, so that a value that cannot be is an error of the grid.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf.config.loader import (
    Origin,
    TrackedDict,
    TrackedList,
    apply_overrides,
    names_model_or_data,
    overlay,
    read_yaml,
)
from rlhf.config.schema import EMBEDDED_RECIPE, EVERY_STAGE, Config, Stage, build_config
from rlhf.contrib.sweep.schema import Exclusion, GridFile, parsed
from rlhf.errors import ConfigError
from rlhf.memory.advice import apply_settings
from rlhf.roles.lineage import base_models
from rlhf.utils.units import parse_bytes

SHARED = "shared"
"""The folder of the stages that all points share."""
RESERVED = (SHARED, "recipes")

_NAME = re.compile(r"[A-Za-z0-9_][\w.+-]{0,99}", re.ASCII)
_OF_THE_START = ("model.path", "model.tokenizer")


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its name, the label that it has on each axis, the keys that it sets, and all settings.

    `alone` starts from nothing that the shared stages leave: shapes of models are known before these are there.
    """

    name: str
    labels: dict[str, str]
    keys: dict[str, Any]
    config: Config
    alone: Config
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Grid:
    """What a grid file asks for; `memory` is bytes of a device."""

    file: Path
    output: Path
    ranks: int
    memory: int | None
    axes: tuple[str, ...]
    stages: tuple[Stage, ...]
    points: tuple[Point, ...]
    excluded: dict[str, str]
    shared: Point | None


@dataclass(frozen=True)
class _Value:
    """One value of an axis: its label, how the grid writes it, its keys, and where they were given."""

    label: str
    text: str
    keys: TrackedDict
    origin: Origin | None


def load_grid(
    path: Path, overrides: Sequence[str] = (), *, options: Mapping[str, Any] | None = None, ranks: int | None = None
) -> Grid:
    """Read a grid file and build every point.

    Args:
        overrides: `key=value` texts above the recipe and the base, and below the axes.
        options: options that are keys (`output` is the sweep's folder).
        ranks: in place of the file's.

    Raises:
        ConfigError: the file cannot be read, a key or value is wrong, a point's settings are, or two points share a
            name.
    """
    raw = read_yaml(path, "the name of the grid file")
    file = parsed(raw, str(path))
    options = dict(options or {})
    output = options.pop("output", None) or file.output or Path("runs") / path.stem
    given = apply_overrides(TrackedDict(), overrides, options)
    axes = _axes(file, raw)
    for key in _leaves(given):
        if axis := next((axis for axis in axes if any(_meet(key, other) for other in _keys_of(axes[axis]))), None):
            raise ConfigError(f"{key}: is swept by the axis {axis} of {path}; change it there, or leave it out")
    for one, other in itertools.combinations(axes, 2):
        theirs = _keys_of(axes[other])
        if both := next((key for key in _keys_of(axes[one]) if any(_meet(key, their) for their in theirs)), None):
            raise ConfigError(f"{path}: {both}: is set by the axes {one} and {other}; leave it to one of them")
    base = _Base(file, raw, path, given)
    chosen, excluded = _chosen(file, path, axes)
    wanted = [(name, labels, values) for name, (labels, values) in chosen.items()]
    wanted += [(name, {}, [_point_of(raw, name, path)]) for name in file.points]
    keys = {key for _, _, values in wanted for key in _keys_of(values)}
    _check_share(file, path, keys)
    points = tuple(base.point(output, name, labels, values, file.stages) for name, labels, values in wanted)
    shared = (
        base.point(output, SHARED, {}, [], tuple(s for s in EVERY_STAGE if s in file.share)) if file.share else None
    )
    return Grid(
        file=path,
        output=Path(output),
        ranks=ranks or file.ranks,
        memory=parse_bytes(file.memory, f"{path}: memory") if file.memory else None,
        axes=tuple(axes),
        stages=tuple(stage for stage in EVERY_STAGE if stage in file.stages),
        points=tuple(_on_shared(point, file, path, output) for point in points),
        excluded=excluded,
        shared=shared,
    )


@dataclass(frozen=True)
class _Base:
    """What all points have in common."""

    file: GridFile
    raw: TrackedDict
    path: Path
    given: TrackedDict

    def point(
        self, output: Path, name: str, labels: dict[str, str], choice: Sequence[_Value], stages: Sequence[Stage]
    ) -> Point:
        own = TrackedDict()
        for value in choice:
            overlay(own, value.keys, value.origin)
        above = overlay(overlay(overlay(TrackedDict(), self._written), self.given), own)
        start = self.file.recipe or (None if names_model_or_data(above) else EMBEDDED_RECIPE)
        named = f"`recipe` in {self.path}"
        values = overlay(read_yaml(start, named) if start else TrackedDict(), above)
        values["output"] = str(Path(output) / name)
        try:
            config = build_config(values, source=str(self.path))
        except ConfigError as error:
            raise ConfigError(f"{error} (point {name})") from error
        order = tuple(stage for stage in EVERY_STAGE if stage in stages)
        return Point(name, labels, dict(_flat(own)), config, config, order)

    @property
    def _written(self) -> TrackedDict:
        base = self.raw.get("base")
        return base if isinstance(base, TrackedDict) else TrackedDict()


def _axes(file: GridFile, raw: TrackedDict) -> dict[str, list[_Value]]:
    """The values of each axis, in the grid's order."""
    for axis in file.names:
        if not isinstance(file.grid.get(axis), list):
            raise ConfigError(
                _unknown(axis, [axis for axis, values in file.grid.items() if isinstance(values, list)], raw)
            )
    found: dict[str, list[_Value]] = {}
    for axis, values in raw["grid"].items() if file.grid else ():
        if isinstance(values, TrackedList):
            found[axis] = [
                _Value(
                    _label(axis, value, file.names.get(axis)),
                    _text(value),
                    TrackedDict({axis: value}),
                    values.origins[at],
                )
                for at, value in enumerate(values)
            ]
        else:
            found[axis] = [
                _Value(label, label, keys or TrackedDict(), _within(values.origins[label], axis, label))
                for label, keys in values.items()
            ]
    return found


def _within(origin: Origin, axis: str, label: str) -> Origin:
    return Origin(f"{origin.text}: grid.{axis}.{label}")


def _point_of(raw: TrackedDict, name: str, path: Path) -> _Value:
    return _Value(name, name, raw["points"][name] or TrackedDict(), None)


def _chosen(
    file: GridFile, path: Path, axes: Mapping[str, list[_Value]]
) -> tuple[dict[str, tuple[dict[str, str], list[_Value]]], dict[str, str]]:
    """The combinations by name, and the reasons of those that are excluded."""
    for exclusion in file.exclude:
        _check_exclusion(exclusion, path, axes)
    chosen: dict[str, tuple[dict[str, str], list[_Value]]] = {}
    excluded: dict[str, str] = {}
    for values in map(list, itertools.product(*axes.values())) if axes else ():
        labels = {axis: value.label for axis, value in zip(axes, values)}
        name = "-".join(filter(None, labels.values())) or "base"
        if name in chosen or name in excluded:
            raise ConfigError(
                f"{path}: two points are called {name}; give their values different labels in `names`, or in their axis"
            )
        choice = dict(zip(axes, values))
        if left_out := next((one.reason for one in file.exclude if _excludes(one, choice)), None):
            excluded[name] = " ".join(left_out.split())
        else:
            chosen[name] = (labels, values)
    for name in (*chosen, *file.points):
        if name in file.points and (name in chosen or name in excluded):
            raise ConfigError(f"{path}: points.{name}: the grid has a point of this name; choose another")
        if not _NAME.fullmatch(name) or name in RESERVED:
            raise ConfigError(
                f"{path}: {name!r} cannot be the name of a point, which is a folder's; use letters, digits and any of "
                "_.+-, at most 100, in `names` or as labels"
            )
    if not chosen and not file.points:
        raise ConfigError(f"{path}: exclude: leaves no point; take one of them out")
    return chosen, excluded


def _check_exclusion(exclusion: Exclusion, path: Path, axes: Mapping[str, list[_Value]]) -> None:
    for axis, wanted in exclusion.where.items():
        if axis not in axes:
            raise ConfigError(f"{path}: exclude: no axis {axis!r}; {_near(axis, axes)}")
        for one in wanted if isinstance(wanted, list) else [wanted]:
            known = [word for value in axes[axis] for word in (value.label, value.text)]
            if _text(one) not in known:
                raise ConfigError(
                    f"{path}: exclude: the axis {axis} has no value {_text(one)!r}; it has "
                    f"{', '.join(value.label or repr(value.text) for value in axes[axis])}"
                )


def _excludes(exclusion: Exclusion, choice: Mapping[str, _Value]) -> bool:
    return all(
        {choice[axis].label, choice[axis].text}
        & {_text(one) for one in (wanted if isinstance(wanted, list) else [wanted])}
        for axis, wanted in exclusion.where.items()
    )


def _check_share(file: GridFile, path: Path, keys: set[str]) -> None:
    """Raise `ConfigError` where stages that are shared cannot be."""
    for stage in file.share:
        if stage in file.stages:
            raise ConfigError(f"{path}: share: {stage} is one of `stages` too; leave it out of one of them")
        for key in sorted(keys):
            if key.startswith(f"{stage}.") or key in _OF_THE_START:
                raise ConfigError(
                    f"{path}: {key}: differs between points, and {stage}, which reads it, is shared by all; "
                    "take it out of `share`, or the key out of the grid"
                )
    if "output" in keys:
        raise ConfigError(f"{path}: output: each point has a folder of its own; leave this key out")


def _on_shared(point: Point, file: GridFile, path: Path, output: Path) -> Point:
    """The point, starting from what the shared stages leave.

    Raises:
        ConfigError: a stage starts from one that no part of the sweep trains.
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
            config = apply_settings(config, {ref.key: str(Path(output) / SHARED / ref.trained_by / "model")})
    return replace(point, config=config)


def _label(axis: str, value: Any, named: Any) -> str:
    """How a value of an axis is written in the name of a point."""
    text = _text(value)
    if isinstance(named, dict) and text in named:
        return str(named[text])
    word = named if isinstance(named, str) else axis.rpartition(".")[2]
    if isinstance(value, bool):
        return word if value else f"no-{word}"
    parts = [str(part) for part in value] if isinstance(value, list) else [text]
    return word + "_".join(re.sub(r"[^\w.+-]+", "_", Path(part).name) for part in parts)


def _text(value: Any) -> str:
    """Return a value as people write it in YAML: `true`, `null`, `1e-5`."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return re.sub(r"e([-+])0(?=\d)", r"e\1", str(value)) if isinstance(value, float) else str(value)


def _unknown(axis: str, axes: Sequence[str], raw: TrackedDict) -> str:
    names = raw["names"]
    where = names.origins[axis].text if isinstance(names, TrackedDict) and axis in names.origins else "names"
    return f"{where}: names: {axis!r} is no axis with a list of values; {_near(axis, axes)}"


def _near(axis: str, axes: Any) -> str:
    near = difflib.get_close_matches(axis, list(axes), n=1)
    return f"did you mean {near[0]!r}?" if near else f"there is: {', '.join(axes) or 'none'}"


def _keys_of(values: Sequence[_Value]) -> set[str]:
    return {key for value in values for key in _leaves(value.keys)}


def _leaves(values: TrackedDict) -> list[str]:
    return [key for key, _ in _flat(values)]


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, TrackedDict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _meet(key: str, other: str) -> bool:
    """Whether one of two keys is the other, or a section that holds it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
