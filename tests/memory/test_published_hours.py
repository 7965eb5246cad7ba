"""Hours, dollars and sizes that DeepSpeed-Chat published in April 2023, against `rlhf plan --on`.

Sources: applications/DeepSpeed-Chat/README.md of deepspeedai/DeepSpeedExamples (Table 1, and tables of single steps),
blogs/deepspeed-chat/README.md of deepspeedai/DeepSpeed. Its settings: prompts and completions of 256 tokens, LoRA of
rank 128 on the actor, a critic and a reward model of 350M, six data sets split 2:4:4: 132,146 rows of SFT, 264,292
pairs, 264,292 prompts. The single A6000 took Dahoas/rm-static alone: 15,251 rows, 30,502 pairs, 30,502 prompts.

The two shares of a device (accelerators/known_devices.yaml) are fitted to all of its cells together. docs/memory.md has
this table, and says which cells contradict one another.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rlhf.config.schema import Config, Stage, build_config
from rlhf.memory.advice import stages_fit
from rlhf.memory.duration import estimate_duration, find_speed
from rlhf.memory.environment import describe_environment, describe_machine, parse_machine

SIX_SETS = {"sft": 132_146, "reward": 264_292, "ppo": 264_292}
RM_STATIC = {"sft": 15_251, "reward": 30_502, "ppo": 30_502}
GOOD = (0.7, 1.4)
DOCS = Path(__file__).parents[2] / "docs" / "memory.md"


class Cell(NamedTuple):
    """A published duration, and the ratio planned / published; `alone`: with Dahoas/rm-static alone."""

    machine: str
    size: str
    stage: Stage
    hours: float
    ratio: float
    alone: bool = False


CELLS = (
    Cell("8xa100-80", "1.3b", "ppo", 1.4, 0.93),
    Cell("8xa100-80", "6.7b", "ppo", 4.1, 1.38),
    Cell("8xa100-80", "13b", "ppo", 9, 1.19),
    Cell("8xa100-80", "30b", "ppo", 18, 1.36),
    Cell("8xa100-80", "66b", "ppo", 50.4, 1.05),
    Cell("64xa100-80", "1.3b", "ppo", 31 / 60, 0.32),
    Cell("64xa100-80", "6.7b", "ppo", 51 / 60, 0.83),
    Cell("64xa100-80", "13b", "ppo", 1.25, 1.07),
    Cell("64xa100-80", "30b", "ppo", 4, 0.76),
    Cell("64xa100-80", "66b", "ppo", 7.5, 0.88),
    Cell("64xa100-80", "175b", "ppo", 20, 0.88),
    Cell("1xa100-80", "1.3b", "ppo", 11.7, 0.89),
    Cell("1xa100-80", "6.7b", "ppo", 40.8, 1.11),
    Cell("1xa100-80", "13b", "ppo", 117.6, 0.73),
    Cell("8xa100-40", "1.3b", "ppo", 2, 0.86),
    Cell("8xa100-40", "6.7b", "ppo", 5.7, 1.33),
    Cell("8xa100-40", "13b", "ppo", 10.8, 1.32),
    Cell("8xa100-40", "30b", "ppo", 44.4, 0.74),
    Cell("1xa100-40", "1.3b", "ppo", 15.4, 0.89),
    Cell("1xa100-40", "6.7b", "ppo", 81.6, 0.74),
    Cell("1xa6000", "1.3b", "ppo", 26.4, 1.19),
    Cell("1xa6000", "6.7b", "ppo", 134.4, 1.01),
    Cell("1xv100-32", "1.3b", "ppo", 43.2, 0.97),
    Cell("64xa100-80", "66b", "sft", 82 / 60, 0.99),
    Cell("64xa100-80", "66b", "reward", 5 / 60, 0.32),
    Cell("8xa100-40", "13b", "sft", 2.5, 1.0),
    Cell("8xa100-40", "13b", "reward", 0.25, 1.0),
    Cell("1xa6000", "1.3b", "sft", 2900 / 3600, 0.83, alone=True),
    Cell("1xa6000", "1.3b", "reward", 670 / 3600, 3.32, alone=True),
    Cell("1xa6000", "1.3b", "ppo", 1.2, 3.03, alone=True),
)


def name_of(cell: Cell) -> str:
    return f"{cell.machine}-{cell.size}-{cell.stage}{'-alone' if cell.alone else ''}"


@cache
def step_settings(size: str, **ppo: Any) -> Config:
    """The settings of DeepSpeed-Chat's scripts: the actor learns by adapters, the 350M models whole."""
    small: dict[str, Any] = {"lora_rank": 0, "gradient_checkpointing": False}
    values: dict[str, Any] = {
        "model": {"path": f"opt-{size}", "gradient_checkpointing": True},
        "lora": {"rank": 128, "also_train": ["norms", "biases", "embeddings"]},
        "roles": {"reward": small, "critic": small},
        "data": {"max_prompt_length": 256, "max_completion_length": 256},
        "sft": {"epochs": 1, "batch_size": 64},
        "reward": {"model": "opt-350m", "epochs": 1, "batch_size": 64},
        "ppo": {"epochs": 1, "batch_size": 1024, "actor": f"opt-{size}", "reward_model": "opt-350m", **ppo},
    }
    return build_config(values)


