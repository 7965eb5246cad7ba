"""`rlhf evaluate`: measure finished models on pairs, on text, on given replies, or on completions (`--metric`)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from rlhf.cli.options import Options, shared
from rlhf.cli.prompts import Generation, MaxTokensOption, PromptsOption, prepare_generation, report_dropped
from rlhf.cli.tables import AsJSON, AsTSV, print_json, print_line, print_table, route_notes_to_stderr
from rlhf.config.paths import is_path
from rlhf.config.schema import Config, SamplingConfig
from rlhf.errors import ConfigError, DataError
from rlhf.evaluation.models import (
    EvaluationDevice,
    check_reward_folder,
    find_base_model,
    load_language_model,
    load_reward_model,
    model_folder,
    reward_model_folder,
)
from rlhf.evaluation.perplexity import measure_perplexity
from rlhf.evaluation.reward_scores import (
    ReplySet,
    best_reply_probabilities,
    measure_pairs,
    parse_reply_set,
    read_line,
    score_replies,
)
from rlhf.evaluation.rows import HELDOUT, draw_rows, list_overrides, read_rows
from rlhf.reporting.console import console
from rlhf.reporting.progress import progress
from rlhf.runs.directory import find_run
from rlhf.utils.units import format_number

if TYPE_CHECKING:
    from rlhf.evaluation.metrics import Metrics

logger = logging.getLogger(__name__)

_PAIRS = {
    "pairs": "pairs",
    "accuracy": "accuracy",
    "accuracy_interval": "95% interval",
    "ties": "equal scores",
    "chosen_score": "chosen score",
    "rejected_score": "rejected score",
    "margin": "margin",
    "log_loss": "log loss (chance: 0.693)",
    "brier": "Brier score (chance: 0.25)",
    "calibration_error": "calibration error (ECE)",
    "temperature": "temperature that calibrates",
}
_TEXT = {
    "rows": "rows",
    "tokens": "tokens",
    "loss": "nats per token",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
}


@shared("config", "overrides", "accelerator", "precision", "trust", "debug")  # a seed would hold out other rows
def evaluate(
    options: Options,
    models: Annotated[
        list[str],
        typer.Argument(help="Folders of models or runs, or hub names; several are shown together.", metavar="MODEL..."),
    ],
    pairs: Annotated[
        str | None,
        typer.Option(
            help="Pairs of replies, for reward models: a source as in data.datasets, or [bold]heldout[/].",
            metavar="SOURCE",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="Replies or text, for language models: a source, a .txt file, or [bold]heldout[/].", metavar="SOURCE"
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="A measure of completions that the models generate: module:function, FILE.py:function, plugin:NAME, "
            "bleu, rouge1, rouge2, rougeL or rougeLsum. Repeatable.",
            metavar="NAME",
        ),
    ] = None,
    prompts: PromptsOption = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="With --metric: number of prompts, sampled from all. Default: 100.", metavar="N"),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, help="With --metric: sampling temperature. Default: 0, always the most likely token.", metavar="T"
        ),
    ] = None,
    max_tokens: MaxTokensOption = None,
    metric_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="With --metric: seconds for a function to be imported, or to measure --batch-size completions. "
            "Default: 60.",
            metavar="SECONDS",
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="A prompt, for reward models.", metavar="TEXT")] = None,
    reply: Annotated[
        list[str] | None, typer.Option(help="A reply to the prompt, to be scored. Repeatable.", metavar="TEXT")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows in a forward pass.", min=1, metavar="N")] = 8,
    bins: Annotated[int, typer.Option(help="Confidence bins of the calibration.", min=1, metavar="N")] = 10,
    rows: Annotated[bool, typer.Option("--rows", metavar="", help="With --json: add the numbers of each row.")] = False,
    as_json: AsJSON = False,
    as_tsv: AsTSV = False,
) -> None:
    """Measure finished models: reward models on pairs, language models on text and on what they generate.

    [bold]rlhf evaluate runs/a --pairs heldout[/]  ·  accuracy and calibration on its recipe's held-out rows

    [bold]rlhf evaluate runs/a runs/b/reward/model --pairs pairs.jsonl[/]  ·  two reward models, on your pairs

    [bold]rlhf evaluate runs/a --prompt "Where does the bee live?" --reply "In the hive." --reply "Go away."[/]

    [bold]rlhf evaluate runs/a < sentences.tsv[/]  ·  prompt, tab, reply, tab, reply; or JSON lines; or type them

    [bold]rlhf evaluate gpt2 runs/a/sft --text replies.jsonl[/]  ·  perplexity

    [bold]rlhf evaluate runs/a/sft runs/a --metric grade.py:correct --metric rougeL[/]  ·  on what they generate

    A run means its reward model or its last policy; runs/a/sft means the model of that stage. A SOURCE is a path, a
    hub name, or an entry of data.datasets: [bold]--pairs '{path: rows.csv, columns: {chosen: good, rejected: bad}}'[/]

    The score of a reply is that of its last token, as in PPO. Calibration compares how often chosen replies score
    higher with sigmoid(chosen - rejected). Texts longer than a model's context are read in windows that overlap by
    half.

    A metric function is called with (prompt, completion, row), as a reward function is, and returns a number; the mean
    is shown with its 95 % interval. row["response"] is the reply to compare with, if the row has one. bleu and rougeL
    need the packages sacrebleu and rouge-score.
    """
    given = {"--pairs": pairs, "--text": text, "--metric": metric, "--prompt": prompt}
    modes = [name for name, value in given.items() if value]
    if len(modes) > 1:
        raise ConfigError(f"{modes[0]} and {modes[1]}: one thing is measured at a time; give one of them")
    if bool(prompt) != bool(reply):
        raise ConfigError("--prompt and --reply: need each other; give both")
    if rows and not as_json:
        raise ConfigError("--rows: needs --json; add it")
    if twice := next((name for name in models if models.count(name) > 1), None):
        raise ConfigError(f"{twice}: is named twice; name each model once")
    settings = {
        "--prompts": prompts,
        "--limit": limit,
        "--temperature": temperature,
        "--max-tokens": max_tokens,
        "--metric-timeout": metric_timeout,
    }
    if not metric and (unused := next((name for name, value in settings.items() if value is not None), None)):
        raise ConfigError(f"{unused}: needs --metric; give one, or remove {unused}")
    if metric:
        for model in models:
            find_base_model(model_folder(model))
        from rlhf.evaluation.metrics import Metrics

        with route_notes_to_stderr(as_json or as_tsv):
            metrics = Metrics(metric, metric_timeout or 60.0)  # a mistake in a metric shows before models are loaded
            sampling = SamplingConfig(temperature=temperature or 0.0)
            generation = prepare_generation(
                options, models, prompts, sampling, max_tokens=max_tokens, batch_size=batch_size, records=True
            )
            report = _measure_completions(models, metrics, generation, limit or 100, prompts or HELDOUT, rows)
        if as_json:
            print_json(report)
        else:
            _print_metrics(report, as_tsv)
        return
    source, option = (pairs, "--pairs") if pairs else (text, "--text")
    config = _load_config(options, source, option, models)
    for model in models:  # before anything slow is imported
        if text:
            find_base_model(model_folder(model))
        else:
            check_reward_folder(reward_model_folder(model))
    device = EvaluationDevice.select(config, options.accelerator)
    if source:
        report = _measure(
            device,
            config,
            models,
            source,
            measure=partial(measure_pairs, batch_size=batch_size, bins=bins)
            if pairs
            else partial(measure_perplexity, batch_size=batch_size),
            is_pairs=bool(pairs),
            with_rows=rows,
            show=console.is_terminal and not (as_json or as_tsv),
        )
        if as_json:
            print_json(report)
        else:
            _print_measures(report, as_tsv)
    elif prompt or not sys.stdin.isatty():
        reply_sets = list(_read_reply_sets(prompt, reply))
        scores = _score(device, config, models, reply_sets, batch_size, console.is_terminal and not (as_json or as_tsv))
        if as_json:
            print_json({"kind": "sentences", **_describe(device), "questions": _list_scores(reply_sets, scores)})
        else:
            _print_scores(reply_sets, scores, tsv=as_tsv)
    else:
        _converse(device, config, models)


def _load_config(options: Options, source: str | None, option: str, models: Sequence[str]) -> Config:
    """Load the configuration with `source` as its data; for held-out rows, that of the first run that is named."""
    if source == HELDOUT and not options.config:
        run = next((run for model in models if is_path(model) and (run := find_run(model))), None)
        recipe = run.ensure_recipe() if run else None
        if not recipe:
            raise ConfigError(f"{option} {HELDOUT}: no recipe says what is held out; give --config, or name a run")
        options = replace(options, config=recipe)
    data = list_overrides(source, option) if source else []
    return replace(options, overrides=[*data, *(options.overrides or [])]).load_for((), example=False)


def _measure(
    device: EvaluationDevice,
    config: Config,
    models: Sequence[str],
    source: str,
    *,
    measure: partial[Any],
    is_pairs: bool,
    with_rows: bool,
    show: bool,
) -> dict[str, Any]:
    """Measure each model on the source, one after the other."""
    rows = None
    measures: list[dict[str, Any]] = []
    for name in models:
        with _loading(name, show):
            model = (load_reward_model if is_pairs else load_language_model)(name, config, device)
        rows = rows or read_rows(source, "reward" if is_pairs else "sft", config, model, show=show)
        numbers, row_results, report = measure(model, rows, config, show=show)
        dropped = {reason: count for reason, (count, _) in report.dropped.items()}
        measures.append({"model": name, "folder": model.folder, **numbers, "left_out": dropped})
        if with_rows:
            measures[-1]["each"] = [result._asdict() for result in row_results]
        if report.dropped:
            logger.warning("%s: left out: %s", name, report.reasons())
        del model
        device.free_memory()
    return {"kind": "pairs" if is_pairs else "text", "source": source, **_describe(device), "models": measures}


def _measure_completions(
    models: Sequence[str], metrics: Metrics, generation: Generation, limit: int, source: str, with_rows: bool
) -> dict[str, Any]:
    """Complete `limit` prompts of the source with each model, and measure the completions with each metric."""
    from rlhf.evaluation.completions import complete_prompts
    from rlhf.evaluation.metrics import NO_REFERENCE

    rows, lacking = generation.rows, []
    if metrics.needs_reference:
        rows, lacking = [row for row in rows if row.response], [row for row in rows if not row.response]
    if not rows:
        named = ", ".join(name for name in metrics.names if ":" not in name)
        raise DataError(
            f"--metric {named}: compares with the replies of the data, and {source} has none; name a source that has "
            "replies with --prompts"
        )
    rows = draw_rows(rows, limit, generation.config.seed)
    completed = complete_prompts(models, *generation._replace(rows=rows))
    left_out = {NO_REFERENCE: (len(lacking), lacking[0].source)} if lacking else {}
    left_out |= completed.left_out
    report_dropped("prompt", left_out)
    measures = []
    for output in completed.outputs:
        with progress(len(output.texts), f"measuring {output.name}", unit="completions") as bar:
            results = metrics.measure(
                completed.rows, output.texts, batch_size=generation.settings.batch_size, done=bar.advance
            )
        measures.append(
            {
                "model": output.name,
                "folder": str(model_folder(output.name)),
                "prompts": len(completed.rows),
                "metrics": {
                    name: {"value": result.value, "low": result.low, "high": result.high}
                    for name, result in results.items()
                },
                "length": sum(map(len, output.ids)) / len(output.ids),
                "truncated_share": sum(output.truncated) / len(output.truncated),
                "left_out": {reason: count for reason, (count, _) in left_out.items()},
            }
        )
        if with_rows:
            measures[-1]["each"] = [
                {
                    "source": row.source,
                    "prompt": row.text,
                    "completion": output.texts[place],
                    "truncated": output.truncated[place],
                    "metrics": {name: result.values[place] for name, result in results.items()},
                }
                for place, row in enumerate(completed.rows)
            ]
    return {"kind": "metrics", "source": source, **_describe(generation.device), "models": measures}


def _print_metrics(report: dict[str, Any], tsv: bool) -> None:
    models = report["models"]
    rows = [["prompts", *(_format_cell(model["prompts"]) for model in models)]]
    for name in models[0]["metrics"]:
        results = [model["metrics"][name] for model in models]
        intervals = [None if result["low"] is None else [result["low"], result["high"]] for result in results]
        rows += [
            [name, *(_format_cell(result["value"]) for result in results)],
            ["95% interval", *map(_format_cell, intervals)],
        ]
    rows += [
        [label, *(_format_cell(model[key]) for model in models)]
        for key, label in {"length": "length, tokens", "truncated_share": "truncated"}.items()
    ]
    print_table(f"{report['source']}: metrics", ["metrics", *(model["model"] for model in models)], rows, tsv=tsv)


def _print_measures(report: dict[str, Any], tsv: bool) -> None:
    kind, models = report["kind"], report["models"]
    labels = _PAIRS if kind == "pairs" else _TEXT
    rows = [[label, *(_format_cell(model[key]) for model in models)] for key, label in labels.items()]
    print_table(f"{report['source']}: {kind}", [kind, *(model["model"] for model in models)], rows, tsv=tsv)
    for model in models:
        if bins := model.get("bins"):
            rows = [
                [f"{row['low']:.3g} to {row['high']:.3g}"]
                + [_format_cell(row[key]) for key in ("pairs", "confidence", "accuracy")]
                for row in bins
            ]
            columns = ("confidence", "pairs", "mean confidence", "accuracy")
            print_table(f"{model['model']}: calibration", columns, rows, tsv=tsv)


def _read_reply_sets(prompt: str | None, replies: Sequence[str] | None) -> Iterator[ReplySet]:
    """Yield the prompts with their replies: those of the command line, or the lines of standard input."""
    if prompt:
        yield parse_reply_set(prompt, replies or (), "--prompt")
        return
    lines = [(number, line) for number, line in enumerate(sys.stdin, start=1) if line.strip()]
    if not lines:
        raise DataError(
            "nothing to measure: standard input is empty; give --pairs or --text, or a line of prompt, tab, reply"
        )
    for number, line in lines:
        yield read_line(line, f"standard input:{number}")


def _score(
    device: EvaluationDevice,
    config: Config,
    models: Sequence[str],
    reply_sets: Sequence[ReplySet],
    batch_size: int,
    show: bool,
) -> dict[str, list[list[float]]]:
    """Return the scores of the replies by model; models are loaded one after the other."""
    scores = {}
    for name in models:
        with _loading(name, show):
            judge = load_reward_model(name, config, device)
        scores[name] = score_replies(judge, reply_sets, batch_size=batch_size, show=show)
        del judge
        device.free_memory()
    return scores


def _converse(device: EvaluationDevice, config: Config, models: Sequence[str]) -> None:
    """Ask for prompts and replies until the end of input; all models stay loaded."""
    import readline  # noqa: F401  # gives input() editing and history

    judges = []
    for name in models:
        with _loading(name, True):
            judges.append(load_reward_model(name, config, device))
    print_line(("type a prompt, then replies to it; an empty line scores them, Ctrl-D exits\n", "dim"))
    while True:
        try:
            prompt = input("prompt  ")
            replies: list[str] = []
            while prompt.strip() and (reply := input("reply   ").strip()):
                replies.append(reply)
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if replies:
            try:
                reply_sets = [parse_reply_set(prompt, replies, "prompt")]
                _print_scores(
                    reply_sets,
                    {judge.name: score_replies(judge, reply_sets, batch_size=len(replies)) for judge in judges},
                )
            except DataError as error:
                print(f"({error})")
        print()


def _list_scores(reply_sets: Sequence[ReplySet], scores: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": message.role, "content": message.content} for message in reply_set.prompt],
            "replies": [
                {
                    "reply": reply,
                    "scores": {name: rows[place][at] for name, rows in scores.items()},
                    "best": {name: best_reply_probabilities(rows[place])[at] for name, rows in scores.items()},
                }
                for at, reply in enumerate(reply_set.replies)
            ],
        }
        for place, reply_set in enumerate(reply_sets)
    ]


def _print_scores(reply_sets: Sequence[ReplySet], scores: dict[str, list[list[float]]], *, tsv: bool = False) -> None:
    """Print a row for each reply, with the probability that it is the best if a prompt has several."""
    several = any(len(reply_set.replies) > 1 for reply_set in reply_sets)
    numbers = ["score", "P(best)"] if several else ["score"]
    columns = ["prompt", "reply"]
    columns += numbers if len(scores) == 1 else [f"{name}: {number}" for name in scores for number in numbers]
    rows = []
    for place, reply_set in enumerate(reply_sets):
        for at, reply in enumerate(reply_set.replies):
            row = [" ".join(reply_set.shown.split()), " ".join(reply.split())]
            for model_scores in scores.values():
                best = best_reply_probabilities(model_scores[place])[at]
                row += [f"{model_scores[place][at]:.4f}"]
                row += [f"{best:.3f}" if len(reply_set.replies) > 1 else "-"] if several else []
            rows.append(row)
    print_table("scores", columns, rows, tsv=tsv)


def _format_cell(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(f"{bound:.4f}" for bound in value)
    return value if isinstance(value, str) else "-" if value is None else format_number(value)


def _describe(device: EvaluationDevice) -> dict[str, Any]:
    return {"accelerator": device.accelerator.name, "precision": device.precision.name}


@contextmanager
def _loading(name: str, show: bool) -> Iterator[None]:
    """Show on a terminal that a model is being loaded."""
    if not show:
        yield
        return
    with console.status(Text(f"loading {name}")):
        yield
