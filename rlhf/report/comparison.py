"""Several runs side by side: their numbers, and the settings that differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlhf.config.schema import EVERY_STAGE, Stage
from rlhf.diagnosis.verdict import ExaminedRun
from rlhf.report.origin import flatten_settings, show_setting
from rlhf.reporting.summary import format_value
from rlhf.utils.units import format_bytes, format_seconds

HEADLINES: dict[Stage, tuple[str, ...]] = {
    "sft": ("perplexity",),
    "reward": ("accuracy",),
    "dpo": ("accuracy",),
    "ppo": ("reward", "kl", "judge_reward", "approved_share"),
    "distill": ("loss", "judge_reward", "approved_share"),
}
"""The held-out metrics by which runs are compared, by stage; the first one ranks them."""


def differing_settings(runs: Sequence[ExaminedRun]) -> list[tuple[str, list[str]]]:
    """Return the settings in which runs differ, each with its value in every run."""
    settings = [flatten_settings(run.records.config.model_dump(mode="json")) for run in runs]
    keys = dict.fromkeys(key for flat in settings for key in flat if key != "output")
    return [
        (key, [show_setting(flat.get(key)) for flat in settings])
        for key in keys
        if any(flat.get(key) != settings[0].get(key) for flat in settings)
    ]


def comparison_table(runs: Sequence[ExaminedRun]) -> dict[str, Any]:
    """Return the held-out numbers after training of several runs, their time and memory, side by side.

    Each cell is a text, and the number's share of the largest one of its column in percent, for a bar.
    """
    columns = [
        (name, metric)
        for name in EVERY_STAGE
        for metric in HEADLINES[name]
        if any(_final(run, name, metric) is not None for run in runs)
    ]
    formats: list[Callable[[float], str]] = [partial(format_value, name) for _, name in columns]
    formats += [format_seconds, format_bytes]
    rows: list[list[float | None]] = [[_final(run, *column) for column in columns] + _costs(run) for run in runs]
    cells = []
    for numbers, form in zip(zip(*rows), formats):
        most = max((abs(number) for number in numbers if number is not None), default=0.0) or 1.0
        cells.append(
            [("", 0) if number is None else (form(number), round(100 * max(number, 0) / most)) for number in numbers]
        )
    titles = [*(f"{name} {metric.replace('_', ' ')}" for name, metric in columns), "time", "peak memory"]
    return {"columns": titles, "rows": list(zip(runs, zip(*cells)))}


def _final(run: ExaminedRun, name: Stage, metric: str) -> float | None:
    stage = run.records.stage(name)
    return stage.final(metric) if stage else None


def _costs(run: ExaminedRun) -> list[float | None]:
    """Return the seconds and the peak memory of a run's complete stages."""
    summaries = [stage.records.summary for stage in run.stages if stage.records.summary]
    if not summaries:
        return [None, None]
    return [
        sum(summary.get("seconds", 0.0) for summary in summaries),
        max(summary.get("peak_memory", 0) for summary in summaries),
    ]
