"""The conditions for a comparison tensor by tensor: two sides with the same settings, padding, rows and models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.config.schema import Stage
from rlhf.errors import ConfigError, RunError
from rlhf.replay.bisect import list_other_models, list_other_rows
from rlhf.runs.resume import list_differing_leaves

Facts = Mapping[str, Any]


def require_agreement(a: Facts, b: Facts, *, recorded: bool) -> None:
    """Refuse two sides whose tensors differ even if no operator is wrong.

    A recipe that leaves a choice to the backend (`auto`) may give another precision, padding or plan on each.

    Args:
        a, b: what `Side.describe` returns.
        recorded: A is a golden file, whose recipe cannot be changed.

    Raises:
        ConfigError: they differ; the message names the keys to set.
    """
    leaves = [
        (key, first, second)
        for key, first, second in list_differing_leaves(a["settings"], b["settings"])
        if key != "engine.shapes"
    ]
    wanted = {key: second for key, _, second in leaves}
    if a["padding"] != b["padding"]:
        leaves.append(("engine.shapes", _describe_padding(a["padding"]), _describe_padding(b["padding"])))
        wanted["engine.shapes"] = b["padding"]["kind"]
    if not leaves:
        return
    if "precision" in wanted and wanted["precision"] not in a["precisions"]:
        wanted["precision"] = next((name for name in b["precisions"] if name in a["precisions"]), "fp32")
    given = "; ".join(f"{key} is {first} on A and {second} on B" for key, first, second in leaves)
    remedy = "record the golden file again with" if recorded else "give both the same with"
    options = " ".join(f"--set {key}={'null' if value is None else value}" for key, value in wanted.items())
    raise ConfigError(f"rlhf accelerators diff: tensors would differ without any fault: {given}; {remedy} {options}")


def require_same_start(stage: Stage, a: Facts, b: Facts) -> None:
    """Refuse a golden file of other rows or models than those that are under their paths now.

    Args:
        stage: the stage that was opened.
        a, b: what `Side.open` returns.

    Raises:
        RunError: rows or models differ.
    """
    if changed := [*list_other_rows(a["rows"], b["rows"]), *list_other_models(stage, a["models"], b["models"])]:
        raise RunError(
            f"rlhf accelerators diff: {'; '.join(changed)}: changed since the golden file was recorded; restore "
            "them, or record it again"
        )


def _describe_padding(policy: Mapping[str, Any]) -> str:
    multiple = policy["pad_to_multiple"]
    return str(policy["kind"]) + (f" to multiples of {multiple}" if multiple > 1 else "")
