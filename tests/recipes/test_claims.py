"""Recipes of example_scripts state their batches, devices, memory and LoRA correctly."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.data import DatasetConfig
from rlhf.config.loader import parse_yaml
from rlhf.config.paths import is_path
from rlhf.config.schema import EVERY_STAGE, STAGES, DataConfig, Stage, load_config
from rlhf.data.formats import find_known_dataset
from rlhf.data.stage_dataset import select_by_weight
from rlhf.memory.environment import describe_environment
from rlhf.memory.report import report_stage
from rlhf.utils.units import parse_bytes
from tests.recipes import toys

RECIPES = toys.recipes()
ALONE = [stage for stage in EVERY_STAGE if stage != "distill"]
"""The stages that a recipe describes: distillation needs a teacher, which another recipe trains."""
OF_OPT = [path for path in RECIPES if path.parent.name == "opt"]
BATCH = re.compile(
    r"^  batch_size: (\d+) # (\d+) (?:rows|pairs|completions) x (\d+) accumulated x (\d+) devices?\b", re.M
)
DEVICES = re.compile(r"(\d+) devices? of (\d+) GiB")

ROWS = {
    "Dahoas/rm-static": 76_256,
    "Dahoas/full-hh-rlhf": 112_052,
    "Dahoas/synthetic-instruct-gptj-pairwise": 33_143,
    "yitingxie/rlhf-reward-datasets": 76_256,
}
"""Of the split `train`, as the hub counts them."""


def machines(recipe: Path) -> list[tuple[int, str]]:
    """(devices, memory of each) of those that the first line says a recipe is for."""
    first = recipe.read_text(encoding="utf-8").splitlines()[0]
    return [(int(count), f"{memory}GiB") for count, memory in DEVICES.findall(first)]


@pytest.mark.parametrize("recipe", RECIPES, ids=toys.name_of)
def test_a_recipe_is_valid_and_says_what_it_is(recipe: Path) -> None:
    config = load_config(recipe)
    first = recipe.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    if recipe in OF_OPT:
        assert ("with LoRA" in first) == (config.lora.rank > 0)
    assert toys.EXAMPLES.parent / "runs" == config.output.resolve().parent


def batch_comments() -> Iterator[Any]:
    """Yield (recipe, stage, match of the comment on its batch) of all of OPT's, and of the others that have one."""
    for recipe in RECIPES:
        text = recipe.read_text(encoding="utf-8")
        for name in ALONE:
            section = re.split(r"\n(?=\S)", text.partition(f"\n{name}:")[2])[0]
            match = BATCH.search(section)
            if match or (section and recipe in OF_OPT):
                yield pytest.param(recipe, name, match, id=f"{toys.name_of(recipe)} {name}")


@pytest.mark.parametrize(("recipe", "name", "match"), batch_comments())
def test_a_batch_is_what_its_comment_multiplies(recipe: Path, name: str, match: re.Match[str] | None) -> None:
    assert match, "no comment says how the batch is divided"
    batch, rows, accumulated, devices = map(int, match.groups())
    stage = getattr(load_config(recipe), name)
    assert (stage.batch_size, stage.micro_batch_size) == (batch, rows) and batch == rows * accumulated * devices
    assert devices in dict(machines(recipe))


@pytest.mark.parametrize("recipe", OF_OPT, ids=toys.name_of)
def test_a_recipe_fits_the_machine_of_its_first_line(recipe: Path) -> None:
    config = load_config(recipe)
    assert machines(recipe)
    for devices, memory in machines(recipe):
        environment = describe_environment(config, devices, parse_bytes(memory, "--memory"), None)
        plans = [report_stage(config, stage, environment) for stage in ALONE]
        assert all(plan["fits"] for plan in plans), [plan["verdict"] for plan in plans]


