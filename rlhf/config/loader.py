"""Nested values, before the schema judges them: what a YAML file holds, and what the command line changes in it.

They remember where they come from: mappings and lists the line or the option that gave each entry, so that an error
names it; texts of a file the file's folder, because paths in a recipe start from there.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlhf.config import paths as names
from rlhf.errors import ConfigError

_LONGEST = 100  # characters of an override that are shown
_TEXT, _MERGE, _DATE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge", "tag:yaml.org,2002:timestamp"
_SOURCES = ("data.datasets", "data.pretraining")  # lists, of which one item may stand alone
# YAML 1.1 without its numbers of base 60; nothing more, or what is printed would not be what is read back.
_NUMBERS = {
    "tag:yaml.org,2002:int": r"^[-+]?(?:0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$",
    "tag:yaml.org,2002:float": r"^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?"
    r"|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
}


class Origin(NamedTuple):
    """Where a value was given."""

    text: str
    key: str | None = None  # the one that `text` names itself, as an option does


class TrackedDict(dict[str, Any]):
    """A mapping, and where each of its keys was given."""

    def __init__(self, values: Mapping[str, Any] = {}, origins: Mapping[Any, Origin] = {}) -> None:
        super().__init__(values)
        self.origins = dict(origins)


class TrackedList(list[Any]):
    """A list, and where each of its items was given."""

    def __init__(self, values: Sequence[Any] = (), origins: Mapping[Any, Origin] = {}) -> None:
        super().__init__(values)
        self.origins = dict(origins)


class TrackedStr(str):
    """A text in a file of `folder`."""

    folder: str


def read_yaml(path: Path, named: str = "--config") -> TrackedDict:
    """The keys and values in a YAML file; none in an empty one.

    Args:
        named: what named the file, for errors.

    Raises:
        ConfigError: it cannot be read, or holds something else, or a key twice.
    """
    try:
        file = Path(os.path.expanduser(path))
        folder = str(file.parent) if file.is_file() else ""  # a pipe, /dev/fd/63, has none
        values = _parsed(file.read_text(encoding="utf-8"), lambda line: Origin(f"{path}:{line}"), folder)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check {named}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a UTF-8 text file; check {named}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not readable as YAML ({_first_line(error)}); fix this line") from error
    if values is None:
        return TrackedDict()
    if not isinstance(values, TrackedDict):
        raise ConfigError(
            f"{path}: expected keys and values, found a {'list' if isinstance(values, TrackedList) else 'single value'}"
        )
    return values


def apply_overrides(
    values: TrackedDict, overrides: Sequence[str], options: Mapping[str, Any] | None = None
) -> TrackedDict:
    """`values`, changed in place by what the command line says.

    Args:
        overrides: `key.path=value` texts whose values are YAML; digits in a path index lists.
        options: values of the options that are keys themselves; None where one is not given.

    Raises:
        ConfigError: a text is not of this form, or a key of its path is none here.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        origin = Origin(_in_one_line(f"--set {override}"), key)
        if not equals or not key:
            raise ConfigError(f"{origin.text}: expected key=value, for example --set ppo.steps=50")
        try:
            value = _parsed(text, lambda line, origin=origin: origin)  # type: ignore[misc]
        except yaml.YAMLError as error:
            raise ConfigError(f"{origin.text}: the value is not YAML ({_first_line(error)})") from error
        _set(values, key.split("."), value, origin)
    for key, value in (options or {}).items():
        if value is not None:
            _set(values, [key], value, Origin(_in_one_line(f"--{key} {value}"), key))
    return values


def overlay(values: TrackedDict, above: TrackedDict, origin: Origin | None = None) -> TrackedDict:
    """`values`, changed in place by nested keys that stand above them; a key may name a section's own: `engine.nvme`.

    Args:
        origin: where all that is above was given; else where each key of it was.

    Raises:
        ConfigError: a key of a path is none here.
    """

    def put(below: TrackedDict, before: str, from_above: Origin) -> None:
        for name, value in below.items():
            key, where = before + name, origin or below.origins.get(name, from_above)
            if isinstance(value, TrackedDict) and key not in _SOURCES:
                put(value, f"{key}.", where)
            else:
                _set(values, key.split("."), value, where)

    put(above, "", Origin("the configuration"))
    return values


