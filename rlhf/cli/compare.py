"""`rlhf compare`: several models complete the same prompts; what they wrote is shown, scored and compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf.cli.comparison import print_lines, print_samples, print_tables
from rlhf.cli.options import Options, shared
from rlhf.cli.tables import print_json, route_notes_to_stderr
from rlhf.config.paths import is_path
from rlhf.config.schema import Config, SamplingConfig, load_config
from rlhf.errors import ConfigError, RunError
from rlhf.evaluation.models import EvaluationDevice, find_base_model, find_run, model_folder, reward_model_folder
from rlhf.evaluation.rows import (
    HELDOUT,
    draw_rows,
    is_line_source,
    list_overrides,
    read_heldout_prompts,
    read_lines,
    read_prompts,
)
from rlhf.models.compatibility import check_model_folder
from rlhf.utils.atomic_io import atomic_write, check_writable

if TYPE_CHECKING:
    from rlhf.data.records import Row
    from rlhf.data.report import DropCounts


@shared("config", "overrides", "accelerator", "precision", "seed", "debug")
def compare(
    context: typer.Context,
    options: Options,
    models: Annotated[
        list[str],
        typer.Argument(
            help="Runs, stages of runs, model folders, hub names. The others are measured by the first.",
            metavar="MODEL...",
            show_default=False,
        ),
    ],
    prompts: Annotated[
        str | None,
        typer.Option(
            help="A .txt file of one prompt a line, - for standard input, or a source as in data.datasets. "
            "Without, or [bold]heldout[/]: what the first run among the models holds out.",
            metavar="SOURCE",
        ),
    ] = None,
    reward_model: Annotated[
        str | None,
        typer.Option("--reward-model", "-R", help="What scores: a run, a model folder or a hub name.", metavar="MODEL"),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts, drawn by the seed.", metavar="N")] = 100,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="0: always the most likely token. Without: 0, and 1 with --best-of.",
            metavar="T",
            show_default=False,
        ),
    ] = None,
    top_p: Annotated[
        float,
        typer.Option("--top-p", min=0.001, max=1, help="Draw from the likeliest tokens of this share.", metavar="P"),
    ] = 1.0,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Longest completion, in tokens. Without: as in the recipe of the first run here, else 256.",
            metavar="N",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Completions at a time.", metavar="N")] = 16,
    best_of: Annotated[
        str | None,
        typer.Option(help="Draw as many samples as the largest, and tell the best's score: 1,4,16.", metavar="N,..."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write all completions and scores there, as JSON lines.", metavar="FILE")
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Prompts shown with their completions.", metavar="N")] = 3,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")] = False,
) -> None:
    """Compare models: completions of the same prompts side by side, scores, win rates, distance, variety.

    [bold]rlhf compare runs/a/sft runs/a --reward-model runs/a[/]

    [bold]rlhf compare facebook/opt-350m runs/b runs/c --prompts questions.txt -R runs/b --output all.jsonl[/]

    [bold]rlhf compare runs/a/sft runs/a -R runs/a --best-of 1,4,16[/]

    The [bold]win rate[/] is the share of prompts on which the reward model prefers a model to the first one; a tie
    counts half. In brackets stand intervals of 95 % over prompts: Wilson's of the win rate, the paired t test's of the
    difference. The [bold]KL[/] to the first model is estimated on a model's own samples, as the mean of
    log p(model) - log p(first); of greedy completions (--temperature 0) or with --top-p that mean is no KL, and is
    called log-ratio. [bold]distinct n[/] is the share of different runs of n tokens among all.

    [bold]--best-of[/] tells how the best of n samples would score, without training, and at what KL at most: where PPO
    scores no higher than the best of n of the SFT model at its KL, look at its training.

    Each model is loaded, writes, and is released before the next. Exit code 2: something must be fixed first.
    """
    numbers = _numbers(best_of)
    _check(models, reward_model, numbers, temperature, output)
    if temperature is None:
        temperature = 1.0 if numbers else 0.0
    sampling = SamplingConfig(temperature=temperature, top_p=top_p)
    with route_notes_to_stderr(as_json) as piped:
        config = _settings(options, prompts)
        rows = _read(prompts, config) if prompts and prompts != HELDOUT else []
        device = EvaluationDevice.select(config, options.accelerator)
        from rlhf.evaluation import compare as comparing
        from rlhf.evaluation.compare import compute_statistics, list_records
        from rlhf.evaluation.generate import GenerationSettings

        found = comparing.compare_models(
            models,
            draw_rows(rows or _held_out(options, config, models), limit, config.seed),
            GenerationSettings(sampling, max_tokens or _longest(options, config, models), batch_size, config.seed),
            config,
            device,
            reward_model=reward_model,
            samples=max(numbers, default=1),
        )
        _say_what_is_left_out("prompt", found.left_out)
        for note in found.notes:
            _say(note)
    where = {"accelerator": device.accelerator.name, "precision": device.precision.name}
    told = where | compute_statistics(found, numbers)
    if as_json:
        print_json(told)
    elif piped:
        print_lines(told)
    else:
        print_samples(list_records(found)[:show])
        print_tables(told)
    if output:
        _write(output, list_records(found))


def _numbers(text: str | None) -> list[int]:
    """Parse the numbers of `--best-of`."""
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    if wrong := next((part for part in parts if not (part.isdecimal() and int(part) >= 1)), None):
        raise ConfigError(f"--best-of {text}: {wrong!r} is no number of samples; write 1,4,16")
    if text is not None and not all(parts):
        raise ConfigError(f"--best-of {text!r}: a number is missing; write 1,4,16")
    return sorted({int(part) for part in parts})


def _check(
    models: Sequence[str],
    reward_model: str | None,
    best_of: Sequence[int],
    temperature: float | None,
    output: Path | None,
) -> None:
    """Find out what is wrong with the command line before anything slow is imported."""
    if len(models) == 1 and not best_of:
        raise ConfigError(f"{models[0]}: one model alone has nothing to be compared with; name two or more")
    if best_of and not reward_model:
        raise ConfigError("--best-of: no reward model says which sample is the best; name one with --reward-model")
    if best_of and temperature == 0:
        raise ConfigError("--best-of: at --temperature 0 all samples are the same; leave that out")
    if output and output.exists() and not output.is_file():
        raise RunError(f"{output}: is a {'folder' if output.is_dir() else 'device'}; name a file with --output")
    if output:
        check_writable(output.parent)
    for model in models:
        find_base_model(model_folder(model))
    if reward_model:
        check_model_folder(str(reward_model_folder(reward_model)))


def _settings(options: Options, prompts: str | None) -> Config:
    """Load the configuration, with `prompts` as its data if they are a data set."""
    more = (
        list_overrides(prompts, "--prompts") if prompts and prompts != HELDOUT and not is_line_source(prompts) else []
    )
    return replace(options, overrides=[*more, *(options.overrides or [])]).load(example=False)


def _read(prompts: str, config: Config) -> list[Row]:
    """Read the prompts of `--prompts`."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text are no reason to stop
    if is_line_source(prompts):
        return read_lines(prompts)
    rows, dropped = read_prompts(config, show=True)
    _say_what_is_left_out("row", dropped)
    return rows


