"""`rlhf config`: every key with its meaning and its value, as a YAML file that can be edited and given back.

The file says in its first lines what its values are: the defaults of a real run, or those of the embedded
example, which suit its tiny model and no other.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rlhf.cli.options import SETTINGS, Options, shared
from rlhf.config.dump import format_recipe
from rlhf.config.schema import EMBEDDED_RECIPE, Config
from rlhf.errors import ConfigError

_DEFAULTS = (
    "The default of every key. To start: model.path is the model to train, data.datasets are your rows, "
    "max_prompt_length and max_completion_length fit them, and learning rates fit the model. "
    "Paths start from the folder of this file."
)
_EXAMPLE = (
    "The embedded example, which `rlhf` runs when it is given no file. These values suit its tiny model and "
    "short sentences; start your recipe from `rlhf config`, which prints the defaults."
)


@shared(*SETTINGS)
def config(
    context: typer.Context,
    options: Options,
    example: Annotated[
        bool, typer.Option("--example", metavar="", help="The embedded example's values, not the defaults.")
    ] = False,
    from_deepspeed_chat: Annotated[
        list[str] | None,
        typer.Option(
            "--from-deepspeed-chat",
            metavar="COMMAND",
            help="A command line of DeepSpeed-Chat, a script that holds it, or - for standard input, as a recipe. "
            "Repeatable: several steps make one recipe.",
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(help="With --from-deepspeed-chat: devices, where the command names none.", min=1, metavar="N"),
    ] = None,
) -> None:
    """Print every key of a recipe with its meaning and its default.

    The output is a recipe itself: [bold]rlhf config > recipe.yaml[/], edit, [bold]rlhf --config recipe.yaml[/].
    What [bold]--config[/] and [bold]--set[/] give stands above the defaults. The embedded example, which plain
    [bold]rlhf[/] runs, has values that suit its tiny model alone; [bold]--example[/] prints them.

    [bold]--from-deepspeed-chat[/] prints the recipe that trains as a command line of DeepSpeed-Chat does, or of its
    fork with its HL_* variables: what each flag became, or why nothing. docs/deepspeed-chat.md lists them all.

    [bold]rlhf config --from-deepspeed-chat "deepspeed --num_gpus 1 main.py --model_name_or_path facebook/opt-1.3b"[/]

    [bold]rlhf config --from-deepspeed-chat training_scripts/opt/single_gpu/run_1.3b.sh > recipe.yaml[/]
    """
    if from_deepspeed_chat:
        _show(_translation(from_deepspeed_chat, devices, options, example))
        return
    if devices:
        raise ConfigError("--devices: is for --from-deepspeed-chat; leave it out")
    if example and options.config:
        raise ConfigError("--example and --config: each names a recipe to print; give one of them")
    about = _DEFAULTS
    if options.config:
        about = f"{options.config}, and the default of every key that it leaves out. Paths are absolute."
    if example:
        about = _EXAMPLE
    if options.overrides or (options.precision, options.output, options.seed) != (None, None, None):
        about += " What the command line gave stands above that."
    values = (replace(options, config=EMBEDDED_RECIPE) if example else options).load(example=False)
    if options.config:  # whose paths start from its folder, and not from that of the recipe printed here
        values = Config.model_validate(values.model_dump(mode="json"))
    _show(format_recipe(values, about))


def _translation(commands: list[str], devices: int | None, options: Options, example: bool) -> str:
    """Translate commands of DeepSpeed-Chat into a recipe."""
    from rlhf.contrib.deepspeed_chat.translate import format_translation, translate_commands

    others = (options.config, options.overrides, options.precision, options.output, options.seed)
    if example or any(value is not None for value in others):
        raise ConfigError("--from-deepspeed-chat: prints what the command means; give other options to rlhf later")
    return format_translation(translate_commands([_text_of(command) for command in commands], os.environ, devices))


def _text_of(command: str) -> str:
    """Return a command given as text, on standard input or in a script; the fork's scripts are known by name."""
    from rlhf.contrib.deepspeed_chat.tables import load_scripts

    if command == "-":
        return sys.stdin.read()
    path = Path(command)
    if "\n" in command or path.name in {Path(name).name for name in load_scripts()} or not path.is_file():
        return command
    try:
        # The folder says which step a script's plain `main.py` is of.
        return f"cd {shlex.quote(str(path.resolve().parent))}\n{path.read_text(encoding='utf-8')}"
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{command}: cannot be read as text; name a script, or give the command itself") from error


def _show(text: str) -> None:
    from rlhf.reporting.console import console

    if not console.is_terminal:
        print(text, end="")
        return
    from rich.syntax import Syntax

    console.print(Syntax(text, "yaml", theme="ansi_dark", background_color="default", word_wrap=True))
