"""Every recipe of example_scripts runs, with toys in the place of its models and data and nothing else changed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from accelerators.backends.cpu import info as cpu_info
from rlhf.config.loader import parse_yaml
from rlhf.config.schema import STAGES, Config, Stage, load_config
from tests.forks import Forks
from tests.helpers import mark_slow
from tests.recipes import toys

OFTEN = ["opt/350m"]
"""Recipes of the default suite."""


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toys")


def recipes_with(stage: str) -> dict[str, Path]:
    return {
        toys.name_of(recipe): recipe
        for recipe in toys.recipes()
        if stage in parse_yaml(recipe.read_text(encoding="utf-8"))
    }


@pytest.mark.parametrize("recipe", mark_slow(recipes_with("sft"), except_for=OFTEN))
def test_a_recipe_runs_at_toy_size(recipe: Path, forks: Forks, toy_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    described = parse_yaml(recipe.read_text(encoding="utf-8"))
    stages = [stage for stage in STAGES if stage in described]
    config = run(forks, recipe, toy_folder, output, *(() if len(stages) == len(STAGES) else stages))
    for stage in stages:
        assert_trained(config, stage, output)
    for stage in stages[:2]:
        assert_learned_what_it_should(config, stage, output, recipe, toy_folder)


@pytest.mark.parametrize("recipe", mark_slow(recipes_with("dpo"), except_for=OFTEN))
def test_the_dpo_of_a_recipe_runs_at_toy_size(recipe: Path, forks: Forks, toy_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    model = toys.toy_model(toys.shape(recipe, str(load_config(recipe).model.path)), toy_folder)
    config = run(forks, recipe, toy_folder, output, "dpo", "--set", f"dpo.model={model}")
    assert_trained(config, "dpo", output)
    assert_learned_what_it_should(config, "dpo", output, recipe, toy_folder)


def run(forks: Forks, recipe: Path, toy_folder: Path, output: Path, *arguments: str) -> Config:
    config = load_config(recipe)
    # Tensor parallelism needs two that share the work.
    ranks = ["--ranks", "2"] if config.ppo.generation_weights == "tensor_parallel" else []
    options = ["--config", str(recipe), "--output", str(output), *toys.overrides(recipe, toy_folder), *ranks]
    done = forks.run(*arguments, *options, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return config


def assert_trained(config: Config, stage: Stage, output: Path) -> None:
    """All numbers are finite, and plain transformers loads and runs what is left."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    records = [json.loads(line) for line in (output / stage / "metrics.jsonl").read_text().splitlines()]
    numbers = [value for record in records for value in record.values() if isinstance(value, float)]
    assert any("loss" in key for record in records for key in record)
    assert all(map(math.isfinite, numbers))
    kind = AutoModelForSequenceClassification if stage == "reward" else AutoModelForCausalLM
    model = kind.from_pretrained(output / stage / "model").eval()
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[5, 6, 7]])).logits).all()
    if stage == "ppo":
        assert (output / "ppo/model-ema").exists() == (config.ppo.ema is not None)


def assert_learned_what_it_should(config: Config, stage: Stage, output: Path, recipe: Path, toy_folder: Path) -> None:
    """Under LoRA, embeddings are those that training started from; where all weights are trained, they are not."""
    import torch
    from transformers import AutoModel

    start = {"sft": config.model.path, "reward": config.reward.model, "dpo": config.model.path}[stage]
    folder = toys.toy_model(toys.shape(recipe, start), toy_folder) if start else output / "sft/model"
    before, after = (AutoModel.from_pretrained(path).float() for path in (folder, output / stage / "model"))
    dtype = torch.bfloat16 if cpu_info.native_bf16() else torch.float32  # as they are held
    frozen = {name: weight.to(dtype).float() for name, weight in before.state_dict().items()}
    same = {name for name, weight in after.state_dict().items() if frozen[name].equal(weight)}
    weights = after.get_input_embeddings().weight
    embedding = next(name for name, parameter in after.named_parameters() if parameter is weights)
    rank = {"reward": config.roles.reward.lora_rank}.get(stage)
    assert (embedding in same) == ((config.lora.rank if rank is None else rank) > 0)
    assert same < after.state_dict().keys()