def find_origin(values: Any, location: Sequence[str | int]) -> Origin | None:
    """Where what stands at `location` was given, or what it is missing from; None where that is not known."""
    found = None
    for part in location:
        if isinstance(values, TrackedDict | TrackedList):
            found = values.origins.get(part, found)
        if isinstance(values, list) and isinstance(part, int) and part < len(values):
            values = values[part]
        elif isinstance(values, dict) and not isinstance(part, int):  # a mapping may stand for a list of it alone
            values = values.get(part)
    return found


def names_model_or_data(values: TrackedDict) -> bool:
    """Whether nested values name another model or other data than the embedded ones."""

    def at(value: Any, key: str) -> Any:
        return value.get(key) if isinstance(value, dict) else None

    paths = [at(source, "path") for source in as_source_list(at(at(values, "data"), "datasets"))]
    return bool(at(at(values, "model"), "path")) or any(path not in (None, names.WORLD) for path in paths)


def as_source_list(value: Any, key: str = "path") -> TrackedList:
    """What `data.datasets` or `.pretraining` is given: a path, a mapping, or a list of either; as a list of mappings.

    Args:
        key: what a text alone is the value of.
    """
    several = isinstance(value, list | tuple)
    items = value if several else [] if value is None else [value]
    origins = getattr(value, "origins", {}) if several else {}
    return TrackedList([TrackedDict({key: item}) if isinstance(item, str) else item for item in items], origins)


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: 2:4:4 is no number of base 60, 2024-01-01 no date, and no key stands twice."""

    place: Callable[[int], Origin]  # of a line
    folder: str | None

    def at(self, node: yaml.Node) -> Origin:
        return self.place(node.start_mark.line + 1)

    def compose_mapping_node(self, anchor: Any) -> Any:
        node: Any = super().compose_mapping_node(anchor)
        seen: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            key.tag = _TEXT  # of `on: 1` and `1: 1` too
            if first := seen.get(key.value):
                where = f" (first in line {first.start_mark.line + 1})" if self.folder is not None else ""
                raise ConfigError(f"{self.at(key).text}: {key.value!r} is given a second time{where}; keep one of them")
            seen[key.value] = key
        return node

    def text(self, node: Any) -> str:
        if self.folder is None:
            return str(node.value)
        text = TrackedStr(node.value)
        text.folder = self.folder
        return text

    def keys(self, node: Any) -> Iterator[TrackedDict]:
        keys = TrackedDict()
        yield keys  # what refers to itself is made in two steps
        keys.update((str(key), value) for key, value in self.construct_mapping(node).items())
        keys.origins = {key.value: self.at(key) for key, _ in node.value}

    def items(self, node: Any) -> Iterator[TrackedList]:
        items = TrackedList()
        yield items
        items.extend(self.construct_sequence(node))
        items.origins = {position: self.at(item) for position, item in enumerate(node.value)}


_Loader.yaml_implicit_resolvers = {
    first: [(tag, re.compile(_NUMBERS.get(tag, form.pattern), re.VERBOSE)) for tag, form in forms if tag != _DATE]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor(_TEXT, _Loader.text)
_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.keys)
_Loader.add_constructor("tag:yaml.org,2002:seq", _Loader.items)


def _parsed(text: str, place: Callable[[int], Origin], folder: str | None = None) -> Any:
    """The values in a YAML text; `place` is the origin of one of its lines."""
    try:
        loader = _Loader(text)
        loader.place, loader.folder = place, folder
        return loader.get_single_data()
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists without end
        raise yaml.YAMLError(str(error)) from error


def _set(values: TrackedDict, keys: list[str], value: Any, origin: Origin) -> None:
    """Set a nested value; digits index lists (data.datasets.0.weight)."""
    node: Any = values
    for done, (part, following) in enumerate(itertools.pairwise(keys), start=1):
        try:
            key: Any = int(part) if isinstance(node, TrackedList) else part
            below = (node[key] if key != len(node) else None) if isinstance(node, TrackedList) else node.get(key)
        except (ValueError, IndexError, AttributeError) as error:
            raise ConfigError(f"{origin.text}: {part!r} is not a key here") from error
        if ".".join(keys[:done]) in _SOURCES:
            below = as_source_list(below)
        if below is None:
            below = TrackedList() if following.isdigit() else TrackedDict()
            _put(node, key, below, origin)
        elif isinstance(
            below, TrackedDict | TrackedList
        ):  # a copy: through an alias, the file may have it in another place too
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


def _in_one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def _first_line(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or error).splitlines()[0]
