"""Read YAML recipes and command-line overrides into nested values that remember where they were written.

Mappings and lists know the file line or the option of each entry, so that an error can name it. Texts from a file know
the file's folder, because paths in a recipe are relative to it. The schema validates the values afterwards.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from rlhf.config import paths
from rlhf.errors import ConfigError

_MAX_SHOWN = 100  # characters of an override in an error
_MAX_VALUES = 100_000  # in a recipe
_SOURCE_KEYS = ("data.datasets", "data.pretraining")  # lists that may be written as their only item


class Origin(NamedTuple):
    """The place where a value was written.

    Attributes:
        text: `recipe.yaml:12`, or the option.
        key: the key that `text` names itself, as an option does.
    """

    text: str
    key: str | None = None


class TrackedDict(dict[str, Any]):
    """A mapping with the origin of each of its keys."""

    def __init__(self, values: Mapping[str, Any] = {}, origins: Mapping[Any, Origin] = {}) -> None:
        super().__init__(values)
        self.origins = dict(origins)


class TrackedList(list[Any]):
    """A list with the origin of each of its items."""

    def __init__(self, values: Sequence[Any] = (), origins: Mapping[Any, Origin] = {}) -> None:
        super().__init__(values)
        self.origins = dict(origins)


class TrackedStr(str):
    """A text from a file in `folder`."""

    folder: str


def read_yaml(path: Path, option: str = "--config") -> TrackedDict:
    """Return the keys and values in a YAML file; none if it is empty.

    Args:
        path: the file; `~` is expanded.
        option: the option or key that names the file, for errors.

    Raises:
        ConfigError: the file cannot be read, is not a mapping, or has a key twice.
    """
    try:
        file = Path(os.path.expanduser(path))
        folder = str(file.parent) if file.is_file() else ""  # a pipe, /dev/fd/63, has no folder
        values = _parse(file.read_text(encoding="utf-8"), lambda line: Origin(f"{path}:{line}"), folder)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check {option}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a UTF-8 text file; check {option}") from error
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not valid YAML ({_first_line(error)}); fix this line") from error
    if values is None:
        return TrackedDict()
    if not isinstance(values, TrackedDict):
        kind = "list" if isinstance(values, TrackedList) else "single value"
        raise ConfigError(f"{path}: expected keys and values, got a {kind}")
    return values


def parse_yaml(text: str) -> Any:
    """Return the plain values in a YAML 1.2 text, without their origins.

    Raises:
        YAMLError: the text is not YAML, or has a key twice.
    """
    return YAML(typ="safe", pure=True).load(text)


def track(values: Mapping[str, Any], origin: str) -> TrackedDict:
    """Return nested values, such as a dumped configuration, with one origin for all of them."""
    tracked: TrackedDict = _parse(json.dumps(values), lambda line: Origin(origin))
    return tracked


def apply_overrides(
    values: TrackedDict,
    overrides: Sequence[str],
    options: Mapping[str, Any] | None = None,
    *,
    option: str = "--set",
) -> TrackedDict:
    """Change `values` in place as the command line says, and return them.

    Args:
        values: nested values.
        overrides: `key.path=value` texts whose values are YAML; digits in a path index lists.
        options: values of the options that are keys themselves; None for those that are not given.
        option: the option that had the overrides, for errors.

    Raises:
        ConfigError: a text does not have this form, or a part of its path is not a key.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        origin = Origin(_on_one_line(f"{option} {override}"), key)
        if not equals or not key:
            raise ConfigError(f"{origin.text}: expected key=value, for example {option} ppo.steps=50")
        try:
            value = _parse(text, lambda line, origin=origin: origin)  # type: ignore[misc]
        except YAMLError as error:
            raise ConfigError(f"{origin.text}: the value is not valid YAML ({_first_line(error)})") from error
        _set(values, key.split("."), value, origin)
    for key, value in (options or {}).items():
        if value is not None:
            _set(values, [key], value, Origin(_on_one_line(f"--{key} {value}"), key))
    return values


def overlay(values: TrackedDict, above: TrackedDict, origin: Origin | None = None) -> TrackedDict:
    """Change `values` in place by the nested keys of `above`, and return them; `engine.nvme` may be one key.

    Args:
        values: nested values.
        above: the values that replace them.
        origin: where all of `above` was written; if None, each key's own origin counts.

    Raises:
        ConfigError: a part of a key's path is not a key.
    """

    def put_all(below: TrackedDict, prefix: str, inherited: Origin) -> None:
        for name, value in below.items():
            key, where = prefix + name, origin or below.origins.get(name, inherited)
            if isinstance(value, TrackedDict) and key not in _SOURCE_KEYS:
                put_all(value, f"{key}.", where)
            else:
                _set(values, key.split("."), value, where)

    put_all(above, "", Origin("the configuration"))
    return values


def find_origin(values: Any, location: Sequence[str | int]) -> Origin | None:
    """Return where the value at `location` was written, or what it is missing from; None if that is not known."""
    origin = None
    for part in location:
        if isinstance(values, TrackedDict | TrackedList):
            origin = values.origins.get(part, origin)
        if isinstance(values, list) and isinstance(part, int) and part < len(values):
            values = values[part]
        elif isinstance(values, dict) and not isinstance(part, int):  # a mapping may stand for a list of itself
            values = values.get(part)
    return origin


def names_model_or_data(values: TrackedDict) -> bool:
    """Return whether nested values name a model or data other than the embedded ones."""

    def get(value: Any, key: str) -> Any:
        return value.get(key) if isinstance(value, dict) else None

    names = [get(source, "path") for source in as_source_list(get(get(values, "data"), "datasets"))]
    return bool(get(get(values, "model"), "path")) or any(name not in (None, paths.WORLD) for name in names)


