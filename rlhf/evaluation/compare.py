"""Several models complete the same prompts, and a reward model scores what they wrote: `rlhf compare`.

Names of models and rows with prompts flow in; a `Comparison` flows out, of which `rlhf.evaluation.compare`
makes
numbers. One model is held at a time.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from rlhf.config.schema import Config
from rlhf.data.batches import completion_texts
from rlhf.data.prompt_encoding import PromptFormat, encode_prompts, make_conversation_row
from rlhf.data.records import Row
from rlhf.data.report import DropCounts, add_drop
from rlhf.errors import ConfigError, DataError, ModelError
from rlhf.evaluation.generate import GenerationSettings, Ids, generate_completions, score_completions
from rlhf.evaluation.models import (
    EvaluationDevice,
    LanguageModel,
    RewardModel,
    find_prompt_format,
    load_language_model,
    load_reward_model,
)
from rlhf.evaluation.resolve import find_base_model, model_folder, reward_model_folder
from rlhf.models.attention import choose_attention
from rlhf.models.compatibility import check_model_folder, get_max_positions
from rlhf.models.loading import load_model_tokenizer, load_on_meta
from rlhf.reporting.progress import progress
from rlhf.utils.statistics import best_of_at, best_of_kl, distinct, estimate, expected_best, repeated, wilson, win_share


@dataclass
class ModelOutputs:
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

    manner: GenerationSettings
    reward_model: str | None
    samples: int
    rows: list[Row]
    left_out: DropCounts
    columns: list[ModelOutputs]
    notes: list[str]


class ModelSummary(NamedTuple):
    """What can be known of a model without its weights, as `rlhf.evaluation.models.EvaluatedModel` has it.

    `rows`: of its embedding; some models have more than their tokenizer has tokens, and may draw those.
    """

    name: str
    tokenizer: Any
    prompt_format: PromptFormat
    room: int | None
    rows: int

    def prompts(self, rows: Sequence[Row]) -> list[Ids | None]:
        """The rows' prompts as this model was trained to see them; None where its chat template refuses one."""
        written = [make_conversation_row(row.prompt, self.prompt_format) for row in rows]
        return encode_prompts(self.tokenizer, written, chat_template=self.prompt_format == "template")


