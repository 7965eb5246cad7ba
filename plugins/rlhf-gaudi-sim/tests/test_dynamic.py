"""The checks of the proof can fail: a trainer that is wrong in one way after the other fails each of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import proof
import pytest
from conftest import Run, Runs

TRAINER = Path(__file__).with_name("dynamic.py")


def line_of(fault: str) -> str:
    lines = TRAINER.read_text().splitlines()
    return f"dynamic.py:{next(number for number, line in enumerate(lines, 1) if line.endswith(f'# FAULT: {fault}'))}"


@pytest.fixture(scope="module")
def spoil(python: Run, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., proof.Run]:
    """A run of SFT with these faults: spoil("shapes", ...); not strict."""
    known: dict[tuple[str, ...], proof.Run] = {}

    def run(*faults: str) -> proof.Run:
        if faults not in known:
            output = tmp_path_factory.mktemp("spoilt") / "output"
            report = output.with_name("report.json")
            env = {"RLHF_GAUDI_SIM_REPORT": str(report)}
            done = python(str(TRAINER), str(recipe), str(output), *faults, strict=False, env=env)
            assert done.returncode == 0, done.stderr[-2000:]
            known[faults] = proof.Run(output, json.loads(report.read_text()))
        return known[faults]

    return run


def assert_all(run: proof.Run, other: proof.Run) -> None:
    proof.assert_losses_are_those_of(run, other, "sft")
    proof.assert_nothing_compiled_late(run, "sft")
    proof.assert_no_reads_inside_a_step(run, "sft")
    proof.assert_no_mixed_devices(run)


def test_without_a_fault_all_checks_pass(spoil: Callable[..., proof.Run], finished: Runs) -> None:
    assert_all(spoil(), finished("cpu", zero_stage=2))


def test_shapes_that_follow_the_data_are_compiled_late(spoil: Callable[..., proof.Run]) -> None:
    run = spoil("shapes", "read")
    with pytest.raises(AssertionError):
        proof.assert_nothing_compiled_late(run, "sft")
    late = [event for event in run.late("sft", 2) if event["kind"] == "compilation"]
    # Each is told from the nearest known graph by its number of tokens, and the forwards by their line.
    length = r"(\[4, \d+\]|start=0, end=\d+)"
    difference = re.compile(rf" is aten::\w+ {length}.*, was {length}.* at the same place")
    assert len(late) >= proof.STEPS - 2
    assert [event for event in late if not difference.search(event["difference"])] == []
    assert any("rlhf/models/forward.py:" in event["line"] for event in late)


def test_a_read_inside_a_step_is_found_with_its_line(spoil: Callable[..., proof.Run]) -> None:
    run = spoil("shapes", "read")
    with pytest.raises(AssertionError):
        proof.assert_no_reads_inside_a_step(run, "sft")
    lines = {event["line"] for event in run.report["events"] if event["kind"] == "break" and event["in_step"]}
    assert lines == {f"{TRAINER.parent}/{line_of('read')}"}


def test_tensors_of_both_devices_are_found(spoil: Callable[..., proof.Run]) -> None:
    with pytest.raises(AssertionError):
        proof.assert_no_mixed_devices(spoil("mixed", "loss"))


def test_another_loss_is_found(spoil: Callable[..., proof.Run], finished: Runs) -> None:
    with pytest.raises(AssertionError):
        proof.assert_losses_are_those_of(spoil("mixed", "loss"), finished("cpu", zero_stage=2), "sft")


@pytest.mark.parametrize("fault", ["read", "mixed", "float64"])
def test_strict_mode_stops_at_the_line(python: Run, recipe: Path, tmp_path: Path, fault: str) -> None:
    done = python(str(TRAINER), str(recipe), str(tmp_path / "output"), fault)
    assert done.returncode
    assert line_of(fault) in done.stderr.strip().splitlines()[-1]
