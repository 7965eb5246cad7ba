"""Write a configuration as a recipe: YAML with every key below its description, which users can edit and load."""

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
    "The settings of the run in this folder. `rlhf --resume` and later stages use them unless --config names another "
    "recipe."
)


def format_recipe(config: BaseModel, about: str) -> str:
    """Return a configuration as a recipe, with `about` in a comment at the top."""
    return "\n".join([*_comment(about), "", to_yaml(config)])


def write_recipe(path: Path, settings: Mapping[str, Any]) -> None:
    """Write a run's settings, nested as in `run.json`, as the recipe in its folder; atomically.

    Raises:
        OSError: the folder is not writable.
        ConfigError: the settings are those of another version.
    """
    atomic_write(path, format_recipe(build_config(settings), _ABOUT_A_RUN))


def to_yaml(section: BaseModel) -> str:
    """Return a section and those below it as YAML, each key below its description."""
    return "\n".join(_lines(section)).lstrip("\n") + "\n"


def _lines(section: BaseModel, depth: int = 0) -> Iterator[str]:
    indent = "  " * depth
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        is_section = isinstance(value, BaseModel)
        if is_section and depth == 0:
            yield ""
        description = (field.description or "").strip() + _choices(field.annotation)
        yield from _comment(description, indent)
        if is_section:
            yield f"{indent}{name}:"
            yield from _lines(value, depth + 1)
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            yield f"{indent}{name}:"
            for item in value:
                yield from _item(list(_lines(item, depth + 2)), indent + "  ")
        else:
            yield f"{indent}{name}: {format_scalar(value)}".rstrip()


def _item(lines: list[str], indent: str) -> Iterator[str]:
    """Yield a section's lines as an item of a list, with the dash before the first key."""
    first = next(i for i, line in enumerate(lines) if not line.lstrip().startswith("#"))
    yield from (comment.removeprefix("  ") for comment in lines[:first])
    yield f"{indent}- {lines[first].lstrip()}"
    yield from lines[first + 1 :]


def _comment(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def format_scalar(value: Any) -> str:
    """Return a value as YAML on one line that reads back as the same value."""
    if value is None:
        return ""
    yaml, text = YAML(typ="safe", pure=True), io.StringIO()
    yaml.default_flow_style, yaml.width = True, 10**6
    yaml.dump(_plain(value), text)
    return text.getvalue().removesuffix("...\n").strip()


def _plain(value: Any) -> Any:
    """Return a value in plain types that YAML can represent, without tracked origins."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str | Path) else value


def _choices(annotation: Any) -> str:
    """Return the words that a key accepts, in parentheses; empty if it accepts others."""
    words = [format_scalar(word) for word in get_args(annotation) if isinstance(word, str | bool)]
    return f" ({' | '.join(words)})" if words else ""
