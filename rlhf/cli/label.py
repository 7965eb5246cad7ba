"""`rlhf label`: a person chooses between two completions of a prompt; the choices are pairs for the reward stage."""

from __future__ import annotations

import json
import os
import re
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from rlhf.cli.options import Options, shared
from rlhf.cli.prompts import (
    Generation,
    MaxTokensOption,
    PromptsOption,
    SampledTogetherOption,
    TopPOption,
    prepare_generation,
    report_dropped,
)
from rlhf.cli.tables import print_line
from rlhf.config.schema import SamplingConfig
from rlhf.errors import ConfigError, RunError
from rlhf.evaluation.labels import (
    FIRST,
    SECOND,
    SKIP,
    TIE,
    LabelFile,
    Question,
    count_preferences,
    make_question,
    prompt_identity,
    write_prompt,
)
from rlhf.evaluation.models import find_base_model, model_folder
from rlhf.evaluation.rows import STDIN, draw_rows
from rlhf.reporting.console import console
from rlhf.utils.atomic_io import check_writable

if TYPE_CHECKING:
    from rlhf.data.records import Row

_QUIT = "q"
_END_OF_INPUT = "\x04"  # Ctrl-D
_SEQUENCE = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|O.)?")  # what an arrow key sends, possibly with a digit in it
_MAX_INPUT = 64  # bytes read at once
_LEGEND = "1, 2: the better one   =: a tie   s: skip   q: quit"


@shared("config", "overrides", "accelerator", "precision", "seed", "trust", "debug")
def label(
    options: Options,
    models: Annotated[
        list[str],
        typer.Argument(
            help="One model, whose two samples are compared, or two models: runs, stages of runs, folders, hub names.",
            metavar="MODEL [MODEL]",
            show_default=False,
        ),
    ],
    prompts: PromptsOption = None,
    output: Annotated[
        Path, typer.Option(help="Append the labels to this file; prompts in it are not asked again.", metavar="FILE")
    ] = Path("labels.jsonl"),
    limit: Annotated[int, typer.Option(min=1, help="Number of prompts, sampled with the seed.", metavar="N")] = 50,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0, with two models: the most likely token.", metavar="T")
    ] = 1.0,
    top_p: TopPOption = 1.0,
    max_tokens: MaxTokensOption = None,
    batch_size: SampledTogetherOption = 16,
) -> None:
    """Choose the better of two completions, prompt by prompt; the reward stage trains on your choices.

    [bold]rlhf label runs/a[/]  ·  two samples of one model

    [bold]rlhf label runs/a/sft runs/a --prompts questions.txt --output mine.jsonl[/]  ·  two models, in hidden order

    Keys: [bold]1[/] and [bold]2[/] choose, [bold]=[/] is a tie, [bold]s[/] skips (the prompt is asked next time),
    [bold]q[/] quits. Each choice is written at once. The same command continues after the last one.

    The file has prompt, chosen and rejected, so it is a source for data.datasets. Ties are kept in it, and not trained
    on.
    """
    _check(models, temperature, prompts, output)
    file = LabelFile(output)
    sampling = SamplingConfig(temperature=temperature, top_p=top_p)
    generation = prepare_generation(options, models, prompts, sampling, max_tokens=max_tokens, batch_size=batch_size)
    rows = _select_unlabelled(generation.rows, file, limit, generation.config.seed)
    if not rows:
        print_line(f"all prompts are labelled in {output}; raise --limit, or name other --prompts or --output")
        return
    questions = _generate_questions(models, generation._replace(rows=rows))
    with _single_keys():
        _ask(questions, file)
    _report(file, models, {row.template for row in rows if row.template})