def as_source_list(value: Any, key: str = "path") -> TrackedList:
    """Return `data.datasets` or `.pretraining`, a path, a mapping or a list of either, as a list of mappings.

    Args:
        value: the value of `data.datasets` or `data.pretraining`.
        key: the key that a text stands for.
    """
    is_list = isinstance(value, list | tuple)
    items = value if is_list else [] if value is None else [value]
    origins = getattr(value, "origins", {}) if is_list else {}
    return TrackedList([TrackedDict({key: item}) if isinstance(item, str) else item for item in items], origins)


class _Constructor(SafeConstructor):
    """Build tracked values from YAML 1.2; dates stay texts, and a key may stand only once."""

    locate: Callable[[int], Origin]  # of a line
    folder: str | None

    def build_text(self, node: ScalarNode) -> str:
        if self.folder is None:
            return str(node.value)
        text = TrackedStr(node.value)
        text.folder = self.folder
        return text

    def build_mapping(self, node: MappingNode) -> Iterator[TrackedDict]:
        mapping = TrackedDict()
        yield mapping  # first empty: the node may refer to itself
        first: dict[str, Node] = {}
        for key, _ in node.value[len(node.merge or ()) :]:  # keys merged by << may be given again
            if not isinstance(key, ScalarNode):
                raise ConstructorError(None, None, "a list or mapping cannot be a key", key.start_mark)
            if key.value in first:
                where = f" (first in line {first[key.value].start_mark.line + 1})" if self.folder is not None else ""
                message = f"{key.value!r} is given a second time{where}; remove one of them"
                raise ConfigError(f"{self._locate_node(key).text}: {message}")
            first[key.value] = key
        mapping.update((str(key), value) for key, value in self.construct_mapping(node).items())
        mapping.origins = {key.value: self._locate_node(key) for key, _ in node.value}

    def build_list(self, node: SequenceNode) -> Iterator[TrackedList]:
        items = TrackedList()
        yield items
        items.extend(self.construct_sequence(node))
        items.origins = {index: self._locate_node(item) for index, item in enumerate(node.value)}

    def _locate_node(self, node: Node) -> Origin:
        return self.locate(node.start_mark.line + 1)


_Constructor.add_constructor("tag:yaml.org,2002:str", _Constructor.build_text)
_Constructor.add_constructor("tag:yaml.org,2002:timestamp", _Constructor.build_text)
_Constructor.add_constructor("tag:yaml.org,2002:map", _Constructor.build_mapping)
_Constructor.add_constructor("tag:yaml.org,2002:seq", _Constructor.build_list)


def _parse(text: str, locate: Callable[[int], Origin], folder: str | None = None) -> Any:
    """Return the tracked values in a YAML text; `locate` returns the origin of a line."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    yaml.constructor.locate, yaml.constructor.folder = locate, folder
    try:
        if root := YAML(typ="safe", pure=True).compose(text):
            _count_values(root, {})
        return yaml.load(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, endless nesting
        raise YAMLError(str(error)) from error
    except KeyError as error:
        raise YAMLError(f"{error} does not fit its tag") from error


def _count_values(node: Node, counts: dict[int, int]) -> int:
    """Return the number of values that a node stands for; `counts` are those of complete nodes, and 0 of open ones.

    Raises:
        YAMLError: a node contains itself, or aliases make more values than any recipe has.
    """
    if id(node) in counts:
        if not counts[id(node)]:
            raise MarkedYAMLError(problem="an alias contains itself", problem_mark=node.start_mark)
        return counts[id(node)]
    counts[id(node)] = 0
    below = [] if isinstance(node, ScalarNode) else node.value
    parts = [part for item in below for part in (item if isinstance(item, tuple) else (item,))]
    count = 1 + sum(_count_values(part, counts) for part in parts)
    if count > _MAX_VALUES:
        raise MarkedYAMLError(
            problem=f"its aliases make more than {_MAX_VALUES:,} values", problem_mark=node.start_mark
        )
    counts[id(node)] = count
    return count


def _set(values: TrackedDict, keys: list[str], value: Any, origin: Origin) -> None:
    """Set a nested value; digits index lists (`data.datasets.0.weight`)."""
    node: Any = values
    for done, (part, following) in enumerate(itertools.pairwise(keys), start=1):
        try:
            key: Any = int(part) if isinstance(node, TrackedList) else part
            below = (node[key] if key != len(node) else None) if isinstance(node, TrackedList) else node.get(key)
        except (ValueError, IndexError, AttributeError) as error:
            raise ConfigError(f"{origin.text}: {part!r} is not a key here") from error
        if ".".join(keys[:done]) in _SOURCE_KEYS:
            below = as_source_list(below)
        if below is None:
            below = TrackedList() if following.isdigit() else TrackedDict()
            _put(node, key, below, origin)
        elif isinstance(below, TrackedDict | TrackedList):  # a copy: an alias may use it too
            below = node[key] = type(below)(below, below.origins)  # type: ignore[arg-type]
        node = below
    try:
        if not isinstance(node, TrackedDict | TrackedList):
            raise ValueError
        _put(node, int(keys[-1]) if isinstance(node, TrackedList) else keys[-1], value, origin)
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{origin.text}: {keys[-1]!r} is not a key here") from error


def _put(node: Any, key: Any, value: Any, origin: Origin) -> None:
    if isinstance(node, TrackedList) and key == len(node):
        node.append(value)
    else:
        node[key] = value
    node.origins[key] = origin


def _on_one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _first_line(error: YAMLError) -> str:
    return str(getattr(error, "problem", None) or error).splitlines()[0]
