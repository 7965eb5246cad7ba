"""Several models complete the same prompts, and a reward model scores what they wrote: `rlhf compare`.

Names of models and rows with prompts flow in; a `Comparison` flows out, of which `rlhf.evaluation.comparison_stats`
makes
numbers. One model is held at a time.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlhf.config.schema import Config
from rlhf.data.completions import completion_texts
from rlhf.data.prompt_encoding import PromptFormat, conversation_row, encode_prompts
from rlhf.data.records import Row
from rlhf.data.report import Dropped, count
from rlhf.errors import ConfigError, DataError, ModelError
from rlhf.evaluation.adapters import base_of
from rlhf.evaluation.generate import Ids, Manner, log_probs, write
from rlhf.evaluation.models import Device, Judge, Writer, load_judge, load_writer, prompt_format
from rlhf.evaluation.resolve import model_folder, reward_model_folder
from rlhf.models.attention import choose_attention
from rlhf.models.compatibility import max_positions
from rlhf.models.folder import check_model_folder
from rlhf.models.loading import load_model_tokenizer, outline
from rlhf.reporting.progress import progress


@dataclass
class Column:
    """What one model wrote: the samples of the first prompt, then those of the second, and so on.

    Attributes:
        ended: whether each came to its end in `max_tokens`.
        log_ratios: log p(completion) under this model less that under the first one, in nats; None: `no_ratios` says
            why, or this is the first.
        counted: the tokens in which the variety of all columns is counted.
        scores: the reward model's; None where there is none.
    """

    name: str
    ids: list[Ids] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    log_ratios: list[float] | None = None
    no_ratios: str = ""
    counted: list[Ids] = field(default_factory=list)
    scores: list[float] | None = None


@dataclass
class Comparison:
    """Columns side by side: `samples` completions of each of `rows`, by each model; and what is to be said of it."""

    manner: Manner
    reward_model: str | None
    samples: int
    rows: list[Row]
    left_out: Dropped
    columns: list[Column]
    notes: list[str]


class Known(NamedTuple):
    """What can be known of a model without its weights, as `rlhf.evaluation.models.Loaded` has it.

    `rows`: of its embedding; some models have more than their tokenizer has tokens, and may draw those.
    """

    name: str
    tokenizer: Any
    prompt_format: PromptFormat
    room: int | None
    rows: int

    def prompts(self, rows: Sequence[Row]) -> list[Ids | None]:
        """The rows' prompts as this model was trained to see them; None where its chat template refuses one."""
        written = [conversation_row(row.prompt, self.prompt_format) for row in rows]
        return encode_prompts(self.tokenizer, written, chat_template=self.prompt_format == "template")


def compare(
    models: Sequence[str],
    rows: Sequence[Row],
    manner: Manner,
    config: Config,
    device: Device,
    *,
    reward_model: str | None = None,
    samples: int = 1,
) -> Comparison:
    """Have each model complete the prompts `samples` times, and the reward model score the completions.

    The first model is loaded last, for it reads what the others wrote as well.

    Args:
        config: with which tokenizer, and whether with their own code, models are loaded.

    Raises:
        ConfigError: a model is named twice.
        DataError: no prompt fits all models.
        ModelError, RunError: a model cannot be loaded, or is not of the kind that is wanted.
    """
    places = [os.path.realpath(model_folder(name)) for name in models]
    if twice := [name for name, place in zip(models, places) if places.count(place) > 1]:
        raise ConfigError(f"{twice[-1]}: is the same model as {twice[0]}; name each once")
    writers = [_look(name, config, device) for name in models]
    judge = _look(reward_model, config, device, scalar_head=True) if reward_model else None
    kept, prompts, left_out = _fitting([*writers, *([judge] if judge else [])], rows, manner.max_tokens)
    found = Comparison(manner, reward_model, samples, kept, left_out, [Column(name) for name in models], [])
    repeated = [[ids for ids in column for _ in range(samples)] for column in prompts]
    first, *others = zip(writers, repeated, found.columns)
    for known, asked, column in (*others, first):
        writer = load_writer(known.name, config, device, name=known.name)
        _write(writer, asked, column, manner)
        if column is not first[2] and _reads(first[0], known, column):
            column.log_ratios = _read(writer, asked, column, manner)
        if column is first[2]:
            for _, _, other in others:
                if other.log_ratios is not None:
                    theirs = _read(writer, asked, other, manner)
                    other.log_ratios = [own - base for own, base in zip(other.log_ratios, theirs)]
        del writer
        device.free()
    _count_tokens(found, writers)
    if judge:
        _score(found, judge, writers, repeated[-1], load_judge(judge.name, config, device, name=judge.name))
        device.free()
    return found


def _look(name: str, config: Config, device: Device, *, scalar_head: bool = False) -> Known:
    """What is known of a model before its weights are read; what loading them would raise is raised now."""
    folder = (reward_model_folder if scalar_head else model_folder)(name)
    if scalar_head:
        check_model_folder(str(folder))
    base = str(folder) if scalar_head else base_of(folder)
    source = config.model.model_copy(update={"path": base})
    tokenizer, _ = load_model_tokenizer(source)
    attention = choose_attention(device.accelerator, base, source).name
    model = outline(base, source, attention=attention, scalar_head=scalar_head)
    rows = max(model.get_input_embeddings().weight.shape[0], len(tokenizer))
    return Known(name, tokenizer, prompt_format(folder, tokenizer, config), max_positions(model.config), rows)


