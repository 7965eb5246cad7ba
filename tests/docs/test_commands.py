"""Every `rlhf` command of a page has the subcommand, options and keys that it is written with."""

from __future__ import annotations

import functools
import re
import shlex
import types
import typing
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel
from typer.main import get_command

from rlhf.cli.app import app
from rlhf.config.loader import parse_yaml
from rlhf.config.schema import Config, load_config
from tests.docs import pages

KEY = re.compile(rf"(?:{'|'.join(Config.model_fields)})(?:\.[a-z_0-9]+)+(?![\w(])")


def models(annotation: object) -> list[type[BaseModel]]:
    """Return the sections that a value of this type may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in models(part)]


def is_mapping(annotation: object) -> bool:
    """Return True if any key may stand below a value of this type."""
    origin = typing.get_origin(annotation) or annotation
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        return any(map(is_mapping, typing.get_args(annotation)))
    return isinstance(origin, type) and issubclass(origin, dict)


def key_exists(key: str) -> bool:
    """Return True if the settings have this key; a number stands for an item of a list."""
    sections: list[type[BaseModel]] = [Config]
    parts = [part for part in key.split(".") if not part.isdigit()]
    for number, part in enumerate(parts):
        fields = [section.model_fields[part] for section in sections if part in section.model_fields]
        if not fields:
            return False
        if any(is_mapping(field.annotation) for field in fields):
            return True
        sections = [model for field in fields for model in models(field.annotation)]
        if not sections and number + 1 < len(parts):
            return False
    return True


@functools.cache
def command_group() -> typing.Any:
    """Return the commands of `rlhf`, which take typer milliseconds to make."""
    return get_command(app)


def parse(arguments: list[str]) -> list[str]:
    """Parse a command line as `rlhf` does, without running it, and return the keys that it sets.

    Placeholders of pages (`R`, `DIR`) are accepted for numbers.
    """
    arguments = ["0" if word in ("R", "N") else word for word in arguments]
    context = command_group().make_context("rlhf", list(arguments))
    keys = list(context.params.get("overrides") or ())
    rest = [*context._protected_args, *context.args]
    while rest:
        name, command, rest = context.command.resolve_command(context, rest)  # type: ignore[attr-defined]
        context = command.make_context(name, rest, parent=context)
        keys += context.params.get("overrides") or ()
        rest = [*context._protected_args, *context.args] if hasattr(command, "resolve_command") else []
    return [key.partition("=")[0] for key in keys]


def problem(arguments: list[str], complete: bool = True) -> str:
    """Return what is wrong with a command line, or nothing.

    Args:
        complete: arguments and values must not be missing, as they may in `rlhf chat --ema`.
    """
    try:
        keys = parse(arguments)
    except typer.Exit:  # --help and --version
        return ""
    except Exception as error:  # typer has a copy of click, whose classes have no public names
        kind = type(error).__name__
        incomplete = kind in ("MissingParameter", "BadOptionUsage")
        return "" if incomplete and not complete else f"{kind}: {getattr(error, 'message', '') or error}"
    return ", ".join(f"unknown key {key}" for key in keys if not key_exists(key))


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_commands_of_a_page_parse(page: Path) -> None:
    wrong = {shlex.join(["rlhf", *arguments]): problem(arguments) for arguments in pages.commands(page)}
    wrong |= {shlex.join(["rlhf", *arguments]): problem(arguments, False) for arguments in pages.mentions(page)}
    assert {command: what for command, what in wrong.items() if what} == {}


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_recipes_that_commands_name_exist(page: Path) -> None:
    for arguments in pages.commands(page):
        named = [word for word in arguments if word.startswith("example_scripts/")]
        assert [path for path in named if not (pages.ROOT / path).exists()] == []


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_keys_in_code_spans_of_a_page_exist(page: Path) -> None:
    spans = re.findall(r"`([^`\n]+)`", pages.prose(page))
    if page.parent.name == "python":
        pytest.skip("`ppo` is a Python object there")
    keys = {match[0] for span in spans if (match := KEY.match(span)) and not span.endswith((".jsonl", ".json", ".py"))}
    assert sorted(key for key in keys if not key_exists(key)) == []


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_keys_in_yaml_blocks_of_a_page_exist(page: Path, tmp_path: Path) -> None:
    for block in pages.blocks(page, "yaml"):
        values = parse_yaml(block)
        if set(values) <= set(Config.model_fields):
            (tmp_path / "recipe.yaml").write_text(block, encoding="utf-8")
            load_config(tmp_path / "recipe.yaml")
        else:
            assert set(values) <= {"recipe", "base", "output", "stages", "share", "grid", "names", "jobs"}, block
            assert [key for key in values.get("grid", {}) if not key_exists(key)] == []


def test_commands_are_found() -> None:
    commands = [arguments for page in pages.PAGES for arguments in pages.commands(page)]
    assert len(commands) > 80


@pytest.mark.parametrize(
    "command",
    ["rlhf trian", "rlhf --confg recipe.yaml", "rlhf ppo --pairs x", "rlhf ppo --set ppo.stepz=1", "rlhf data --ranks"],
)
def test_wrong_commands_are_noticed(command: str) -> None:
    assert problem(shlex.split(command)[1:])
