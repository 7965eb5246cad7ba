"""Commands that generate: their common options, and the prompts, which are given or held out by a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from rlhf.cli.options import Options
from rlhf.cli.tables import print_line
from rlhf.config.paths import is_path
from rlhf.config.schema import Config, SamplingConfig, load_config
from rlhf.config.trust import admit_code
from rlhf.errors import ConfigError
from rlhf.evaluation.models import EvaluationDevice, find_base_model, model_folder
from rlhf.evaluation.rows import (
    HELDOUT,
    is_line_source,
    list_overrides,
    read_heldout_prompts,
    read_lines,
    read_prompts,
)
from rlhf.runs.directory import find_run

if TYPE_CHECKING:
    from rlhf.data.records import Row
    from rlhf.data.report import DropCounts
    from rlhf.evaluation.generate import GenerationSettings

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


TopPOption = Annotated[
    float,
    typer.Option(
        "--top-p", min=0.001, max=1, help="Sample only from the most likely tokens that add up to P.", metavar="P"
    ),
]
SampledTogetherOption = Annotated[int, typer.Option(min=1, help="Completions that are sampled together.", metavar="N")]


class Generation(NamedTuple):
    """The rows whose prompts a command completes, and how and where it generates."""

    rows: list[Row]
    settings: GenerationSettings
    config: Config
    device: EvaluationDevice


def prepare_generation(
    options: Options,
    models: Sequence[str],
    prompts: str | None,
    sampling: SamplingConfig,
    *,
    max_tokens: int | None,
    batch_size: int,
    records: bool = False,
) -> Generation:
    """Read the prompts of `--prompts`, or those that the recipe or the first run among the models holds out.

    Args:
        prompts: the option.
        max_tokens: the option; None for that of the recipe.
        records: keep each row's record, with the columns of the source.

    Raises:
        ConfigError: there are no held-out prompts.
        DataError: the prompts cannot be read.
    """
    given = prompts if prompts and prompts != HELDOUT else ""
    is_source = given and not is_line_source(given)
    data = list_overrides(given, "--prompts") if is_source else []
    config = replace(options, overrides=[*data, *(options.overrides or [])]).load_for((), example=False)
    rows: list[Row] = []
    if is_source:
        rows, dropped = read_prompts(config, show=True, records=records)
        report_dropped("row", dropped)
    elif given:
        rows = read_lines(given)
    device = EvaluationDevice.select(config, options.accelerator)
    from rlhf.evaluation.generate import GenerationSettings  # imports torch

    recipe = None if rows and max_tokens else _find_recipe(options, config, models)
    if not rows:
        rows = _read_heldout(recipe, records=records)
    longest = max_tokens or (recipe[1] if recipe else config).data.max_completion_length
    return Generation(rows, GenerationSettings(sampling, longest, batch_size, config.seed), config, device)


def _read_heldout(recipe: tuple[str, Config] | None, *, records: bool) -> list[Row]:
    """Read the prompts that a recipe holds out, with the tokenizer of the model that it is paired with."""
    from rlhf.models.loading import load_model_tokenizer

    if recipe is None:
        raise ConfigError("--prompts: missing, and none of the models is of a run with held-out prompts; name a file")
    name, config = recipe
    tokenizer, _ = load_model_tokenizer(config.model, find_base_model(model_folder(name)))
    return read_heldout_prompts(config, tokenizer, records=records)


def _find_recipe(options: Options, config: Config, models: Sequence[str]) -> tuple[str, Config] | None:
    """Return the first model and the given recipe; without one, the first model of a run and the run's recipe."""
    if options.config is not None:
        return models[0], config
    for name in filter(is_path, models):
        if (run := find_run(name)) and (recipe := run.ensure_recipe()):
            recorded = load_config(recipe, options.overrides or ())
            admit_code([recorded], [recipe], (), trust=options.trust)
            return name, recorded
    return None


def report_dropped(noun: str, dropped: DropCounts) -> None:
    """Print a note for each reason why rows or prompts are left out."""
    for reason, (count, first) in dropped.items():
        print_line(f"note: {count:,} {noun}{'s' if count > 1 else ''} left out: {reason} (first: {first})")