def _held_out(options: Options, config: Config, models: Sequence[str]) -> list[Row]:
    """Read the prompts that the recipe holds out; without a recipe, those of the first run among the models."""
    from rlhf.models.loading import load_model_tokenizer

    found = _recipe(options, config, models)
    if found is None:
        raise ConfigError("--prompts: missing, and none of the models is of a run that holds some out; name a file")
    name, recipe = found
    tokenizer, _ = load_model_tokenizer(recipe.model, find_base_model(model_folder(name)))
    return read_heldout_prompts(recipe, tokenizer)


def _longest(options: Options, config: Config, models: Sequence[str]) -> int:
    """Return the longest completion of that recipe, or the default if there is no recipe."""
    _, recipe = _recipe(options, config, models) or ("", config)
    return recipe.data.max_completion_length


def _recipe(options: Options, config: Config, models: Sequence[str]) -> tuple[str, Config] | None:
    """Return the first model and the given recipe; without one, the first model of a run and the run's recipe."""
    if options.config is not None:
        return models[0], config
    for name in filter(is_path, models):
        if (run := find_run(name)) and (recipe := run.ensure_recipe()):
            return name, load_config(recipe, options.overrides or ())
    return None


def _say(line: str) -> None:
    from rlhf.reporting.console import console

    console.print(f"note: {line}", markup=False, soft_wrap=True)


def _say_what_is_left_out(what: str, dropped: DropCounts) -> None:
    for reason, (count, first) in dropped.items():
        _say(f"{count:,} {what}{'s' if count > 1 else ''} left out: {reason} (first: {first})")


def _write(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write the lines as the last act: if it fails, the numbers have been shown."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); choose another --output") from error
