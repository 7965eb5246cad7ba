"""Pages of recipes state the memory that `rlhf plan` predicts, and it fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf.config.schema import Stage, load_config
from rlhf.memory.environment import describe_environment
from rlhf.memory.report import report_stage
from rlhf.utils.units import parse_bytes

EXAMPLES = Path(__file__).parents[2] / "example_scripts"
HEAD = "| recipe | devices | SFT | reward model | PPO | DPO |"
STAGES: tuple[Stage, ...] = ("sft", "reward", "ppo", "dpo")
ROW = re.compile(r"\| (\S+) \| (\d+) x (\w+) \|(.*)\|")


def table_rows() -> list[tuple[Path, int, str, list[str]]]:
    """Return (recipe, devices, memory of each, GiB of each stage) of the rows of all tables."""
    recipes = []
    for page in sorted(EXAMPLES.glob("*/README.md")):
        for line in page.read_text(encoding="utf-8").partition(f"{HEAD}\n")[2].splitlines()[1:]:
            if not (row := ROW.fullmatch(line)):
                break
            stated = [cell.strip() for cell in row[4].split("|")]
            recipes.append((page.with_name(f"{row[1]}.yaml"), int(row[2]), row[3], stated))
    return recipes


def name_of(value: object) -> str | None:
    return f"{value.parent.name}/{value.stem}" if isinstance(value, Path) else None


@pytest.mark.parametrize(("recipe", "devices", "memory", "stated"), table_rows(), ids=name_of)
def test_page_of_recipe_states_the_planned_memory(recipe: Path, devices: int, memory: str, stated: list[str]) -> None:
    config = load_config(recipe)
    environment = describe_environment(config, devices, parse_bytes(memory, "--memory"), None)
    for stage, gib in zip(STAGES, stated, strict=True):
        if gib:
            plan = report_stage(config, stage, environment)
            assert plan["fits"], plan["verdict"]
            assert f"{max(phase['device'] for phase in plan['phases']) / 2**30:.1f}" == gib, (stage, plan["verdict"])


@pytest.mark.parametrize("folder", ["bloom", "llama2-7b", "other_language"])
def test_every_recipe_of_a_folder_is_in_its_table(folder: str) -> None:
    listed = {recipe for recipe, *_ in table_rows()}
    assert set((EXAMPLES / folder).glob("*.yaml")) - listed == set()
