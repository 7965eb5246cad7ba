"""What a step keeps is enough to take it again without drawing, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.reporting.recorder import Recorder
from rlhf.reporting.step_records import read_steps
from rlhf.runs.directory import RunDirectory
from rlhf.trainers.loop import select_repeatable, take_step
from tests.engine.engines import masters
from tests.helpers import llama
from tests.in_process import build_ppo, ppo_models, scalar_llama


@pytest.mark.parametrize("shapes", ["static", "dynamic"])
def test_steps_from_kept_rollouts_equal_those_that_drew_them(
    accelerator: Any, recipe: dict[str, Any], tokenizer: Any, tmp_path: Path, shapes: str
) -> None:
    size = len(tokenizer)

    def build(name: str) -> Any:
        models = ppo_models(llama(size), llama(size, seed=5), scalar_llama(size), scalar_llama(size))
        return build_ppo(accelerator, tmp_path / name, recipe, tokenizer, models, engine={"shapes": shapes})

    drawing, repeating = build("drawing"), build("repeating")
    for index in range(2):
        drawn = take_step(drawing, drawing.context, index)
        repeating.given = drawing.describe_step()
        again = select_repeatable(take_step(repeating, repeating.context, index))
        # Kept log-probabilities are rounded, so no gap to them is measured.
        assert again.keys() == {name for name in select_repeatable(drawn) if not name.startswith("draw_")}
        before, after = drawing.describe_step(), repeating.describe_step()
        assert {name: before.digests[name] for name in ("rows", "generator")} == {
            name: after.digests[name] for name in ("rows", "generator")
        }
        assert torch.equal(drawing.experience.input_ids, repeating.experience.input_ids)
        assert torch.equal(drawing.experience.advantages, repeating.experience.advantages)
    for role, engine in drawing.engines.items():
        for name, weight in masters(engine).items():
            assert torch.equal(weight, masters(repeating.engines[role])[name]), name


def test_a_run_keeps_all_steps_of_all_stages(finished_run: Path) -> None:
    for stage in RunDirectory(finished_run).stages:
        if not stage.done:
            continue
        steps = list(read_steps(stage.steps))
        lines = [json.loads(line) for line in stage.metrics.read_text().splitlines()]
        recorded: dict[int, dict[str, float]] = {}
        for line in lines:
            if "tag" not in line:
                recorded.setdefault(line["step"], {}).update(line)
        assert [step.step for step in steps] == [1, 2, 3]
        for step in steps:
            assert step.metrics and step.metrics.items() <= recorded[step.step].items()
            assert step.session["ranks"] == len(step.ranks) == 1
            assert step.session["config"]["output"] == str(finished_run)
            assert len(step.ranks[0].rows) == 4
            assert ("ids" in step.ranks[0].arrays) == (stage.name == "ppo")


def test_a_left_out_recorder_keeps_nothing(tmp_path: Path) -> None:
    recorder = Recorder(RunDirectory(tmp_path).stage("sft"))
    assert not recorder.steps.is_on
    recorder.close()
    assert not (tmp_path / "sft" / "steps.bin").exists()
