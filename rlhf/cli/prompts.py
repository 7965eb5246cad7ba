"""The prompts of commands that generate: those of `--prompts`, or the held-out ones of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf.cli.options import Options
from rlhf.cli.tables import print_line
from rlhf.config.paths import is_path
from rlhf.config.schema import Config, load_config
from rlhf.config.trust import admit_code
from rlhf.errors import ConfigError
from rlhf.evaluation.models import find_base_model, find_run, model_folder
from rlhf.evaluation.rows import (
    HELDOUT,
    is_line_source,
    list_overrides,
    read_heldout_prompts,
    read_lines,
    read_prompts,
)

if TYPE_CHECKING:
    from rlhf.data.records import Row
    from rlhf.data.report import DropCounts

PromptsOption = Annotated[
    str | None,
    typer.Option(
        help="A .txt file with a prompt on each line, - for standard input, or a source as in data.datasets. "
        "Default, or [bold]heldout[/]: the held-out prompts of the first run among the models.",
        metavar="SOURCE",
    ),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Longest completion, in tokens. Default: that of the first run's recipe, else 256.",
        metavar="N",
        show_default=False,
    ),
]


def load_prompt_config(options: Options, prompts: str | None) -> Config:
    """Load the configuration, with `prompts` as its data if they are a data set."""
    is_data = prompts and prompts != HELDOUT and not is_line_source(prompts)
    data = list_overrides(prompts, "--prompts") if prompts and is_data else []
    return replace(options, overrides=[*data, *(options.overrides or [])]).load_for((), example=False)


def read_given_prompts(prompts: str | None, config: Config, *, records: bool = False) -> list[Row]:
    """Read the prompts of `--prompts`; none for held-out prompts, which need a tokenizer (`read_heldout`).

    Args:
        prompts: the option.
        config: the result of `load_prompt_config`.
        records: keep each row's record, with the columns of the source.
    """
    if not prompts or prompts == HELDOUT:
        return []
    if is_line_source(prompts):
        return read_lines(prompts)
    rows, dropped = read_prompts(config, show=True, records=records)
    report_dropped("row", dropped)
    return rows


def read_heldout(options: Options, config: Config, models: Sequence[str], *, records: bool = False) -> list[Row]:
    """Read the prompts that the recipe holds out; without a recipe, those of the first run among the models."""
    from rlhf.models.loading import load_model_tokenizer

    run = _find_recipe(options, config, models)
    if run is None:
        raise ConfigError("--prompts: missing, and none of the models is of a run with held-out prompts; name a file")
    name, recipe = run
    tokenizer, _ = load_model_tokenizer(recipe.model, find_base_model(model_folder(name)))
    return read_heldout_prompts(recipe, tokenizer, records=records)


def find_max_tokens(options: Options, config: Config, models: Sequence[str]) -> int:
    """Return the longest completion of that recipe, or the default if there is no recipe."""
    _, recipe = _find_recipe(options, config, models) or ("", config)
    return recipe.data.max_completion_length


def _find_recipe(options: Options, config: Config, models: Sequence[str]) -> tuple[str, Config] | None:
    """Return the first model and the given recipe; without one, the first model of a run and the run's recipe."""
    if options.config is not None:
        return models[0], config
    for name in filter(is_path, models):
        if (run := find_run(name)) and (recipe := run.ensure_recipe()):
            recorded = load_config(recipe, options.overrides or ())
            admit_code(recorded, recipe, (), trust=options.trust)
            return name, recorded
    return None


def report_dropped(noun: str, dropped: DropCounts) -> None:
    """Print a note for each reason why rows or prompts are left out."""
    for reason, (count, first) in dropped.items():
        print_line(f"note: {count:,} {noun}{'s' if count > 1 else ''} left out: {reason} (first: {first})")
