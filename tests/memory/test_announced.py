"""A run says its plan at the start of each stage, records it beside what it took, and decides what is left to it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from accelerators import Accelerator, Memory
from rlhf.config.loader import parse_yaml
from rlhf.config.schema import build_config
from rlhf.memory.advice import apply_settings
from rlhf.memory.report import plan_next_stage, resolve_engine
from rlhf.roles.lineage import MODEL, ResolvedBaseModel

MIB = 2**20


def recorded(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def test_each_stage_says_its_plan_and_keeps_it_beside_its_peak(rlhf: Any, tmp_path: Path) -> None:
    done = rlhf("--output", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    for stage in ("sft", "reward", "ppo"):
        said = rf"^{stage}: plan: peak about [\d.,]+ [MG]iB of [\d.,]+ [MG]iB on each device \(.+\)$"
        assert re.search(said, done.stdout, re.MULTILINE), done.stdout
        kept = json.loads((tmp_path / "run" / stage / "stage.json").read_text())
        assert kept["planned_memory"] == pytest.approx(kept["peak_memory"], rel=0.35)  # of libraries, nearly all of it
        assert kept["planned_phase"] in done.stdout


def test_what_is_left_to_the_plan_is_decided_once_and_recorded(rlhf: Any, tmp_path: Path) -> None:
    auto = ("--set", "engine.zero_stage=auto", "--set", "engine.offload=auto")
    done = rlhf("sft", "--output", tmp_path / "run", *auto, "--set", "sft.max_steps=2")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("auto: ")]
    assert line.startswith("auto: engine.zero_stage=0, engine.offload=none (sft: peak about ")
    engine = recorded(tmp_path / "run")["config"]["engine"]
    assert (engine["zero_stage"], engine["offload"]) == (0, "none")


class Small:
    """The CPU as a device of `total` bytes with a host beside it."""

    def __init__(self, accelerator: Accelerator, total: int) -> None:
        self._accelerator, self._total = accelerator, total

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def memory(self) -> Memory:
        return Memory(allocated=0, peak=0, total=self._total)

    def host_device(self) -> str:
        return "elsewhere"


def opt(**engine: Any) -> Any:
    return build_config({"model": {"path": "opt-1.3b"}, "precision": "fp32", "engine": engine})


@pytest.mark.parametrize(("gib", "stage"), [(64, 0), (18, 1), (11, 3)])
def test_the_least_sharding_that_fits_is_taken(accelerator: Accelerator, gib: int, stage: int) -> None:
    small: Any = Small(accelerator, gib * 1024 * MIB)
    config = opt(zero_stage="auto")
    config = config.model_copy(update={"sft": config.sft.model_copy(update={"micro_batch_size": 1})})
    found, line = resolve_engine(config, ["sft"], small, 8, 8, {})
    assert (found.engine.zero_stage, found.engine.offload) == (stage, "none")
    assert line and line.startswith(f"auto: engine.zero_stage={stage} (sft: peak about ")


def test_a_run_that_is_resumed_goes_on_with_what_was_decided(accelerator: Accelerator) -> None:
    small: Any = Small(accelerator, 64 * 1024 * MIB)
    found, line = resolve_engine(opt(zero_stage="auto"), ["sft"], small, 8, 8, {"zero_stage": 2, "offload": "none"})
    assert found.engine.zero_stage == 2
    assert line == "auto: engine.zero_stage=2 (as the run was started)"


def test_what_is_asked_for_is_left_as_it_is(accelerator: Accelerator) -> None:
    config = opt(zero_stage=1)
    assert resolve_engine(config, ["sft"], accelerator, 8, 8, {}) == (config, None)


def resolved(path: str) -> tuple[ResolvedBaseModel, ...]:
    return (ResolvedBaseModel(MODEL, path),)


def test_what_will_not_fit_is_said_with_the_cheapest_change(accelerator: Accelerator, tmp_path: Path) -> None:
    small: Any = Small(accelerator, 16 * 1024 * MIB)
    found, (line,) = plan_next_stage(opt(), "sft", small, resolved("opt-1.3b"), ranks=2, local=2)
    assert found and found.fullest.device > 16 * 1024 * MIB
    assert re.fullmatch(
        r"sft: plan: will hardly fit: peak about .* GiB on each device \(.*\); try --set .* \(.*\)", line
    )
    settings = {key: parse_yaml(value) for key, value in re.findall(r"--set ([\w.]+)=(\w+)", line)}
    _, (again,) = plan_next_stage(apply_settings(opt(), settings), "sft", small, resolved("opt-1.3b"), ranks=2, local=2)
    assert again.startswith("sft: plan: peak about "), (line, again)


def test_a_model_whose_shape_is_not_known_runs_without_a_plan(accelerator: Accelerator, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    assert plan_next_stage(opt(), "sft", accelerator, resolved(str(tmp_path)), ranks=1, local=1) == (None, [])


def test_settings_left_to_the_plan_are_those_that_it_decided_then() -> None:
    from rlhf.runs.resume import find_differences

    then = opt(zero_stage=2)
    recorded = {"config": then.model_dump(mode="json"), "stages": {}}
    assert find_differences(recorded, opt(zero_stage="auto"), ["sft"], "fp32") == []
    assert find_differences(recorded, opt(zero_stage=1), ["sft"], "fp32") == ["engine.zero_stage (2 there, 1 now)"]
