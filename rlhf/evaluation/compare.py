"""Compare models on the same prompts: completions, scores of a reward model, and statistics (`rlhf compare`).

`compare_models` takes names of models and rows with prompts and returns a `Comparison`; `compute_statistics` returns
its numbers as JSON values. One model is loaded at a time. In the statistics one prompt counts once: numbers of several
samples are averaged over a prompt's samples first, so that confidence intervals are over independent prompts.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rlhf.config.schema import Config
from rlhf.data.records import Row
from rlhf.data.report import DropCounts
from rlhf.evaluation.completions import (
    ModelOutputs,
    ModelSummary,
    check_different_models,
    select_fitting,
    summarize_model,
    write_completions,
)
from rlhf.evaluation.generate import GenerationSettings, Ids, score_completions
from rlhf.evaluation.models import EvaluationDevice, LanguageModel, RewardModel, load_language_model, load_reward_model
from rlhf.reporting.progress import progress
from rlhf.utils.statistics import best_of_at, best_of_kl, distinct, estimate, expected_best, repeated, wilson, win_share


@dataclass
class Comparison:
    """The outputs of all models, `samples` completions for each of `rows`, with notes for the user."""

    settings: GenerationSettings
    reward_model: str | None
    samples: int
    rows: list[Row]
    left_out: DropCounts
    columns: list[ModelOutputs]
    notes: list[str]


def compare_models(
    models: Sequence[str],
    rows: Sequence[Row],
    settings: GenerationSettings,
    config: Config,
    device: EvaluationDevice,
    *,
    reward_model: str | None = None,
    samples: int = 1,
) -> Comparison:
    """Generate `samples` completions of each prompt with each model, and score them with the reward model.

    The first model is loaded last, because it also reads the completions of the others. The settings of `config.model`
    decide if the models' code may run, and which tokenizer replaces the models'.

    Raises:
        ConfigError: a model is named twice.
        DataError: no prompt fits all models.
        ModelError, RunError: a model cannot be loaded, or is of the wrong kind.
    """
    check_different_models(models)
    writers = [summarize_model(name, config, device) for name in models]
    judge = summarize_model(reward_model, config, device, scalar_head=True) if reward_model else None
    summaries = [*writers, judge] if judge else writers
    fitting, prompts, left_out = select_fitting(summaries, rows, settings.max_tokens)
    outputs = [ModelOutputs(name) for name in models]
    comparison = Comparison(settings, reward_model, samples, fitting, left_out, outputs, [])
    repeated = [[ids for ids in column for _ in range(samples)] for column in prompts]
    first, *others = zip(writers, repeated, outputs)
    for summary, inputs, column in (*others, first):
        model = load_language_model(summary.name, config, device)
        write_completions(model, inputs, column, settings)
        if column is outputs[0]:
            for other in outputs:
                if other.log_ratios is not None:
                    log_probs = _read(model, inputs, other, settings)
                    other.log_ratios = [ratio - base for ratio, base in zip(other.log_ratios, log_probs)]
        elif _reads(writers[0], summary, column):
            column.log_ratios = _read(model, inputs, column, settings)
        del model
        device.free_memory()
    _count_tokens(comparison, writers)
    if judge:
        _score(comparison, judge, writers, repeated[-1], load_reward_model(judge.name, config, device))
        device.free_memory()
    return comparison


def _read(
    writer: LanguageModel, prompts: Sequence[Ids], column: ModelOutputs, settings: GenerationSettings
) -> list[float]:
    whose = "what it wrote" if writer.name == column.name else f"what {column.name} wrote"
    with progress(len(prompts), f"{writer.name} reads {whose}", unit="completions") as bar:
        return score_completions(writer, prompts, column.ids, settings, bar.advance)


def _same_vocabulary(model: ModelSummary, other: ModelSummary) -> bool:
    """Return True if the models have the same vocabulary."""
    return bool(model.tokenizer.get_vocab() == other.tokenizer.get_vocab())


def _reads(reader: ModelSummary, writer: ModelSummary, column: ModelOutputs) -> bool:
    """Return True if a model's completions are valid tokens of the reader."""
    return _same_vocabulary(reader, writer) and max(map(max, column.ids)) < reader.rows


def _count_tokens(comparison: Comparison, writers: Sequence[ModelSummary]) -> None:
    """Set the tokens for distinct n-grams: each model's, or if vocabularies differ, the first model's for all."""
    first, *others = writers
    strangers = [other.name for other in others if not _same_vocabulary(first, other)]
    for column in comparison.columns:
        column.counted = first.tokenizer(column.texts)["input_ids"] if strangers else column.ids
        if column.log_ratios is None and column is not comparison.columns[0]:
            column.no_ratios = f"its vocabulary differs from that of {first.name}"
    if strangers:
        comparison.notes.append(
            f"{', '.join(strangers)}: the vocabulary differs from that of {first.name}: log-ratios are left out, "
            f"lengths are in each model's tokens, and distinct n-grams are counted in {first.name}'s"
        )


def _score(
    comparison: Comparison,
    summary: ModelSummary,
    writers: Sequence[ModelSummary],
    prompts: Sequence[Ids],
    judge: RewardModel,
) -> None:
    """Score the completions: their tokens or, if a vocabulary differs, their encoded text.

    Truncated completions have no end token in either case, as in PPO.
    """
    by_text = not all(_reads(summary, writer, column) for writer, column in zip(writers, comparison.columns))
    if by_text:
        comparison.notes.append(
            f"{judge.name}: its vocabulary differs from that of a model: completions are scored by their text"
        )
    cut = 0
    for column in comparison.columns:
        sequences = _by_text(comparison, column, judge) if by_text else [*map(operator.add, prompts, column.ids)]
        cut += sum(len(ids) > judge.max_length for ids in sequences)
        column.scores = judge.scores(
            [ids[: judge.max_length] for ids in sequences],
            batch_size=comparison.settings.batch_size,
            description=f"the reward model scores {column.name}",
        )
    if cut:
        comparison.notes.append(f"{judge.name}: {cut} completions exceed its maximum length; it scored their beginning")


