"""Health of devices, operators on the host, and equal results: told by a backend, shown and recorded by a run."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from accelerators import Health
from rlhf.trainers.device_health import DeviceWatch
from rlhf.trainers.loop import _count_host_operators
from tests.in_process import stage_context

COOL = Health({"clock": "1,980 of 1,980 MHz"}, (), {"uncorrected memory errors": 1})
HOT = Health({"clock": "990 of 1,980 MHz"}, ("the driver lowers its clock because it is hot",), {})


@pytest.fixture
def context(accelerator, tmp_path, monkeypatch):
    """Return the context of a stage, whose device reports one health after the other."""

    def make(*healths: Health):
        answers = iter(healths)
        monkeypatch.setattr(type(accelerator), "health", lambda self: next(answers))
        return stage_context(accelerator, tmp_path, "sft", {})

    return make


def test_problems_at_the_start_and_new_errors_at_the_end_are_warnings(context, capsys):
    errors = Health(COOL.readings, (), {"uncorrected memory errors": 3})
    stage = context(Health(COOL.readings, HOT.problems, COOL.errors), errors)
    entry = DeviceWatch(stage).conclude()
    problems = ["the driver lowers its clock because it is hot", "2 more uncorrected memory errors"]
    readings = {"before": COOL.readings, "after": COOL.readings}
    assert entry == {"devices": [{**readings, "errors": {"uncorrected memory errors": 3}, "problems": problems}]}
    assert stage.health.lines == {"device": "device at the end: rank 0: 2 more uncorrected memory errors"}
    lines = capsys.readouterr()
    assert [line for line in (lines.out + lines.err).splitlines() if line.startswith("sft: ")] == [
        "sft: device of rank 0: clock 1,980 of 1,980 MHz",
        "sft: warning: device at the start: rank 0: the driver lowers its clock because it is hot",
        "sft: warning: device at the end: rank 0: 2 more uncorrected memory errors",
    ]


def test_device_without_health_is_not_recorded(context, capsys):
    stage = context(Health(), Health())
    assert DeviceWatch(stage).conclude() == {}
    assert capsys.readouterr() == ("", "") and stage.health.lines == {}


def test_operators_on_the_host_are_counted_and_named_once(accelerator, monkeypatch, caplog):
    context = SimpleNamespace(accelerator=accelerator)
    assert _count_host_operators(context) == {}
    monkeypatch.setattr(type(accelerator), "host_operators", lambda self: {"aten::unique": 2, "aten::digamma": 1})
    for _ in range(2):
        assert _count_host_operators(context) == {"host_operators": 3.0}
    named = [record.message for record in caplog.records if "the host computes it" in record.message]
    assert [line.split()[5] for line in named] == ["aten::unique:", "aten::digamma:"]
    del accelerator.fallbacks[:]


def test_run_records_what_may_differ(rlhf, tmp_path):
    done = rlhf("sft", "--output", tmp_path / "run", "--set", "engine.deterministic=true", "--set", "sft.max_steps=1")
    record = json.loads((tmp_path / "run" / "run.json").read_text())["accelerator"]
    assert record["deterministic"] == {"on": True, "may_differ": []}
    assert record["health"] == {"readings": {}, "problems": [], "errors": {}}
    assert "may still differ" not in done.stdout + done.stderr


def test_deterministic_run_leaves_torch_as_it_was(accelerator):
    assert accelerator.deterministic(True) == ()
    assert torch.are_deterministic_algorithms_enabled()
    assert accelerator.deterministic(False) == ()
    assert not torch.are_deterministic_algorithms_enabled()