def _fitting(models: Sequence[Known], rows: Sequence[Row], max_tokens: int) -> tuple[list[Row], list[Any], Dropped]:
    """The rows that every model can complete, the prompts of each model, and why others are left out."""
    columns = [model.prompts(rows) for model in models]
    left_out: Dropped = {}
    kept: list[int] = []
    for place, row in enumerate(rows):
        reason = next(
            filter(None, (_unfit(model, column[place], max_tokens) for model, column in zip(models, columns))), ""
        )
        if reason:
            count(left_out, reason, row.source)
        else:
            kept.append(place)
    if not kept:
        reason, (_, where) = next(iter(left_out.items()))
        raise DataError(f"no prompt is left: {reason} ({where}); give shorter ones, or lower --max-tokens")
    return [rows[place] for place in kept], [[column[place] for place in kept] for column in columns], left_out


def _unfit(model: Known, prompt: Ids | None, max_tokens: int) -> str:
    """Why a model cannot be given a prompt; empty where it can."""
    if prompt is None:
        return f"{model.name}: its chat template refuses the turns"
    if not prompt:
        return f"{model.name}: no token is left of the prompt"
    if model.room and len(prompt) + max_tokens > model.room:
        return f"{model.name}: the prompt and --max-tokens {max_tokens} are more than its {model.room} tokens"
    return ""


def _write(writer: Writer, prompts: Sequence[Ids], column: Column, manner: Manner) -> None:
    with progress(len(prompts), f"{writer.name} writes", unit="completions") as bar:
        column.ids = write(writer, prompts, manner, bar.advance)
    column.texts = completion_texts(writer.tokenizer, column.ids)
    column.ended = [ids[-1] in writer.end_ids for ids in column.ids]


def _read(writer: Writer, prompts: Sequence[Ids], column: Column, manner: Manner) -> list[float]:
    whose = "what it wrote" if writer.name == column.name else f"what {column.name} wrote"
    with progress(len(prompts), f"{writer.name} reads {whose}", unit="completions") as bar:
        return log_probs(writer, prompts, column.ids, manner, bar.advance)


def _alike(one: Known, other: Known) -> bool:
    """Whether tokens of one are tokens of the other."""
    return bool(one.tokenizer.get_vocab() == other.tokenizer.get_vocab())


def _reads(reader: Known, writer: Known, column: Column) -> bool:
    """Whether what a model wrote are tokens of the reader."""
    return _alike(reader, writer) and max(map(max, column.ids)) < reader.rows


def _count_tokens(found: Comparison, writers: Sequence[Known]) -> None:
    """Give each column the tokens that its variety is counted in: its own, or where these differ, all the first's."""
    first, *others = writers
    strangers = [other.name for other in others if not _alike(first, other)]
    for column in found.columns:
        column.counted = first.tokenizer(column.texts)["input_ids"] if strangers else column.ids
        if column.log_ratios is None and column is not found.columns[0]:
            column.no_ratios = f"its vocabulary is not that of {first.name}"
    if strangers:
        found.notes.append(
            f"{', '.join(strangers)}: the vocabulary is not that of {first.name}: log-ratios are left out, lengths are "
            f"in each model's own tokens, and variety is counted in {first.name}'s"
        )


def _score(found: Comparison, known: Known, writers: Sequence[Known], prompts: Sequence[Ids], judge: Judge) -> None:
    """Score the completions: the tokens that were drawn or, where a vocabulary differs, those of their text.

    What was cut off has no end in either case, as PPO scores it.
    """
    by_text = not all(_reads(known, writer, column) for writer, column in zip(writers, found.columns))
    if by_text:
        found.notes.append(
            f"{judge.name}: its vocabulary is not that of all models: completions are scored by their text"
        )
    cut = 0
    for column in found.columns:
        sequences = _by_text(found, column, judge) if by_text else [*map(operator.add, prompts, column.ids)]
        cut += sum(len(ids) > judge.room for ids in sequences)
        column.scores = judge.scores(
            [ids[: judge.room] for ids in sequences],
            batch_size=found.manner.batch_size,
            description=f"the reward model scores {column.name}",
        )
    if cut:
        found.notes.append(f"{judge.name}: {cut} completions are longer than it can read; it scored what it can")


def _by_text(found: Comparison, column: Column, judge: Judge) -> list[Ids]:
    """Prompts and completions of a column in the reward model's tokens."""
    rows = [conversation_row(row.prompt, judge.prompt_format) for row in found.rows for _ in range(found.samples)]
    sequences = []
    for text, ended, ids in zip(column.texts, column.ended, judge.encode(rows, column.texts), strict=True):
        if ids is None:
            raise ModelError(f"{judge.name}: its chat template refuses the reply {text[:60]!r}; name another model")
        sequences.append(ids if ended else ids[:-1])
    return sequences
