"""Nested values, before the schema judges them: what a YAML file holds, and what `--set` changes in it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rlhf.errors import ConfigError


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values in a YAML file; none in an empty one.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        values = yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check --config") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a UTF-8 text file; check --config") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not readable as YAML ({_first_line(error)}); fix this line") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected keys and values, found a {type(values).__name__}")
    return values


def overridden(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`values`, changed in place by `key.path=value` texts whose values are YAML; digits in a path index lists.

    Raises:
        ConfigError: a text is not of this form, or a key of its path is none here.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {override!r}: expected key=value, for example --set ppo.steps=50")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {override!r}: the value is not YAML ({_first_line(error)})") from error
        _set(values, key.split("."), value, override)
    return values


def names_model_or_data(values: Any) -> bool:
    """Whether nested values name another model or other data than the embedded ones."""

    def at(value: Any, key: str) -> Any:
        return value.get(key) if isinstance(value, dict) else None

    sources = at(at(values, "data"), "datasets")
    names = [at(source, "path") for source in sources] if isinstance(sources, list) else []
    return bool(at(at(values, "model"), "path")) or any(name not in (None, "world") for name in names)


def _first_line(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or error).splitlines()[0]


def _set(values: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    """Set a nested value; digits index lists (data.datasets.0.weight)."""
    node: Any = values
    for part, following in itertools.pairwise(keys):
        try:
            if isinstance(node, list):
                if int(part) == len(node):  # one more item
                    node.append({})
                node = node[int(part)]
            else:
                if node.get(part) is None:
                    node[part] = [] if following.isdigit() else {}
                node = node[part]
        except (ValueError, IndexError, AttributeError) as error:
            raise ConfigError(f"--set {override!r}: {part!r} is not a key here") from error
    try:
        if isinstance(node, list):
            position = int(keys[-1])
            if position == len(node):
                node.append(value)
            else:
                node[position] = value
        elif isinstance(node, dict):
            node[keys[-1]] = value
        else:
            raise ValueError
    except (ValueError, IndexError) as error:
        raise ConfigError(f"--set {override!r}: {keys[-1]!r} is not a key here") from error
