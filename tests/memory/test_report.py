"""Runs print and record the plan of each stage, and take what it resolves in place of `auto`."""

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
from rlhf.memory.report import StartPlan, plan_next_stage, resolve_engine
from rlhf.roles.lineage import MODEL, ResolvedBaseModel
from rlhf.utils.units import parse_bytes

MIB = 2**20


def test_stage_prints_its_plan_and_records_it_with_its_peak(finished_run: Path) -> None:
    for stage in ("sft", "reward", "ppo"):
        console = (finished_run / stage / "console.log").read_text()
        line = rf"^{stage}: plan: peak about [\d.,]+ [MG]iB of [\d.,]+ [MG]iB on each device \(.+\)$"
        assert re.search(line, console, re.MULTILINE), console
        summary = json.loads((finished_run / stage / "stage.json").read_text())
        assert summary["ranks"] == 1
        assert summary["planned_memory"] == pytest.approx(summary["peak_memory"], rel=0.35)  # nearly all of libraries
        assert summary["planned_phase"] in console


def test_auto_settings_are_resolved_once_and_recorded(rlhf: Any, tmp_path: Path) -> None:
    auto = ("--set", "engine.zero_stage=auto", "--set", "engine.offload=auto")
    done = rlhf("sft", "--output", tmp_path / "run", *auto, "--set", "sft.max_steps=2")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("auto: ")]
    assert line.startswith("auto: engine.zero_stage=0, engine.offload=none (sft: peak about ")
    engine = json.loads((tmp_path / "run" / "run.json").read_text())["config"]["engine"]
    assert (engine["zero_stage"], engine["offload"]) == (0, "none")


def test_dry_run_plans_for_its_ranks(rlhf: Any, tmp_path: Path) -> None:
    """Each of four ranks on a host has a quarter of its memory."""

    def memory(ranks: int) -> float:
        done = rlhf("sft", "--output", tmp_path / "run", "--ranks", ranks, "--dry-run", "--set", "sft.batch_size=16")
        (text,) = re.findall(r"peak about [\d.]+ MiB of ([\d.]+ [MG]iB) on each device", done.stdout)
        return parse_bytes(text.replace(" ", ""), "memory")

    assert memory(4) == pytest.approx(memory(1) / 4, rel=0.02)


class Small:
    """The CPU as a device of `total` bytes next to a host."""

    def __init__(self, accelerator: Accelerator, total: int, available: int | None = None) -> None:
        self._accelerator, self._total, self._available = accelerator, total, available

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def memory(self) -> Memory:
        return Memory(allocated=0, peak=0, total=self._total, available=self._available)

    def host_device(self) -> str:
        return "elsewhere"


def opt_config(**engine: Any) -> Any:
    return build_config({"model": {"path": "opt-1.3b"}, "precision": "fp32", "engine": engine})


@pytest.mark.parametrize(("gib", "stage"), [(64, 0), (18, 1), (11, 3)])
def test_resolve_engine_takes_the_least_sharding_that_fits(accelerator: Accelerator, gib: int, stage: int) -> None:
    small: Any = Small(accelerator, gib * 1024 * MIB)
    config = opt_config(zero_stage="auto")
    config = config.model_copy(update={"sft": config.sft.model_copy(update={"micro_batch_size": 1})})
    config_of_run, line = resolve_engine(config, ["sft"], small, 8, {})
    assert (config_of_run.engine.zero_stage, config_of_run.engine.offload) == (stage, "none")
    assert line and line.startswith(f"auto: engine.zero_stage={stage} (sft: peak about ")


def test_resolve_engine_takes_recorded_values_for_auto_alone(accelerator: Accelerator) -> None:
    recorded = {"zero_stage": 2, "offload": "none"}
    small: Any = Small(accelerator, 64 * 1024 * MIB)
    resumed, line = resolve_engine(opt_config(zero_stage="auto"), ["sft"], small, 8, recorded)
    assert resumed.engine.zero_stage == 2
    assert line == "auto: engine.zero_stage=2 (as the run was started)"
    config = opt_config(zero_stage=1)
    assert resolve_engine(config, ["sft"], accelerator, 8, {}) == (config, None)


def base_models(path: str) -> tuple[ResolvedBaseModel, ...]:
    return (ResolvedBaseModel(MODEL, path),)


def test_stage_that_will_not_fit_names_a_change_that_suffices(accelerator: Accelerator) -> None:
    small: Any = Small(accelerator, 16 * 1024 * MIB)
    plan, (line,), *_ = plan_next_stage(opt_config(), "sft", small, base_models("opt-1.3b"), ranks=2)
    assert plan and plan.fullest.device > 16 * 1024 * MIB
    assert re.fullmatch(
        r"sft: plan: will hardly fit: peak about .* GiB on each device \(.*\); try --set .* \(.*\)", line
    )
    settings = {key: parse_yaml(value) for key, value in re.findall(r"--set ([\w.]+)=(\w+)", line)}
    _, (again,), *_ = plan_next_stage(
        apply_settings(opt_config(), settings), "sft", small, base_models("opt-1.3b"), ranks=2
    )
    assert again.startswith("sft: plan: peak about "), (line, again)


def start_sft(accelerator: Accelerator, available: int | None) -> Any:
    small: Any = Small(accelerator, 64 * 1024 * MIB, available)
    return plan_next_stage(opt_config(), "sft", small, base_models("opt-1.3b"), ranks=2)


def test_memory_of_other_programs_leads_to_a_warning_and_then_a_refusal(accelerator: Accelerator) -> None:
    plan, (line,), refusal, _ = start_sft(accelerator, None)
    assert line.startswith("sft: plan: peak about ") and not refusal
    peak, kept = plan.fullest.device, plan.at_rest
    # By hand: fp32 weights, and two moments each.
    assert kept == pytest.approx(12 * 1_315_758_080, rel=0.001)
    assert start_sft(accelerator, peak) == StartPlan(plan, [line], reserved=512 * MIB)
    _, (line,), refusal, _ = start_sft(accelerator, peak - 1)
    assert re.fullmatch(
        r"sft: plan: will hardly fit: peak about .*, the rest is in use by other programs; try --set .* \(.*\)", line
    )
    assert not refusal
    assert not start_sft(accelerator, kept).refusal
    refusal = start_sft(accelerator, kept - 1).refusal
    assert re.fullmatch(
        r"sft: the system would end this run: weights and optimizer states alone take 14.7 GiB on each rank, and "
        r"14.7 GiB are free; try --set .* \(.*\)",
        refusal,
    )


def test_model_of_unknown_shape_has_no_plan(accelerator: Accelerator, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    assert plan_next_stage(opt_config(), "sft", accelerator, base_models(str(tmp_path)), ranks=1) == StartPlan()
