"""A configuration printed as a recipe: read again, it is the same, to the last digit and from anywhere."""

import json
import random
import sys
from pathlib import Path

import pytest

from rlhf.config.dump import format_recipe, to_yaml
from rlhf.config.loader import parse_yaml
from rlhf.config.schema import Config, LoraConfig, OptimizerConfig, build_config, load_config


def test_to_yaml_loads_as_the_same_config() -> None:
    config = load_config(
        None, ["model.path='a: b'", "ppo.optimizer.learning_rate=3e-7", "data.datasets=[{path: a}, {path: b}]"]
    )
    assert build_config(parse_yaml(to_yaml(config))) == config


def test_to_yaml_keeps_every_digit() -> None:
    rng = random.Random(0)
    numbers = [1.25e-5, 3.75e-5, 1e-5, 5e-324, 1e22, 1e16, 0.1 + 0.2, 123456789.123456789, sys.float_info.max]
    numbers += [rng.uniform(0.1, 1) * 10.0 ** rng.randint(-30, 30) for _ in range(100)]
    for number in numbers:
        printed = to_yaml(OptimizerConfig(learning_rate=number, betas=(number, number / 3)))
        assert OptimizerConfig.model_validate(parse_yaml(printed)) == OptimizerConfig(
            learning_rate=number, betas=(number, number / 3)
        )


@pytest.mark.parametrize("names", [["a, b", "c"], ["x]", "#y"], ["1.0", "null"]])
def test_to_yaml_keeps_names_in_lists(names: list[str]) -> None:
    section = LoraConfig(target_modules=tuple(names))
    assert LoraConfig.model_validate(parse_yaml(to_yaml(section))) == section


def test_format_recipe_lists_the_words_of_a_key() -> None:
    lines = format_recipe(Config(), "").splitlines()
    before = lines[lines.index("  share_base: auto") - 1]
    assert before.endswith("(auto | true | false)")


def test_format_recipe_starts_with_about() -> None:
    assert format_recipe(Config(), "The settings of a run. " * 9).startswith("# The settings of a run. The settings")
    assert "# AdamW and its learning-rate schedule" not in format_recipe(Config(), "x"), "a key's own words are printed"
    assert load_config(None, [], example=False) == build_config(parse_yaml(format_recipe(Config(), "x")))


def test_recipe_with_absolute_paths_loads_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "there"
    for folder in (here / "model", elsewhere / "deep"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    given = load_config(
        None,
        [
            "output=run",
            "model.path=model",
            "model.tokenizer=gpt2",
            "reward.model=org/name",
            "data.datasets=[a.jsonl, {path: world, heldout: ./x y}, {path: b/c.csv, columns: {prompt: q}}]",
            "data.stage_split=1:2:3.5",
            "lora.target_modules=['2:4', '2024-01-01', '1e5', 'on']",
        ],
    )
    whole = Config.model_validate(given.model_dump(mode="json"))
    assert (whole.output, whole.model.path, whole.model.tokenizer) == (here / "run", str(here / "model"), "gpt2")
    assert whole.data.datasets[1].path == "world" and whole.data.datasets[1].heldout == str(here / "x y")
    path = elsewhere / "deep" / "recipe.yaml"
    path.write_text(format_recipe(whole, "Anything."))
    for folder in (here, elsewhere, tmp_path):
        monkeypatch.chdir(folder)
        assert load_config(path) == whole
    assert given.output == Path("run"), "in Python, a path is kept as it was given"


def test_to_yaml_keeps_deepspeed_settings(tmp_path: Path) -> None:
    deepspeed = {"zero_optimization": {"reduce_bucket_size": 12}, "comms_logger": {"prof_ops": ["all_reduce"]}}
    (tmp_path / "recipe.yaml").write_text(json.dumps({"engine": {"deepspeed": deepspeed}}))
    printed = to_yaml(load_config(tmp_path / "recipe.yaml", ["engine.kernels={graph_capture: none}"]))
    engine = parse_yaml(printed)["engine"]
    assert engine["deepspeed"] == deepspeed
    assert engine["kernels"] == {"graph_capture": "none"}