@cache
def planned_hours(cell: Cell) -> float:
    count, device = parse_machine(cell.machine)
    config = step_settings(cell.size)
    environment = describe_machine(config, count, device, None)
    speed = find_speed(environment, device, None)
    assert speed
    rows = (RM_STATIC if cell.alone else SIX_SETS)[cell.stage]
    duration = estimate_duration(config, cell.stage, environment, speed, rows)
    assert duration
    return duration.steps * duration.seconds / 3600


def is_good(cell: Cell) -> bool:
    return GOOD[0] <= planned_hours(cell) / cell.hours <= GOOD[1]


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_planned_hours_have_the_stated_ratio_to_published_ones(cell: Cell) -> None:
    assert planned_hours(cell) / cell.hours == pytest.approx(cell.ratio, abs=0.02)


def test_four_of_five_cells_are_planned_well() -> None:
    good = [cell for cell in CELLS if is_good(cell)]
    assert len(good) / len(CELLS) >= 0.8, [name_of(cell) for cell in CELLS if cell not in good]


def test_docs_state_the_ratio_of_each_cell() -> None:
    """Rows of the table: machine, model and stage, published, planned, ratio."""
    rows = [[field.strip() for field in line.split("|")[1:-1]] for line in DOCS.read_text().splitlines()]
    stated = {(row[0], row[1]): row[2:] for row in rows if len(row) == 5 and "x" in row[0]}
    for cell in CELLS:
        planned = planned_hours(cell)
        stage = {"ppo": "PPO", "sft": "SFT", "reward": "reward model"}[cell.stage] + (", one set" if cell.alone else "")
        expected = [f"{cell.hours:.3g} h", f"{planned:.3g} h", f"{planned / cell.hours:.2f}"]
        assert stated.pop((cell.machine, f"OPT-{cell.size.upper()}, {stage}")) == expected
    assert not stated


def fits(size: str, stage: Stage, machine: str | int) -> bool:
    """Return whether a stage fits with one row in each pass, at the lowest ZeRO stage that fits, in fp16.

    Args:
        machine: a known machine, or GiB of a single device.
    """
    config = step_settings(size, micro_batch_size=1, generation_batch_size=1, generation_weights="auto")
    engine = config.engine.model_copy(update={"zero_stage": "auto"})
    sft = config.sft.model_copy(update={"micro_batch_size": 1})
    config = config.model_copy(update={"precision": "fp16", "engine": engine, "sft": sft})
    if isinstance(machine, int):
        return stages_fit(config, [stage], describe_environment(config, 1, machine * 2**30, None))
    return stages_fit(config, [stage], describe_machine(config, *parse_machine(machine), None))


SIZES = ("1.3b", "6.7b", "13b", "30b", "66b", "175b")
MACHINES = ("1xv100-32", "1xa6000", "1xa100-40", "1xa100-80", "8xa100-40", "8xa100-80", "64xa100-80")
FIT_HERE_ALONE = {("1xv100-32", "6.7b"), ("1xa6000", "13b")}
"""The reference is the policy without its adapters, where DeepSpeed-Chat has a second model."""


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("size", SIZES)
def test_models_fit_the_machines_that_they_were_published_for(size: str, machine: str) -> None:
    published = any((cell.machine, cell.size) == (machine, size) for cell in CELLS)
    assert fits(size, "ppo", machine) == (published or (machine, size) in FIT_HERE_ALONE)


@pytest.mark.parametrize(
    ("gib", "sft", "ppo"),
    [(24, "6.7b", "2.7b"), (32, "6.7b", "6.7b"), (40, "13b", "6.7b"), (48, "13b", "13b"), (80, "13b", "13b")],
)
def test_largest_models_are_near_the_published_rule(gib: int, sft: str, ppo: str) -> None:
    """The rule: as many billions of parameters as a third (SFT) and a sixth (PPO) of the device's gigabytes."""
    sizes = ("1.3b", "2.7b", *SIZES[1:5])
    for stage, largest, share in (("sft", sft, 3), ("ppo", ppo, 6)):
        assert [size for size in sizes if fits(size, stage, gib)][-1] == largest
        assert 0.45 < float(largest[:-1]) / (gib / share) < 1.7