def compare_models(
    models: Sequence[str],
    rows: Sequence[Row],
    manner: GenerationSettings,
    config: Config,
    device: EvaluationDevice,
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
    found = Comparison(manner, reward_model, samples, kept, left_out, [ModelOutputs(name) for name in models], [])
    repeated = [[ids for ids in column for _ in range(samples)] for column in prompts]
    first, *others = zip(writers, repeated, found.columns)
    for known, asked, column in (*others, first):
        writer = load_language_model(known.name, config, device, name=known.name)
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
        _score(found, judge, writers, repeated[-1], load_reward_model(judge.name, config, device, name=judge.name))
        device.free()
    return found


def _look(name: str, config: Config, device: EvaluationDevice, *, scalar_head: bool = False) -> ModelSummary:
    """What is known of a model before its weights are read; what loading them would raise is raised now."""
    folder = (reward_model_folder if scalar_head else model_folder)(name)
    if scalar_head:
        check_model_folder(str(folder))
    base = str(folder) if scalar_head else find_base_model(folder)
    source = config.model.model_copy(update={"path": base})
    tokenizer, _ = load_model_tokenizer(source)
    attention = choose_attention(device.accelerator, base, source).name
    model = load_on_meta(base, source, attention=attention, scalar_head=scalar_head)
    rows = max(model.get_input_embeddings().weight.shape[0], len(tokenizer))
    return ModelSummary(
        name, tokenizer, find_prompt_format(folder, tokenizer, config), get_max_positions(model.config), rows
    )


def _fitting(
    models: Sequence[ModelSummary], rows: Sequence[Row], max_tokens: int
) -> tuple[list[Row], list[Any], DropCounts]:
    """The rows that every model can complete, the prompts of each model, and why others are left out."""
    columns = [model.prompts(rows) for model in models]
    left_out: DropCounts = {}
    kept: list[int] = []
    for place, row in enumerate(rows):
        reason = next(
            filter(None, (_unfit(model, column[place], max_tokens) for model, column in zip(models, columns))), ""
        )
        if reason:
            add_drop(left_out, reason, row.source)
        else:
            kept.append(place)
    if not kept:
        reason, (_, where) = next(iter(left_out.items()))
        raise DataError(f"no prompt is left: {reason} ({where}); give shorter ones, or lower --max-tokens")
    return [rows[place] for place in kept], [[column[place] for place in kept] for column in columns], left_out


def _unfit(model: ModelSummary, prompt: Ids | None, max_tokens: int) -> str:
    """Why a model cannot be given a prompt; empty where it can."""
    if prompt is None:
        return f"{model.name}: its chat template refuses the turns"
    if not prompt:
        return f"{model.name}: no token is left of the prompt"
    if model.room and len(prompt) + max_tokens > model.room:
        return f"{model.name}: the prompt and --max-tokens {max_tokens} are more than its {model.room} tokens"
    return ""


def _write(writer: LanguageModel, prompts: Sequence[Ids], column: ModelOutputs, manner: GenerationSettings) -> None:
    with progress(len(prompts), f"{writer.name} writes", unit="completions") as bar:
        column.ids = generate_completions(writer, prompts, manner, bar.advance)
    column.texts = completion_texts(writer.tokenizer, column.ids)
    column.ended = [ids[-1] in writer.end_ids for ids in column.ids]


def _read(
    writer: LanguageModel, prompts: Sequence[Ids], column: ModelOutputs, manner: GenerationSettings
) -> list[float]:
    whose = "what it wrote" if writer.name == column.name else f"what {column.name} wrote"
    with progress(len(prompts), f"{writer.name} reads {whose}", unit="completions") as bar:
        return score_completions(writer, prompts, column.ids, manner, bar.advance)


def _alike(one: ModelSummary, other: ModelSummary) -> bool:
    """Whether tokens of one are tokens of the other."""
    return bool(one.tokenizer.get_vocab() == other.tokenizer.get_vocab())


def _reads(reader: ModelSummary, writer: ModelSummary, column: ModelOutputs) -> bool:
    """Whether what a model wrote are tokens of the reader."""
    return _alike(reader, writer) and max(map(max, column.ids)) < reader.rows


def _count_tokens(found: Comparison, writers: Sequence[ModelSummary]) -> None:
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


def _score(
    found: Comparison, known: ModelSummary, writers: Sequence[ModelSummary], prompts: Sequence[Ids], judge: RewardModel
) -> None:
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


def _by_text(found: Comparison, column: ModelOutputs, judge: RewardModel) -> list[Ids]:
    """Prompts and completions of a column in the reward model's tokens."""
    rows = [make_conversation_row(row.prompt, judge.prompt_format) for row in found.rows for _ in range(found.samples)]
    sequences = []
    for text, ended, ids in zip(column.texts, column.ended, judge.encode(rows, column.texts), strict=True):
        if ids is None:
            raise ModelError(f"{judge.name}: its chat template refuses the reply {text[:60]!r}; name another model")
        sequences.append(ids if ended else ids[:-1])
    return sequences


_GRAMS = (1, 2, 3)


def compute_statistics(found: Comparison, best_of: Sequence[int] = ()) -> dict[str, Any]:
    """All numbers of a comparison, as docs/metrics.md defines them.

    Args:
        best_of: the n of which the best is asked for, at most the samples of a prompt.
    """
    first, *others = found.columns
    sampling = found.manner.sampling
    told: dict[str, Any] = {
        "prompts": len(found.rows),
        "left_out": {reason: rows for reason, (rows, _) in found.left_out.items()},
        "samples": found.samples,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": found.manner.max_tokens,
        "seed": found.manner.seed,
        "reward_model": found.reward_model,
        "notes": found.notes,
        "models": [_of_model(found, column) for column in found.columns],
    }
    if best_of:
        told["best_of"] = [_best_of(found, number) for number in best_of]
        told["best_of_at_kl"] = [
            _at_same_kl(found, first, column, told["models"][place]["kl"]["mean"])
            for place, column in enumerate(others, 1)
            if "kl" in told["models"][place]
        ]
    return told


def kl_name(found: Comparison) -> str:
    """`kl` where the mean log-ratio estimates KL(model || first), `log_ratio` where tokens were not drawn from all of
    the model's distribution: greedily, or from its likeliest part alone."""
    sampling = found.manner.sampling
    return "kl" if sampling.temperature > 0 and sampling.top_p == 1 and sampling.top_k == 0 else "log_ratio"


def _of_model(found: Comparison, column: ModelOutputs) -> dict[str, Any]:
    first = found.columns[0]
    numbers: dict[str, Any] = {"model": column.name}
    if column.scores is not None and first.scores is not None:
        own, base = _by_prompt(found, column.scores), _by_prompt(found, first.scores)
        numbers["reward"] = _told([fmean(scores) for scores in own])
        if column is not first:
            shares = [win_share(mine, theirs) for mine, theirs in zip(own, base)]
            low, high = wilson(sum(shares), len(shares))
            numbers["win_rate"] = {"mean": fmean(shares), "low": low, "high": high}
            numbers["reward_difference"] = _told([fmean(mine) - fmean(theirs) for mine, theirs in zip(own, base)])
    lengths = [len(ids) for ids in column.ids]
    if column.log_ratios is not None:
        per_prompt = [fmean(ratios) for ratios in _by_prompt(found, column.log_ratios)]
        numbers[kl_name(found)] = _told(per_prompt) | {"per_token": sum(column.log_ratios) / sum(lengths)}
    elif column.no_ratios:
        numbers["no_log_ratio"] = column.no_ratios
    numbers |= {f"distinct_{length}": distinct(column.counted, length) for length in _GRAMS}
    numbers["length"] = fmean(lengths)
    numbers["truncated_share"] = 1 - fmean(column.ended)
    numbers["repeated_share"] = repeated(column.texts)
    return numbers


def _best_of(found: Comparison, number: int) -> dict[str, Any]:
    """The score that the best of `number` samples is expected to have, of each model."""
    rewards = {
        column.name: _told([expected_best(scores, number) for scores in _by_prompt(found, column.scores)])
        for column in found.columns
        if column.scores is not None
    }
    return {"best_of": number, "kl_at_most": best_of_kl(number), "reward": rewards}


def _at_same_kl(found: Comparison, first: ModelOutputs, column: ModelOutputs, kl: float) -> dict[str, Any]:
    """The most samples of the first model of which the best is no farther from it than a model is; and its score.

    `reward` is None where more samples would be needed than were drawn.
    """
    number = best_of_at(kl)
    scores = _by_prompt(found, first.scores or [])
    reward = _told([expected_best(own, number) for own in scores]) if number <= found.samples else None
    return {"model": column.name, "kl": kl, "best_of": number, "kl_at_most": best_of_kl(number), "reward": reward}


def _by_prompt(found: Comparison, values: Sequence[float]) -> list[Sequence[float]]:
    return [values[start : start + found.samples] for start in range(0, len(values), found.samples)]


def _told(values: Sequence[float]) -> dict[str, float | None]:
    mean, error, interval = estimate(values)
    low, high = interval or (None, None)
    return {"mean": mean, "error": error, "low": low, "high": high}


def list_records(found: Comparison) -> list[dict[str, Any]]:
    """A record for each prompt: the completions of each model and their scores, in the order of drawing."""
    lines: list[dict[str, Any]] = []
    for place, row in enumerate(found.rows):
        part = slice(place * found.samples, (place + 1) * found.samples)
        lines.append(
            {
                "prompt": row.text,
                "source": row.source,
                "completions": {column.name: column.texts[part] for column in found.columns},
                "scores": {column.name: column.scores[part] for column in found.columns if column.scores is not None},
                "truncated": {column.name: [not ended for ended in column.ended[part]] for column in found.columns},
                "log_ratios": {
                    column.name: column.log_ratios[part] for column in found.columns if column.log_ratios is not None
                },
            }
        )
    return lines
