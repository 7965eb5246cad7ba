"""Sides whose tensors would differ without any fault are refused, with the keys to set."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from accelerators import ShapePolicy
from rlhf.config.schema import Config
from rlhf.errors import ConfigError, RunError
from rlhf.lockstep.agreement import require_agreement, require_same_start

START: dict[str, Any] = {
    "rows": {"a.jsonl": {"digest": "0123456789abcdef"}},
    "models": {"actor": {"path": "m", "identity": {"weights": "x"}}},
}


def side(precision: str = "fp32", shapes: str = "dynamic", precisions: Any = ("bf16", "fp32"), **engine: Any) -> Any:
    """Return the facts of a side."""
    settings = Config().model_dump(mode="json", exclude={"output", "accelerator"})
    settings["engine"] |= engine
    return {
        "settings": settings | {"precision": precision},
        "precisions": list(precisions),
        "padding": asdict(ShapePolicy(shapes)),  # type: ignore[arg-type]
    }


def test_sides_that_agree_are_compared() -> None:
    require_agreement(side(), side(), recorded=False)


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (side(), side("bf16"), "precision is fp32 on A and bf16 on B; give both the same with --set precision=bf16"),
        (side(precisions=["fp32"]), side("bf16"), "--set precision=fp32"),
        (side(), side(shapes="static"), "engine.shapes is dynamic on A and static on B; .* --set engine.shapes=static"),
        (side(), side(offload="all"), "engine.offload is .* and all on B; .* --set engine.offload=all"),
        (side(), side("bf16", "static"), "--set precision=bf16 --set engine.shapes=static"),
    ],
)
def test_sides_that_differ_are_refused_with_the_keys_to_set(a: Any, b: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        require_agreement(a, b, recorded=False)


def test_padding_may_be_chosen_by_the_backend_if_it_is_the_same() -> None:
    require_agreement(side(shapes="static"), side(shapes="static") | {}, recorded=False)
    a, b = side(), side()
    b["settings"]["engine"]["shapes"] = "dynamic"  # what `auto` is on A
    require_agreement(a, b, recorded=False)


def test_golden_file_of_other_settings_is_recorded_again() -> None:
    with pytest.raises(ConfigError, match="record the golden file again with --set precision=bf16"):
        require_agreement(side(), side("bf16"), recorded=True)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rows": {"a.jsonl": {"digest": "f" * 16}}}, r"rows of a\.jsonl: 0123456789ab and ffffffffffff"),
        ({"models": {"actor": {"path": "m", "identity": {"weights": "y"}}}}, "model actor of ppo"),
    ],
)
def test_golden_file_of_other_rows_or_models_is_refused(changed: dict[str, Any], words: str) -> None:
    require_same_start("ppo", START, START)
    with pytest.raises(RunError, match=words):
        require_same_start("ppo", START, START | changed)
