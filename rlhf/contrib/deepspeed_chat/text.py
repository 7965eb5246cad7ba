"""A translated recipe as text: YAML whose every line says which flag it is of; above, what became of the others."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from rlhf.config.dump import format_scalar
from rlhf.config.schema import STAGES, Config
from rlhf.contrib.deepspeed_chat.given import Setting
from rlhf.contrib.deepspeed_chat.tables import STEPS
from rlhf.contrib.deepspeed_chat.translate import Recipe

_LINE = 120
_LIST = 60  # characters of a list on one line


def text_of(recipe: Recipe) -> str:
    """The recipe, which loads as it is: `rlhf config --from-deepspeed-chat ... > recipe.yaml`."""
    lines = [*_head(recipe), ""]
    tree: dict[str, Any] = {}
    for key, setting in recipe.settings.items():
        node = tree
        *path, last = key.split(".")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = setting
    return "\n".join([*lines, *_lines(tree, Config)]) + "\n"


def _head(recipe: Recipe) -> Iterator[str]:
    steps = ", ".join(f"{STEPS[stage]} ({stage})" for stage in recipe.stages)
    yield f"# DeepSpeed-Chat's {steps}, as a recipe of rlhf; every line says which flag it is of."
    options = " ".join(["", *recipe.options])
    names = [""] if recipe.stages == [*STAGES] else [f" {stage}" for stage in recipe.stages]
    for name in names:
        yield f"# Start it: rlhf{name} --config recipe.yaml{options}"
    yield "# Paths start from the folder of this file."
    for note in recipe.notes:
        yield from _comment(f"Note: {note}.", "# ")
    if recipe.remarks:
        yield "#"
        yield "# Flags that need no line below:"
    groups: dict[str, list[str]] = {}
    for remark in dict.fromkeys(recipe.remarks):
        if remark.group:
            groups.setdefault(remark.group, []).append(f"{remark.flag} ({remark.text})")
        else:
            yield from _comment(f"{remark.flag}: {remark.text}", "#   ")
    for group, said in groups.items():
        yield from _comment(f"{group}: {', '.join(said)}.", "# ")


def _lines(tree: Mapping[str, Any], section: Any, depth: int = 0) -> Iterator[str]:
    """The keys below a section, in the order of the schema."""
    fields = section.model_fields if isinstance(section, type) and issubclass(section, BaseModel) else {}
    indent = "  " * depth
    for position, name in enumerate(sorted(tree, key=lambda name: [*fields].index(name) if name in fields else 0)):
        value = tree[name]
        if isinstance(value, Setting):
            yield from _setting(name, value, indent)
            continue
        if depth == 0 and position:
            yield ""
        yield f"{indent}{name}:"
        yield from _lines(value, fields[name].annotation if name in fields else None, depth + 1)


def _setting(name: str, setting: Setting, indent: str) -> Iterator[str]:
    value = "null" if setting.value is None else format_scalar(setting.value)
    several = isinstance(setting.value, list) and len(value) > _LIST
    line = f"{indent}{name}:" if several else f"{indent}{name}: {value}"
    if len(line) + len(setting.why) > _LINE:
        yield from _comment(setting.why, f"{indent}# ", deeper=False)
        yield line
    else:
        yield f"{line}  # {setting.why}"
    if several:
        yield from (f"{indent}  - {format_scalar(item)}" for item in setting.value)


def _comment(text: str, mark: str, *, deeper: bool = True) -> list[str]:
    """A text behind a mark, on as many lines as it takes."""
    return textwrap.wrap(
        text, _LINE, initial_indent=mark, subsequent_indent=mark + "  " * deeper, break_on_hyphens=False
    )