def _by_text(comparison: Comparison, column: ModelOutputs, judge: RewardModel) -> list[Ids]:
    """Return the prompts and completions of a model in the reward model's tokens."""
    prompts = [row.prompt for row in comparison.rows for _ in range(comparison.samples)]
    return judge.encode_completions(prompts, column.texts, column.truncated)


_GRAMS = (1, 2, 3)


def compute_statistics(comparison: Comparison, best_of: Sequence[int] = ()) -> dict[str, Any]:
    """Return all numbers of a comparison, as docs/metrics.md defines them, for each n of `best_of` too."""
    first, *others = comparison.columns
    sampling = comparison.settings.sampling
    statistics: dict[str, Any] = {
        "prompts": len(comparison.rows),
        "left_out": {reason: rows for reason, (rows, _) in comparison.left_out.items()},
        "samples": comparison.samples,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": comparison.settings.max_tokens,
        "seed": comparison.settings.seed,
        "reward_model": comparison.reward_model,
        "notes": comparison.notes,
        "models": [_of_model(comparison, column) for column in comparison.columns],
    }
    if best_of:
        statistics["best_of"] = [_best_of(comparison, number) for number in best_of]
        statistics["best_of_at_kl"] = [
            _at_same_kl(comparison, first, column, statistics["models"][place]["kl"]["mean"])
            for place, column in enumerate(others, 1)
            if "kl" in statistics["models"][place]
        ]
    return statistics


def _of_model(comparison: Comparison, column: ModelOutputs) -> dict[str, Any]:
    first = comparison.columns[0]
    numbers: dict[str, Any] = {"model": column.name}
    if column.scores is not None and first.scores is not None:
        rewards, base_rewards = _by_prompt(comparison, column.scores), _by_prompt(comparison, first.scores)
        numbers["reward"] = _with_interval([fmean(scores) for scores in rewards])
        if column is not first:
            pairs = list(zip(rewards, base_rewards))
            shares = [win_share(scores, base) for scores, base in pairs]
            low, high = wilson(sum(shares), len(shares))
            numbers["win_rate"] = {"mean": fmean(shares), "low": low, "high": high}
            numbers["reward_difference"] = _with_interval([fmean(scores) - fmean(base) for scores, base in pairs])
    lengths = [len(ids) for ids in column.ids]
    if column.log_ratios is not None:
        per_prompt = [fmean(ratios) for ratios in _by_prompt(comparison, column.log_ratios)]
        # The mean estimates KL(model || first) only if tokens are drawn from the whole distribution.
        sampling = comparison.settings.sampling
        is_kl = sampling.temperature > 0 and sampling.top_p == 1 and sampling.top_k == 0
        per_token = sum(column.log_ratios) / sum(lengths)
        numbers["kl" if is_kl else "log_ratio"] = _with_interval(per_prompt) | {"per_token": per_token}
    elif column.no_ratios:
        numbers["no_log_ratio"] = column.no_ratios
    numbers |= {f"distinct_{length}": distinct(column.counted, length) for length in _GRAMS}
    numbers["length"] = fmean(lengths)
    numbers["truncated_share"] = 1 - fmean(not truncated for truncated in column.truncated)
    numbers["repeated_share"] = repeated(column.texts)
    return numbers


def _best_of(comparison: Comparison, number: int) -> dict[str, Any]:
    """Return the expected score of the best of `number` samples, for each model."""
    rewards = {
        column.name: _with_interval([expected_best(scores, number) for scores in _by_prompt(comparison, column.scores)])
        for column in comparison.columns
        if column.scores is not None
    }
    return {"best_of": number, "kl_at_most": best_of_kl(number), "reward": rewards}


def _at_same_kl(comparison: Comparison, first: ModelOutputs, column: ModelOutputs, kl: float) -> dict[str, Any]:
    """Return the largest n for which best-of-n of the first model has at most a model's KL, and its expected score.

    `reward` is None if n exceeds the number of samples.
    """
    number = best_of_at(kl)
    scores = _by_prompt(comparison, first.scores or [])
    reward = _with_interval([expected_best(row, number) for row in scores]) if number <= comparison.samples else None
    return {"model": column.name, "kl": kl, "best_of": number, "kl_at_most": best_of_kl(number), "reward": reward}


def _by_prompt(comparison: Comparison, values: Sequence[float]) -> list[Sequence[float]]:
    return [values[start : start + comparison.samples] for start in range(0, len(values), comparison.samples)]


def _with_interval(values: Sequence[float]) -> dict[str, float | None]:
    mean, error, interval = estimate(values)
    low, high = interval or (None, None)
    return {"mean": mean, "error": error, "low": low, "high": high}


def list_records(comparison: Comparison) -> list[dict[str, Any]]:
    """Return a record for each prompt: the completions of each model and their scores, in order of sampling."""

    def by_model(key: str, place: int) -> dict[str, Any]:
        part = slice(place * comparison.samples, (place + 1) * comparison.samples)
        columns = {column.name: getattr(column, key) for column in comparison.columns}
        return {name: values[part] for name, values in columns.items() if values is not None}

    return [
        {
            "prompt": row.text,
            "source": row.source,
            "completions": by_model("texts", place),
            "scores": by_model("scores", place),
            "truncated": by_model("truncated", place),
            "log_ratios": by_model("log_ratios", place),
        }
        for place, row in enumerate(comparison.rows)
    ]
