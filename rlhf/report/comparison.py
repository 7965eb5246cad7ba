"""The origin of a run, and several runs side by side: their numbers, and the settings that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rlhf.config.schema import EVERY_STAGE, Config, Stage
from rlhf.diagnosis.records import RunRecords
from rlhf.report.contents import RunReport
from rlhf.reporting.summary import format_value
from rlhf.utils.units import format_bytes, format_seconds

HEADLINES: dict[Stage, tuple[str, ...]] = {
    "sft": ("perplexity",),
    "reward": ("accuracy",),
    "dpo": ("accuracy",),
    "ppo": ("reward", "kl", "judge_reward", "approved_share"),
}
"""The held-out metrics by which runs are compared, by stage; the first one ranks them."""


def describe_origin(run: RunRecords) -> dict[str, Any]:
    """Return the origin of a run: settings that differ from the defaults, data, versions, device and commands."""
    description, accelerator, device = run.description, run.accelerator, run.device
    reason = (accelerator.get("precision") or {}).get("reason", "")
    facts = {
        "accelerator": f"{accelerator.get('name', '')}: {accelerator.get('reason', '')}".strip(": "),
        "device": f"{device.get('count', '')} × {device.get('model', '')}, {device.get('software', '')}".strip(" ×,"),
        "precision": f"{run.precision}: {reason}".strip(": "),
        "attention": ", ".join(
            f"{choice['name']} ({model})" for model, choice in (accelerator.get("attention") or {}).items()
        ),
    }
    return {
        "settings": changed_settings(run.config, [stage.name for stage in run.stages]),
        "data": [
            (name, f"{entry.get('rows', 0):,} rows", f"{entry['dropped']:,} dropped" if entry.get("dropped") else "")
            for name, entry in description.get("data", {}).items()
        ],
        "versions": [*description.get("versions", {}).items()],
        "facts": [(name, value) for name, value in facts.items() if value],
        "commands": [
            (invocation.get("started", "").replace("T", " ")[:19], invocation.get("command", ""))
            for invocation in description.get("invocations", [])
        ],
    }


def changed_settings(config: Config, stages: Sequence[Stage]) -> list[tuple[str, str, str]]:
    """Return (key, value, default) of the settings of `stages` that differ from the defaults."""
    settings, default = _flatten(config.model_dump(mode="json")), _flatten(Config().model_dump(mode="json"))
    ignored = ("output", *(f"{name}." for name in EVERY_STAGE if name not in stages))
    return [
        (key, _show(value), _show(default.get(key)))
        for key, value in settings.items()
        if value != default.get(key) and not key.startswith(ignored)
    ]


def differing_settings(reports: Sequence[RunReport]) -> list[tuple[str, list[str]]]:
    """Return the settings in which runs differ, each with its value in every run."""
    settings = [_flatten(report.records.config.model_dump(mode="json")) for report in reports]
    keys = dict.fromkeys(key for flat in settings for key in flat if key != "output")
    return [
        (key, [_show(flat.get(key)) for flat in settings])
        for key in keys
        if any(flat.get(key) != settings[0].get(key) for flat in settings)
    ]


def comparison_table(reports: Sequence[RunReport]) -> dict[str, Any]:
    """Return the held-out numbers after training of several runs, their time and memory, side by side.

    Each cell is a text, and the number's share of the largest one of its column in percent, for a bar.
    """
    columns = [
        (name, metric)
        for name in EVERY_STAGE
        for metric in HEADLINES[name]
        if any(_final(report, name, metric) is not None for report in reports)
    ]
    formats: list[Callable[[float], str]] = [partial(format_value, name) for _, name in columns]
    formats += [format_seconds, format_bytes]
    rows: list[list[float | None]] = [
        [_final(report, *column) for column in columns] + _costs(report) for report in reports
    ]
    cells = []
    for numbers, form in zip(zip(*rows), formats):
        most = max((abs(number) for number in numbers if number is not None), default=0.0) or 1.0
        cells.append(
            [("", 0) if number is None else (form(number), round(100 * max(number, 0) / most)) for number in numbers]
        )
    titles = [*(f"{name} {metric.replace('_', ' ')}" for name, metric in columns), "time", "peak memory"]
    return {"columns": titles, "rows": list(zip(reports, zip(*cells)))}


def _final(report: RunReport, name: Stage, metric: str) -> float | None:
    stage = report.records.stage(name)
    return stage.final(metric) if stage else None


def _costs(report: RunReport) -> list[float | None]:
    """Return the seconds and the peak memory of a run's complete stages."""
    summaries = [stage.records.summary for stage in report.stages if stage.records.summary]
    if not summaries:
        return [None, None]
    return [
        sum(summary.get("seconds", 0.0) for summary in summaries),
        max(summary.get("peak_memory", 0) for summary in summaries),
    ]


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        flat: dict[str, Any] = {}
        for key, item in value.items():
            flat |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
        return flat
    return {prefix: value}


def _show(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return "(empty)"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(_show(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_show(item)}" for key, item in value.items() if item not in (None, [], {}))
    return str(value)
