"""The numbers of a comparison: what each model is worth, how far it is from the first, and what best of n would give.

A `Comparison` flows in; a dictionary that JSON holds flows out. What was drawn for one prompt counts as one: numbers of
several samples are means over a prompt's samples first, so that intervals are over independent prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rlhf.evaluation.compare import Column, Comparison
from rlhf.utils.statistics import best_of_at, best_of_kl, distinct, estimate, expected_best, repeated, wilson, win_share

_GRAMS = (1, 2, 3)


def figures(found: Comparison, best_of: Sequence[int] = ()) -> dict[str, Any]:
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


def _of_model(found: Comparison, column: Column) -> dict[str, Any]:
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


def _at_same_kl(found: Comparison, first: Column, column: Column, kl: float) -> dict[str, Any]:
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


def records(found: Comparison) -> list[dict[str, Any]]:
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
