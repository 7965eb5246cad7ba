"""The origin of a run: settings that differ from the defaults, data, versions, device and commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.config.schema import EVERY_STAGE, Config, Stage
from rlhf.diagnosis.records import RunRecords


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
    settings, default = (flatten_settings(each.model_dump(mode="json")) for each in (config, Config()))
    ignored = ("output", *(f"{name}." for name in EVERY_STAGE if name not in stages))
    return [
        (key, show_setting(value), show_setting(default.get(key)))
        for key, value in settings.items()
        if value != default.get(key) and not key.startswith(ignored)
    ]


def flatten_settings(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted key."""
    if isinstance(value, Mapping) and value:
        flat: dict[str, Any] = {}
        for key, item in value.items():
            flat |= flatten_settings(item, f"{prefix}.{key}" if prefix else str(key))
        return flat
    return {prefix: value}


def show_setting(value: Any) -> str:
    """Return a setting's value for a page."""
    if value is None or value in ("", [], {}):
        return "(empty)"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(show_setting(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {show_setting(item)}" for key, item in value.items() if item not in (None, [], {}))
    return str(value)
