"""A configuration as a recipe: YAML with every key, its meaning above it, that can be edited and given back."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from ruamel.yaml import YAML

from rlhf.config.schema import build_config
from rlhf.utils.atomic_io import atomic_write

_WIDTH = 100
_ABOUT_A_RUN = (
    "The settings of the run in this folder. `rlhf --resume` and later stages go on with them where --config names no "
    "other recipe."
)


def format_recipe(config: BaseModel, about: str) -> str:
    """A configuration as a recipe; `about` stands in a comment at its top."""
    return "\n".join([*_comment(about), "", to_yaml(config)])


def write_recipe(path: Path, settings: Mapping[str, Any]) -> None:
    """Write a run's settings, nested as `run.json` has them, as the recipe in its folder; whole or not at all.

    Raises:
        OSError: the folder cannot be written to.
        ConfigError: the settings are not of this version.
    """
    atomic_write(path, format_recipe(build_config(settings), _ABOUT_A_RUN))


def to_yaml(section: BaseModel) -> str:
    """A section and those below it as YAML, each key's description above it."""
    return "\n".join(_lines(section)).lstrip("\n") + "\n"


def _lines(section: BaseModel, depth: int = 0) -> Iterator[str]:
    indent = "  " * depth
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        below = isinstance(value, BaseModel)
        if below and depth == 0:
            yield ""
        described = (field.description or "").strip() + _choices(field.annotation)
        yield from _comment(described, indent)
        if below:
            yield f"{indent}{name}:"
            yield from _lines(value, depth + 1)
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            yield f"{indent}{name}:"
            for item in value:
                yield from _item(list(_lines(item, depth + 2)), indent + "  ")
        else:
            yield f"{indent}{name}: {format_scalar(value)}".rstrip()


def _item(lines: list[str], indent: str) -> Iterator[str]:
    """A section's lines as an item of a list: the dash stands before its first key, below that key's comment."""
    first = next(i for i, line in enumerate(lines) if not line.lstrip().startswith("#"))
    yield from (comment.removeprefix("  ") for comment in lines[:first])
    yield f"{indent}- {lines[first].lstrip()}"
    yield from lines[first + 1 :]


def _comment(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def format_scalar(value: Any) -> str:
    """A value as YAML on one line, as it is read back."""
    if value is None:
        return ""
    yaml, text = YAML(typ="safe", pure=True), io.StringIO()
    yaml.default_flow_style, yaml.width = True, 10**6
    yaml.dump(_plain(value), text)
    return text.getvalue().removesuffix("...\n").strip()


def _plain(value: Any) -> Any:
    """What YAML has a form for: values of a mapping that is not the schema's still know where they were given."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str | Path) else value


def _choices(annotation: Any) -> str:
    """The words that a key admits, where they are few."""
    words = [format_scalar(word) for word in get_args(annotation) if isinstance(word, str | bool)]
    return f" ({' | '.join(words)})" if words else ""
