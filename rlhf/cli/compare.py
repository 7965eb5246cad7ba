"""`rlhf compare`: several models complete the same prompts; their completions are shown, scored and compared."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from rlhf.cli.options import Options, shared
from rlhf.cli.prompts import (
    MaxTokensOption,
    PromptsOption,
    SampledTogetherOption,
    TopPOption,
    prepare_generation,
    report_dropped,
)
from rlhf.cli.tables import AsJSON, AsTSV, flatten, print_json, print_line, print_table, route_notes_to_stderr
from rlhf.config.schema import SamplingConfig
from rlhf.errors import ConfigError, RunError
from rlhf.evaluation.models import (
    check_reward_folder,
    find_base_model,
    model_folder,
    reward_model_folder,
)
from rlhf.evaluation.rows import draw_rows
from rlhf.reporting.console import console
from rlhf.utils.atomic_io import atomic_write, check_writable
from rlhf.utils.units import format_number

_SHARES = ("win_rate", "truncated_share", "repeated_share")
_LABELS = {
    "reward": "reward",
    "win_rate": "win rate",
    "reward_difference": "reward difference",
    "kl": "KL, nats",
    "kl.per_token": "KL per token",
    "log_ratio": "log-ratio, nats",
    "log_ratio.per_token": "log-ratio per token",
    "distinct_1": "distinct 1",
    "distinct_2": "distinct 2",
    "distinct_3": "distinct 3",
    "length": "length, tokens",
    "truncated_share": "truncated",
    "repeated_share": "repeated",
}


@shared("config", "overrides", "accelerator", "precision", "seed", "trust", "debug")
def compare(
    options: Options,
    models: Annotated[
        list[str],
        typer.Argument(
            help="Runs, stages of runs, model folders, hub names. All others are compared with the first.",
            metavar="MODEL...",
            show_default=False,
        ),
    ],
    prompts: PromptsOption = None,
    reward_model: Annotated[
        str | None,
        typer.Option(
            "--reward-model",
            "-R",
            help="Reward model that scores completions: a run, a folder or a hub name.",
            metavar="MODEL",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of prompts, sampled with the seed.", metavar="N")] = 100,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Sampling temperature; 0: always the most likely token. Default: 0, or 1 with --best-of.",
            metavar="T",
            show_default=False,
        ),
    ] = None,
    top_p: TopPOption = 1.0,
    max_tokens: MaxTokensOption = None,
    batch_size: SampledTogetherOption = 16,
    best_of: Annotated[
        str | None,
        typer.Option(
            help="Report the score of the best of N samples, for each N: 1,4,16. "
            "The largest N is the number of samples per prompt.",
            metavar="N,...",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write all completions and scores to this file, as JSON lines.", metavar="FILE")
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Number of prompts to show with completions.", metavar="N")] = 3,
    as_json: AsJSON = False,
    as_tsv: AsTSV = False,
) -> None:
    """Compare models: completions of the same prompts, with scores, win rates, KL and diversity.

    [bold]rlhf compare runs/a/sft runs/a --reward-model runs/a[/]

    [bold]rlhf compare facebook/opt-350m runs/b runs/c --prompts questions.txt -R runs/b --output all.jsonl[/]

    [bold]rlhf compare runs/a/sft runs/a -R runs/a --best-of 1,4,16[/]

    The [bold]win rate[/] is the share of prompts on which the reward model prefers a model to the first one; a tie
    counts half. Brackets show 95 % intervals over prompts: Wilson's for the win rate, the paired t test's for the
    difference. The [bold]KL[/] to the first model is estimated on a model's own samples, as the mean of
    log p(model) - log p(first). For greedy completions (--temperature 0) or with --top-p that mean is not a KL, and is
    called log-ratio. [bold]distinct n[/] is the number of different n-token sequences divided by the number of all.

    [bold]--best-of[/] reports how the best of n samples would score, without training, and an upper bound of its KL.
    If PPO scores no higher than the best of n samples of the SFT model at the same KL, check its training.

    Each model is loaded, generates, and is released before the next. Exit code 2: an error that you can fix.
    """
    sizes = _parse_sizes(best_of)
    _check(models, reward_model, sizes, temperature, output)
    if temperature is None:
        temperature = 1.0 if sizes else 0.0
    sampling = SamplingConfig(temperature=temperature, top_p=top_p)
    with route_notes_to_stderr(as_json or as_tsv):
        generation = prepare_generation(
            options, models, prompts, sampling, max_tokens=max_tokens, batch_size=batch_size
        )
        from rlhf.evaluation import compare as evaluation  # imports torch

        rows, device = draw_rows(generation.rows, limit, generation.config.seed), generation.device
        comparison = evaluation.compare_models(
            models, *generation._replace(rows=rows), reward_model=reward_model, samples=max(sizes, default=1)
        )
        report_dropped("prompt", comparison.left_out)
        for note in comparison.notes:
            print_line(f"note: {note}")
    statistics = {"accelerator": device.accelerator.name, "precision": device.precision.name}
    statistics |= evaluation.compute_statistics(comparison, sizes)
    records = evaluation.list_records(comparison)
    if as_json:
        print_json(statistics)
    elif as_tsv:
        _print_lines(statistics)
    else:
        _print_samples(records[:show])
        _print_tables(statistics)
    if output:  # last: if it fails, the numbers have been shown
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(output, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
        except OSError as error:
            raise RunError(f"{output}: cannot be written ({error.strerror}); choose another --output") from error


def _parse_sizes(text: str | None) -> list[int]:
    """Parse the numbers of `--best-of`."""
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if wrong := [part for part in parts if not (part.isdecimal() and int(part))]:
        raise ConfigError(f"--best-of {text}: {wrong[0]!r} is not a number of samples; write 1,4,16")
    return sorted({int(part) for part in parts})


def _check(
    models: Sequence[str],
    reward_model: str | None,
    sizes: Sequence[int],
    temperature: float | None,
    output: Path | None,
) -> None:
    """Check the command line before anything slow is imported."""
    if len(models) == 1 and not sizes:
        raise ConfigError(f"{models[0]}: expected two or more models, got one; name two or more")
    if sizes and not reward_model:
        raise ConfigError("--best-of: no reward model says which sample is the best; name one with --reward-model")
    if sizes and temperature == 0:
        raise ConfigError("--best-of: all samples are equal at --temperature 0; omit --temperature")
    if output and output.exists() and not output.is_file():
        raise RunError(f"{output}: is a {'folder' if output.is_dir() else 'device'}; name a file with --output")
    if output:
        check_writable(output.parent)
    for model in models:
        find_base_model(model_folder(model))
    if reward_model:
        check_reward_folder(reward_model_folder(reward_model))


def _print_lines(statistics: dict[str, Any]) -> None:
    """Print a line for each model, with the names of its numbers in JSON as the columns."""
    lines = []
    for model in statistics["models"]:
        best = {f"best_of_{row['best_of']}": row["reward"][model["model"]] for row in statistics.get("best_of", ())}
        lines.append(flatten(model | best))
    columns = list(dict.fromkeys(name for line in reversed(lines) for name in line))  # the first has fewer
    print_table("", columns, [[_format_plain(line.get(name)) for name in columns] for line in lines], tsv=True)


def _print_tables(statistics: dict[str, Any]) -> None:
    """Print all numbers of each model, and the scores of the best of several samples, for people."""
    models = {model["model"]: flatten(model) for model in statistics["models"]}
    first, *others = models
    settings = [
        f"{statistics['prompts']:,} prompts",
        "greedy" if statistics["temperature"] == 0 else f"temperature {statistics['temperature']:g}",
        *([f"top-p {statistics['top_p']:g}"] if statistics["top_p"] < 1 else []),
        *([f"{statistics['samples']} samples of each"] if statistics["samples"] > 1 else []),
        f"at most {statistics['max_tokens']:,} tokens",
    ]
    print_line((f"{', '.join(settings)}. ± is the standard error; brackets show 95 % intervals.", "dim"))
    rows = [[label, *(_format_value(name, model) for model in models.values())] for name, label in _LABELS.items()]
    print_table("", [f"against {first}" if others else "", *models], [row for row in rows if any(row[1:])])
    if "best_of" not in statistics:
        return
    names = [name for name in models if "reward.mean" in models[name]]
    rows = [
        [str(row["best_of"]), format_number(row["kl_at_most"])]
        + [_format_value("reward", flatten({"reward": row["reward"][name]})) for name in names]
        for row in statistics["best_of"]
    ]
    print_table("reward of the best of n samples", ["n", "KL at most", *names], rows)
    for equal in statistics["best_of_at_kl"]:
        name, count = equal["model"], equal["best_of"]
        number = f"{count:,}" if count < 10**6 else f"e^{math.log(count):.1f}"
        best = _format_value("reward", flatten(equal)) if equal["reward"] else ""
        print_line(
            f"{name} scores {_format_value('reward', models[name])} at a KL of {format_number(equal['kl'])} nats; "
            f"the best of {number} samples of {first}, at a KL of at most {format_number(equal['kl_at_most'])} nats, "
            + (f"scores {best}" if best else "needs more samples than were drawn")
        )


def _print_samples(records: Sequence[dict[str, Any]]) -> None:
    """Print prompts with a completion of each model, the first of several."""
    for record in records:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True, style="dim", overflow="ellipsis", max_width=console.width // 3)
        grid.add_column(no_wrap=True, justify="right", style="cyan")
        grid.add_column(overflow="fold")
        grid.add_row("prompt", "", Text(record["prompt"].strip(), style="italic"))
        for name, texts in record["completions"].items():
            scores = record["scores"].get(name)
            score = format_number(scores[0]) if scores else ""
            grid.add_row(Text(name), score, Text(texts[0].strip() or "(empty)"))
        console.print(grid)
        console.print()


def _format_plain(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _format_value(name: str, line: dict[str, Any]) -> str:
    """Format a number for people, with its standard error or its interval; empty if the model has none."""

    def rounded(value: float, digits: int = 4) -> str:
        return f"{100 * value:.1f}%" if name in _SHARES else format_number(float(f"{value:.{digits}g}"))

    mean = line.get(f"{name}.mean", line.get(name))
    if mean is None:
        return ""
    if name in ("win_rate", "reward_difference") and line.get(f"{name}.low") is not None:
        return f"{rounded(mean)} [{rounded(line[f'{name}.low'], 3)}, {rounded(line[f'{name}.high'], 3)}]"
    error = line.get(f"{name}.error")
    return rounded(mean) if error is None else f"{rounded(mean)} ± {rounded(error, 2)}"
