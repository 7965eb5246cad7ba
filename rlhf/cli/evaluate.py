"""`rlhf evaluate`: measure finished models on pairs of replies, on text, or on given sentences."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from rlhf.cli.options import Options, shared
from rlhf.cli.tables import print_json, print_table
from rlhf.config.paths import is_path
from rlhf.config.schema import Config, Stage
from rlhf.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rlhf.evaluation.models import EvaluationDevice, RewardModel
    from rlhf.evaluation.reward_scores import ReplySet
    from rlhf.evaluation.rows import Measurement

logger = logging.getLogger(__name__)

Numbers = dict[str, Any]

_PAIRS = {
    "pairs": "pairs",
    "accuracy": "accuracy",
    "accuracy_interval": "its 95% interval",
    "ties": "equal scores",
    "chosen_score": "chosen score",
    "rejected_score": "rejected score",
    "margin": "margin",
    "log_loss": "log loss (a coin's: 0.693)",
    "brier": "Brier score (a coin's: 0.25)",
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


@shared("config", "overrides", "accelerator", "precision", "debug")  # a seed would hold out other rows
def evaluate(
    context: typer.Context,
    options: Options,
    models: Annotated[
        list[str],
        typer.Argument(help="Folders of models or runs, or hub names; several side by side.", metavar="MODEL..."),
    ],
    pairs: Annotated[
        str | None,
        typer.Option(
            help="Pairs of replies for reward models: a source as in data.datasets, or [bold]heldout[/].",
            metavar="SOURCE",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="Replies or text for language models: a source, a .txt file, or [bold]heldout[/].", metavar="SOURCE"
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Your prompt, for reward models.", metavar="TEXT")] = None,
    reply: Annotated[
        list[str] | None, typer.Option(help="A reply to it, to be scored. Repeatable.", metavar="TEXT")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows of a forward pass.", min=1, metavar="N")] = 8,
    bins: Annotated[int, typer.Option(help="Bins of confidence, in the calibration.", min=1, metavar="N")] = 10,
    rows: Annotated[bool, typer.Option("--rows", metavar="", help="With --json: the numbers of each row too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")] = False,
) -> None:
    """Measure finished models: reward models on pairs, language models on text.

    [bold]rlhf evaluate runs/a --pairs heldout[/]  ·  accuracy and calibration on what its recipe held out

    [bold]rlhf evaluate runs/a runs/b/reward/model --pairs pairs.jsonl[/]  ·  two reward models, on your pairs

    [bold]rlhf evaluate runs/a --prompt "Where does the bee live?" --reply "In the hive." --reply "Go away."[/]

    [bold]rlhf evaluate runs/a < sentences.tsv[/]  ·  prompt, tab, reply, tab, another; or JSON lines; or type them

    [bold]rlhf evaluate gpt2 runs/a/sft --text replies.jsonl[/]  ·  perplexity

    Of a run, its reward model or its last policy is meant; runs/a/sft means the one of that stage. A SOURCE is a path,
    a hub name, or what data.datasets takes: [bold]--pairs '{path: rows.csv, columns: {chosen: good, rejected: bad}}'[/]

    A score is that of a reply's last token, as PPO has it. Calibration asks whether chosen replies are better as often
    as sigmoid(chosen - rejected) says. Texts longer than a model's room are read in windows that overlap by half.
    """
    asked = [name for name, value in {"--pairs": pairs, "--text": text, "--prompt": prompt}.items() if value]
    if len(asked) > 1:
        raise ConfigError(f"{asked[0]} and {asked[1]}: one thing is measured at a time; give one of them")
    if bool(prompt) != bool(reply):
        raise ConfigError("--prompt and --reply: belong together; give both")
    if rows and not as_json:
        raise ConfigError("--rows: adds to JSON; give --json too")
    source, option = (pairs, "--pairs") if pairs else (text or "", "--text")
    if twice := next((name for name in models if models.count(name) > 1), None):
        raise ConfigError(f"{twice}: is named twice; name each model once")
    config = _settings(options, source, option, models)
    _check(models, reward=not text)
    from rlhf.evaluation.models import EvaluationDevice

    device = EvaluationDevice.select(config, options.accelerator)
    if source:
        measure = _by_pairs(batch_size, bins) if pairs else _by_text(batch_size)
        _measure(device, config, models, source, measure, rows=rows, json=as_json)
    elif prompt or not sys.stdin.isatty():
        _score(device, config, models, list(_questions(prompt, reply)), batch_size, as_json)
    else:
        _converse(device, config, models)


def _settings(options: Options, source: str | None, option: str, models: Sequence[str]) -> Config:
    """Load the configuration with `source` as its data; for held-out rows, that of the first run that is named."""
    from rlhf.evaluation.models import find_run
    from rlhf.evaluation.rows import HELDOUT, list_overrides

    if source == HELDOUT and not options.config:
        run = next((run for model in models if is_path(model) and (run := find_run(model))), None)
        recipe = run.ensure_recipe() if run else None
        if not recipe:
            raise ConfigError(f"{option} {HELDOUT}: no recipe says what is held out; give --config, or name a run")
        options = replace(options, config=recipe)
    more = list_overrides(source, option) if source else []
    return replace(options, overrides=[*more, *(options.overrides or [])]).load(example=False)


def _check(models: Sequence[str], *, reward: bool) -> None:
    """Raise `RunError` or `ModelError` where a model is not there, before anything slow is imported."""
    from rlhf.evaluation.models import find_base_model, model_folder, reward_model_folder
    from rlhf.models.compatibility import check_model_folder

    for model in models:
        if reward:
            check_model_folder(str(reward_model_folder(model)))
        else:
            find_base_model(model_folder(model))


class _Measure(NamedTuple):
    """The measurement of one kind of model, and what is shown: keys of the numbers with their labels."""

    kind: str
    stage: Stage
    load: Callable[..., Any]
    take: Callable[..., Measurement]
    shown: dict[str, str]


def _by_pairs(batch_size: int, bins: int) -> _Measure:
    from rlhf.evaluation import reward_scores
    from rlhf.evaluation.models import load_reward_model

    return _Measure(
        "pairs",
        "reward",
        load_reward_model,
        partial(reward_scores.measure_pairs, batch_size=batch_size, bins=bins),
        _PAIRS,
    )


def _by_text(batch_size: int) -> _Measure:
    from rlhf.evaluation import perplexity
    from rlhf.evaluation.models import load_language_model

    return _Measure(
        "text", "sft", load_language_model, partial(perplexity.measure_perplexity, batch_size=batch_size), _TEXT
    )


def _measure(
    device: EvaluationDevice,
    config: Config,
    models: Sequence[str],
    source: str,
    by: _Measure,
    *,
    rows: bool,
    json: bool,
) -> None:
    """Measure each model on the source, one after the other, and print all."""
    from rlhf.evaluation.rows import read_rows
    from rlhf.reporting.console import console

    show, found = console.is_terminal and not json, None
    measures: list[Numbers] = []
    for name in models:
        with _loading(name, show):
            model = by.load(name, config, device)
        found = found or read_rows(source, by.stage, config, model, show=show)
        numbers, each, report = by.take(model, found, config, show=show)
        dropped = {reason: count for reason, (count, _) in report.dropped.items()}
        measures.append({"model": name, "folder": model.folder, **numbers, "left_out": dropped})
        if rows:
            measures[-1]["each"] = [one._asdict() for one in each]
        if report.dropped:
            logger.warning("%s: left out: %s", name, report.reasons())
        del model
        device.free_memory()
    if json:
        print_json({"kind": by.kind, "source": source, **_where(device), "models": measures})
        return
    cells = [[called, *(_cell(one[key]) for one in measures)] for key, called in by.shown.items()]
    print_table(f"{source}: {by.kind}", [by.kind, *models], cells)
    for one in measures:
        if "bins" in one:
            _print_bins(one["model"], one["bins"])


def _print_bins(name: str, bins: Sequence[Numbers]) -> None:
    rows = [
        [f"{one['low']:.3g} to {one['high']:.3g}", *(_cell(one[key]) for key in ("pairs", "confidence", "accuracy"))]
        for one in bins
    ]
    print_table(f"{name}: as right as it is sure?", ("confidence", "pairs", "mean confidence", "accuracy"), rows)


def _questions(prompt: str | None, replies: Sequence[str] | None) -> Iterator[ReplySet]:
    from rlhf.evaluation.reward_scores import parse_reply_set, read_line

    if prompt:
        yield parse_reply_set(prompt, replies or (), "--prompt")
        return
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text are no reason to stop
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
    questions: Sequence[ReplySet],
    size: int,
    json: bool,
) -> None:
    """Score sentences by each model, one after the other, and print all."""
    from rlhf.evaluation.models import load_reward_model
    from rlhf.evaluation.reward_scores import score_replies
    from rlhf.reporting.console import console

    show = console.is_terminal and not json
    found: dict[str, list[list[float]]] = {}
    for name in models:
        with _loading(name, show):
            judge = load_reward_model(name, config, device)
        found[name] = score_replies(judge, questions, batch_size=size, show=show)
        del judge
        device.free_memory()
    if json:
        print_json({"kind": "sentences", **_where(device), "questions": _as_json(questions, found)})
    else:
        _print_scores(questions, found)


def _converse(device: EvaluationDevice, config: Config, models: Sequence[str]) -> None:
    """Ask for prompts and replies until the terminal has no more; all models are held at once."""
    import readline  # noqa: F401  # gives input() editing and history

    from rlhf.evaluation.models import load_reward_model
    from rlhf.evaluation.reward_scores import parse_reply_set, score_replies
    from rlhf.reporting.console import console

    judges: list[RewardModel] = []
    for name in models:
        with _loading(name, True):
            judges.append(load_reward_model(name, config, device))
    console.print("[dim]a prompt, then replies to it; an empty line scores them, Ctrl-D leaves[/]\n")
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
                asked = [parse_reply_set(prompt, replies, "prompt")]
                _print_scores(
                    asked, {judge.name: score_replies(judge, asked, batch_size=len(replies)) for judge in judges}
                )
            except DataError as error:
                print(f"({error})")
        print()


def _as_json(questions: Sequence[ReplySet], found: dict[str, list[list[float]]]) -> list[Numbers]:
    from rlhf.evaluation.reward_scores import best_reply_probabilities

    return [
        {
            "prompt": [{"role": message.role, "content": message.content} for message in asked.prompt],
            "replies": [
                {
                    "reply": reply,
                    "scores": {name: scores[place][at] for name, scores in found.items()},
                    "best": {name: best_reply_probabilities(scores[place])[at] for name, scores in found.items()},
                }
                for at, reply in enumerate(asked.replies)
            ],
        }
        for place, asked in enumerate(questions)
    ]


def _print_scores(questions: Sequence[ReplySet], found: dict[str, list[list[float]]]) -> None:
    from rlhf.evaluation.reward_scores import best_reply_probabilities

    several = any(len(asked.replies) > 1 for asked in questions)
    rows = []
    for place, asked in enumerate(questions):
        for at, reply in enumerate(asked.replies):
            row = [asked.shown, reply]
            for scores in found.values():
                row += [f"{scores[place][at]:.4f}"]
                best = f"{best_reply_probabilities(scores[place])[at]:.3f}" if len(asked.replies) > 1 else "-"
                row += [best] if several else []
            rows.append([" ".join(cell.split()) for cell in row])
    alone = len(found) == 1
    columns = ["prompt", "reply"]
    for name in found:
        columns += ["score" if alone else f"{name}: score"]
        columns += (["P(best)"] if alone else [f"{name}: P(best)"]) if several else []
    print_table("scores", columns, rows)


def _cell(value: Any) -> str:
    from rlhf.utils.units import format_number

    if isinstance(value, list):
        return " to ".join(f"{one:.4f}" for one in value)
    return value if isinstance(value, str) else "-" if value is None else format_number(value)


def _where(device: EvaluationDevice) -> Numbers:
    return {"accelerator": device.accelerator.name, "precision": device.precision.name}


def _loading(name: str, show: bool) -> Any:
    from contextlib import nullcontext

    from rich.text import Text

    from rlhf.reporting.console import console

    return console.status(Text(f"loading {name}")) if show else nullcontext()
