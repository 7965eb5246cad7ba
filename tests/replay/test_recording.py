"""Recordings of a step are compared tensor by tensor, in the order of computation, bit for bit or within rounding."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.engine.observer import Place
from rlhf.replay.recording import Entry, StepRecording, compare_entries
from rlhf.replay.replay import METRICS, phase_of
from rlhf.reporting.step_records import PHASES

ROOT = Path(__file__).parents[2]


def record(tensors: dict[str, torch.Tensor], rank: int = 0) -> list[Entry]:
    recording = StepRecording(rank, torch.device("cpu"))
    for name, tensor in tensors.items():
        phase: Any = name.split("/")[0]
        recording(Place("ppo", 3, phase, "actor", 0, -1), name, tensor)
    return recording.entries


BASE = {
    "loss/a": torch.arange(300.0),
    "gradients/b": torch.ones(4, 5),
    "update/c": torch.zeros(3, dtype=torch.bfloat16),
}


def test_equal_tensors_do_not_differ() -> None:
    assert compare_entries(record(BASE), record({name: tensor.clone() for name, tensor in BASE.items()})) == []


def test_first_difference_is_the_first_computed_and_its_size_is_known() -> None:
    changed = {name: tensor.clone() for name, tensor in BASE.items()}
    changed["gradients/b"][2, 2] += 0.5
    changed["update/c"] += 1
    first, second = compare_entries(record(BASE), record(changed))
    assert (first.entry.name, first.first, first.second) == ("gradients/b", 1.0, 1.5)
    assert first.change == pytest.approx(0.5 / math.sqrt(20))
    assert second.entry.name == "update/c"


def test_a_change_outside_of_the_sample_is_found_by_its_digest() -> None:
    changed = BASE | {"loss/a": BASE["loss/a"].clone()}
    changed["loss/a"][2] += 1e-3
    assert 2 not in [int(number) for number in record(BASE)[0].sample]
    (difference,) = compare_entries(record(BASE), record(changed))
    assert math.isnan(difference.first) and "outside of its sample" in str(difference)


def test_rounding_counts_as_equal_only_with_a_tolerance() -> None:
    changed = BASE | {"gradients/b": BASE["gradients/b"] * (1 + 1e-5)}
    assert len(compare_entries(record(BASE), record(changed))) == 1
    assert compare_entries(record(BASE), record(changed), tolerance=1e-3) == []


def test_a_missing_tensor_and_another_shape_differ() -> None:
    fewer = {name: tensor for name, tensor in BASE.items() if name != "loss/a"}
    assert [item.change for item in compare_entries(record(BASE), record(fewer))] == [math.inf]
    assert [item.change for item in compare_entries(record(fewer), record(BASE))] == [math.inf]
    assert len(compare_entries(record(BASE), record(BASE | {"loss/a": torch.zeros(2)}))) == 1


def test_whole_tensors_are_kept_by_rank_0_only() -> None:
    assert [entry.name for entry in record(BASE, rank=1)] == ["loss/a"]


def test_each_metric_belongs_to_a_phase() -> None:
    names = ("grad_norm", "policy_loss", "reward", "response_length", "unequal_weights")
    assert [phase_of(name) for name in names] == ["gradients", "loss", "scores", "rollout", "update"]
    assert all(phase_of(name) in PHASES for name in names)


def test_metrics_that_have_a_phase_are_metrics() -> None:
    rows = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    assert set(itertools.chain(*METRICS.values())) <= rows
