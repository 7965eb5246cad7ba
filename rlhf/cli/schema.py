"""`rlhf config`: every key with its meaning and its value, as a YAML file that can be edited and given back.

The file says in its first lines what its values are: the defaults of a real run, or those of the embedded
example, which suit its tiny model and no other.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
import yaml
from pydantic import BaseModel

from rlhf.cli.options import SETTINGS, Options, shared
from rlhf.config import EMBEDDED_RECIPE
from rlhf.errors import ConfigError

_WIDTH = 100
_DEFAULTS = (
    "The default of every key. To start: model.path is the model to train, data.datasets are your rows, "
    "max_prompt_length and max_completion_length fit them, and learning rates fit the model."
)
_EXAMPLE = (
    "The embedded example, which `rlhf` runs when it is given no file. These values suit its tiny model and "
    "short sentences; start a recipe of your own from `rlhf config`, which prints the defaults."
)


@shared(*SETTINGS)
def config(
    context: typer.Context,
    options: Options,
    example: Annotated[
        bool, typer.Option("--example", metavar="", help="The embedded example's values, not the defaults.")
    ] = False,
) -> None:
    """Print every key of a recipe with its meaning and its default.

    The output is a recipe itself: [bold]rlhf config > recipe.yaml[/], edit, [bold]rlhf --config recipe.yaml[/].
    What [bold]--config[/] and [bold]--set[/] give stands above the defaults. The embedded example, which plain
    [bold]rlhf[/] runs, has values that suit its tiny model alone; [bold]--example[/] prints them.
    """
    if example and options.config:
        raise ConfigError("--example and --config: each names a recipe to print; give one of them")
    about = f"{options.config}, and the default of every key that it leaves out." if options.config else _DEFAULTS
    if example:
        options, about = replace(options, config=EMBEDDED_RECIPE), _EXAMPLE
    text = "\n".join([*_comment(about), "", to_yaml(options.load(example=False))])
    from rlhf.metrics.progress import console

    if not console.is_terminal:
        print(text, end="")
        return
    from rich.syntax import Syntax

    console.print(Syntax(text, "yaml", theme="ansi_dark", background_color="default", word_wrap=True))


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
            yield f"{indent}{name}: {_scalar(value)}".rstrip()


def _item(lines: list[str], indent: str) -> Iterator[str]:
    """A section's lines as an item of a list: the dash stands before its first key, below that key's comment."""
    first = next(i for i, line in enumerate(lines) if not line.lstrip().startswith("#"))
    yield from (comment.removeprefix("  ") for comment in lines[:first])
    yield f"{indent}- {lines[first].lstrip()}"
    yield from lines[first + 1 :]


def _comment(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _scalar(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, tuple):
        value = list(value)
    # Digits included: what is read back is what was printed.
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()


def _choices(annotation: Any) -> str:
    """The words that a key admits, where they are few."""
    words = [word for word in get_args(annotation) if isinstance(word, str)]
    return f" ({' | '.join(words)})" if words else ""