def _check(models: Sequence[str], temperature: float, prompts: str | None, output: Path) -> None:
    """Check the command line before anything slow is imported."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or prompts == STDIN:
        raise ConfigError("rlhf label: asks in a terminal, and its input or output is not one; start it in a terminal")
    if len(models) > 2:
        raise ConfigError(f"{models[2]}: expected one or two models, got {len(models)}; name at most two")
    if len(models) == 1 and temperature == 0:
        raise ConfigError("--temperature 0: both completions of one model are equal; raise it, or name a second model")
    for model in models:
        find_base_model(model_folder(model))
    if output.exists() and not output.is_file():
        raise RunError(f"{output}: is a {'folder' if output.is_dir() else 'device'}; name a file with --output")
    check_writable(output.parent)


def _select_unlabelled(rows: Sequence[Row], file: LabelFile, limit: int, seed: int) -> list[Row]:
    """Return those of `limit` different prompts that have no label in the file."""
    different = list({prompt_identity(write_prompt(row)): row for row in reversed(rows)}.values())[::-1]
    labelled = file.prompts
    return [row for row in draw_rows(different, limit, seed) if prompt_identity(write_prompt(row)) not in labelled]


def _generate_questions(models: Sequence[str], generation: Generation) -> list[Question]:
    """Generate two completions of each prompt; prompts with equal completions are left out."""
    from rlhf.evaluation.completions import complete_prompts

    completed = complete_prompts(models, *generation, samples=3 - len(models))
    report_dropped("prompt", completed.left_out)
    texts = [output.texts for output in completed.outputs]
    first, second = (texts[0][::2], texts[0][1::2]) if len(models) == 1 else texts
    questions = [
        make_question(row, pair, (models[0], models[-1]), generation.settings.seed)
        for row, pair in zip(completed.rows, zip(first, second))
        if pair[0] != pair[1]
    ]
    if equal := len(completed.rows) - len(questions):
        print_line(f"note: {equal:,} prompt{'s' if equal > 1 else ''} left out: both completions are equal")
    return questions


def _ask(questions: Sequence[Question], file: LabelFile) -> None:
    """Show the questions in turn, and write each answer to the file."""
    for number, question in enumerate(questions, 1):
        termios.tcflush(sys.stdin, termios.TCIFLUSH)  # a key that was pressed twice is no answer to the next question
        _show(question, f"{number} of {len(questions)}")
        key = _read_key()
        if key == _QUIT:
            return
        if key != SKIP:
            file.append(question.answer(key))


def _show(question: Question, place: str) -> None:
    """Print the prompt, and below it the completions side by side."""
    console.print()
    console.print(Text(question.row.text.strip(), style="italic"))
    table = Table(FIRST, SECOND, expand=True)
    for column in table.columns:
        column.ratio, column.overflow = 1, "fold"
    table.add_row(*(Text(text or "(empty)") for text in question.completions))
    console.print(table)
    print_line((f"{place}   {_LEGEND}", "dim"))


def _read_key() -> str:
    """Return the next key that has a meaning; the end of input counts as quitting."""
    while True:
        pressed = os.read(sys.stdin.fileno(), _MAX_INPUT)
        for key in _SEQUENCE.sub(b"", pressed).decode(errors="replace").lower():
            if key in (FIRST, SECOND, TIE, SKIP, _QUIT):
                return key
            if key == _END_OF_INPUT:
                return _QUIT
        if not pressed:
            return _QUIT


@contextmanager
def _single_keys() -> Iterator[None]:
    """Let the terminal pass on each key at once, without showing it."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _report(file: LabelFile, models: Sequence[str], templates: set[str]) -> None:
    """Print what the file has, how often the second model is preferred, and how to train on the pairs."""
    count = len(file.labels)
    numbers = {"label": count, "pair": count - file.ties, "tie": file.ties}
    labels, pairs, ties = (f"{number:,} {name}{'s' if number != 1 else ''}" for name, number in numbers.items())
    print_line(f"{file.path}: {labels}, {pairs} and {ties}")
    preference = count_preferences(file.labels, models[-1], models[0]) if len(models) > 1 else None
    if preference:
        low, high = (f"{100 * bound:.1f}" for bound in preference.interval)
        print_line(
            f"{models[1]} is preferred to {models[0]} for {100 * preference.share:.1f}% [{low}, {high}] of "
            f"{preference.labels:,} prompts; a tie counts half"
        )
    template = "".join(f", template: {json.dumps(text)}" for text in sorted(templates))
    print_line(f"to train on the pairs, add to data.datasets: {{path: {file.path}, stages: [reward]{template}}}")