@pytest.mark.parametrize("recipe", RECIPES, ids=toys.name_of)
def test_what_a_recipe_takes_from_a_hub_needs_no_further_words(recipe: Path) -> None:
    """Its data sets are known by name, so that no column is named; and its page says how to do without a hub."""
    config = load_config(recipe)
    sources = [name for source in config.data.datasets for name in (source.path, source.heldout) if name]
    hubs = [name for name in (*sources, *toys.models(config).values()) if not is_path(name)]
    assert not hubs or "Without a hub" in recipe.with_name("README.md").read_text(encoding="utf-8")
    assert all(find_known_dataset(name) for name in sources if not is_path(name))


@pytest.mark.parametrize("recipe", OF_OPT, ids=toys.name_of)
def test_opt_has_the_data_rates_and_lengths_of_deepspeed_chat(recipe: Path) -> None:
    """All scripts for OPT have these in common: step 2, the critic's rate, warm-up, schedule and lengths."""
    config = load_config(recipe)
    assert config.data.datasets[0].path == "Dahoas/rm-static" and config.data.stage_split == (2, 4, 4)
    assert [source.stages for source in config.data.datasets[1:]] in ([], [("sft", "reward")] * 3)
    assert config.data.max_prompt_length == config.data.max_completion_length == 256
    assert config.sft.optimizer.warmup == 0
    assert config.ppo.optimizer.warmup == config.ppo.critic_optimizer.warmup == 100
    assert (config.reward.optimizer.learning_rate, config.reward.optimizer.weight_decay) == (5e-5, 0.1)
    assert (config.ppo.critic_optimizer.learning_rate, config.reward.dropout, config.sft.dropout) == (5e-6, 0, None)
    assert (config.ppo.epochs, config.ppo.ppo_epochs, config.ppo.updates, config.reward.epochs) == (1, 1, 1, 1)
    # Adapters learn at ten times the stage's rate.
    expected = pytest.approx(5e-4 if config.lora.rank else 9.65e-6)
    for optimizer in (config.sft.optimizer, config.ppo.optimizer):
        assert optimizer.learning_rate * (10 if config.lora.rank else 1) == expected
    assert config.lora.rank in (0, 128)
    for stage in ALONE:
        optimizer = getattr(config, stage).optimizer
        assert (optimizer.schedule, optimizer.min_lr_ratio) == ("cosine", 0)


def blends() -> Iterator[Any]:
    """Yield (data settings, stage, its sources) of each stage of a recipe that blends published sets."""
    for recipe in RECIPES:
        data = load_config(recipe).data
        for stage in STAGES:
            sources = [source for source in data.datasets if stage in source.stages]
            if len(sources) > 1 and all(source.path in ROWS for source in sources):
                yield pytest.param(data, stage, sources, id=f"{toys.name_of(recipe)} {stage}")


@pytest.mark.parametrize(("data", "stage", "sources"), blends())
def test_blending_leaves_no_rows_of_the_published_sets_out(
    data: DataConfig, stage: Stage, sources: list[DatasetConfig]
) -> None:
    split = dict(zip(STAGES, data.stage_split, strict=True))
    parts = [split[stage] / sum(split[name] for name in source.stages) for source in sources]
    counts = [int(ROWS[source.path] * part) for source, part in zip(sources, parts, strict=True)]
    selected = select_by_weight(counts, [source.weight for source in sources], seed=0)
    assert sum(map(len, selected)) > 0.98 * sum(counts)


def test_the_pages_list_every_recipe_of_their_folder() -> None:
    for page in toys.EXAMPLES.glob("*/README.md"):
        for recipe in set(page.parent.glob("*.yaml")) & set(RECIPES):
            assert f"({recipe.name})" in page.read_text(encoding="utf-8"), recipe


def test_a_recipe_of_opt_holds_all_stages_and_dpo() -> None:
    for recipe in OF_OPT:
        assert set(parse_yaml(recipe.read_text())) >= {"output", "seed", "model", "data", *ALONE}
