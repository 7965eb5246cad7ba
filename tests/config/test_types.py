"""What is written in a recipe: names that start from its folder, and data sets and shares in each of their forms."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rlhf.config.schema import Config, DataConfig, DatasetConfig, ModelConfig, build_config, load_config
from rlhf.errors import ConfigError
from tests.helpers import NAMES


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory; recipes are in its folder `recipes`."""
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(text: str, *overrides: str) -> Config:
    Path("recipes/r.yaml").write_text(text)
    return load_config(Path("recipes/r.yaml"), overrides)


def recipe(key: str, value: object) -> str:
    """A recipe that gives one key."""
    values: dict[str, Any] = {"data": {"datasets": [{"path": "world"}]}}
    node: Any = values
    *above, last = key.split(".")
    for part in above:
        node = node[int(part)] if part.isdigit() else node.setdefault(part, {})
    node[last] = value
    return json.dumps(values)


def at(config: BaseModel, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    return value


@pytest.mark.parametrize("key", NAMES)
def test_path_in_recipe_is_relative_to_the_recipe(here: Path, key: str) -> None:
    assert Path(at(loaded(recipe(key, "./a")), key)) == Path("recipes/a")
    assert at(loaded(recipe(key, "../a/b.jsonl")), key) == "a/b.jsonl"
    assert at(loaded(recipe(key, "/a")), key) == "/a"
    assert at(loaded(recipe(key, "org/name")), key) == "org/name"
    (here / "recipes" / "org" / "name").mkdir(parents=True)
    assert Path(at(loaded(recipe(key, "org/name")), key)) == Path("recipes/org/name")


@pytest.mark.parametrize("key", NAMES)
@pytest.mark.parametrize("name", ["gpt2", "org/name"])
def test_hub_id_in_recipe_ignores_working_directory(
    here: Path, monkeypatch: pytest.MonkeyPatch, key: str, name: str
) -> None:
    """Nor does anyone guess which of the two is meant."""
    (here / name).mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        loaded(recipe(key, name))
    assert str(caught.value) == (
        f"recipes/r.yaml:1: {key}: {name} is in the working directory, but paths in a recipe are relative to the "
        "recipe; "
        f"write ../{name} for that folder, or start rlhf elsewhere to use the hub's"
    )
    assert at(loaded(recipe(key, f"../{name}")), key) == f"./{name}"
    assert at(loaded("", "data.datasets=[world]", f"{key}={name}"), key) == name, "on the command line it is meant"
    assert at(build_config(json.loads(recipe(key, name))), key) == name, "and so it is in Python"
    (here / "recipes" / name).mkdir(parents=True)
    assert Path(at(loaded(recipe(key, name)), key)) == Path("recipes") / name
    monkeypatch.chdir(here / "recipes")
    assert at(load_config(Path("r.yaml")), key) == f"./{name}"


def test_output_is_always_a_path(here: Path) -> None:
    assert loaded("output: run\n").output == Path("recipes/run")
    assert loaded("output: ../run\n").output == Path("run")
    assert loaded("output: 2024-01-01\n").output == Path("recipes/2024-01-01")
    assert loaded("seed: 1\n").output == Path("runs/default")


def test_path_outside_recipe_is_relative_to_working_directory(here: Path) -> None:
    config = loaded("seed: 1\n", "model.path=./a", "output=run", "data.datasets=[b/c.jsonl]")
    assert (config.model.path, config.output, config.data.datasets[0].path) == ("./a", Path("run"), "b/c.jsonl")
    assert load_config(Path("recipes/r.yaml"), options={"output": Path("other")}).output == Path("other")
    assert ModelConfig(path="./a").path == "./a"


def test_recipe_from_pipe_is_relative_to_working_directory() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"model: {path: ./a}\noutput: run\n")
    os.close(writing)
    config = load_config(Path(f"/dev/fd/{reading}"))
    os.close(reading)
    assert (config.model.path, config.output) == ("./a", Path("run"))


@pytest.mark.parametrize("key", ["output", *NAMES])
def test_json_paths_are_absolute(here: Path, key: str) -> None:
    config = build_config(json.loads(recipe(key, "./a")))
    values: Any = config.model_dump(mode="json")
    for part in key.split("."):
        values = values[int(part)] if part.isdigit() else values[part]
    assert values == str(here / "a")
    assert str(at(config, key)) in ("a", "./a"), "in Python, it is what was given"


def test_json_keeps_hub_names() -> None:
    values = Config(model=ModelConfig(path="org/name")).model_dump(mode="json")
    assert (values["model"]["path"], values["model"]["tokenizer"]) == ("org/name", None)
    assert values["data"]["datasets"][0]["path"] == "world"


A, B = DatasetConfig(path="a.jsonl"), DatasetConfig(path="b.jsonl", limit=2)


@pytest.mark.parametrize(
    ("value", "sources"),
    [
        ("a.jsonl", (A,)),
        ("[a.jsonl]", (A,)),
        ("{path: b.jsonl, limit: 2}", (B,)),
        ("[a.jsonl, {path: b.jsonl, limit: 2}]", (A, B)),
        ("[{path: a.jsonl}, {path: b.jsonl, limit: 2}]", (A, B)),
    ],
)
def test_datasets_accept_path_mapping_or_list(here: Path, value: str, sources: object) -> None:
    assert load_config(None, [f"data.datasets={value}"]).data.datasets == sources
    (here / "r.yaml").write_text(f"data: {{datasets: {value}}}\n")
    assert load_config(Path("r.yaml")).data.datasets == sources
    changed = load_config(Path("r.yaml"), ["data.datasets.0.path=z", "data.datasets.0.split=s"]).data.datasets
    assert (changed[0].path, changed[0].split, changed[0].limit) == ("z", "s", sources[0].limit)  # type: ignore[index]


def test_datasets_path_alone_uses_defaults() -> None:
    assert load_config(None, ["data.datasets=a.jsonl"]).sft == Config().sft
    assert load_config(None, ["data.datasets=world"]).sft != Config().sft


def test_datasets_in_python_accept_paths() -> None:
    assert DataConfig(datasets="a.jsonl").datasets == (A,)  # type: ignore[arg-type]
    assert DataConfig(datasets=["a.jsonl", B]).datasets == (A, B)  # type: ignore[arg-type]
    assert DataConfig(datasets=B).datasets == (B,)  # type: ignore[arg-type]


@pytest.mark.parametrize("shares", ["2:4:4", "'2:4:4'", "[2, 4, 4]", "2.0:4:4", "20:40:40", "1:2:2.0"])
def test_stage_split_accepts_text_and_list(shares: str) -> None:
    for config in (loaded(f"data:\n  stage_split: {shares}\n"), load_config(None, [f"data.stage_split={shares}"])):
        sft, reward, ppo = config.data.stage_split
        assert (reward / sft, ppo / sft) == (2, 2)


@pytest.mark.parametrize("shares", ["2:4", "2:4:x", "7444", "[2, 4]", "[1, 2, 3, 4]", "", "x", "true", "{a: 1}"])
def test_stage_split_invalid_shows_an_example(shares: str) -> None:
    for load in (
        lambda: loaded(f"data:\n  stage_split: {shares}\n"),
        lambda: load_config(None, [f"data.stage_split={shares}"]),
    ):
        with pytest.raises(ConfigError, match=r"data\.stage_split.*: expected shares of .*, for example 2:4:4, got"):
            load()


@pytest.mark.parametrize("shares", ["0:0:0", "[-1, 2, 3]", "1:1:nan", "1:1:inf", "[1, 1, .inf]"])
def test_stage_split_not_positive_raises(shares: str) -> None:
    with pytest.raises(ConfigError, match=r"r\.yaml:2: data\.stage_split: expected shares >= 0 with one above 0"):
        loaded(f"data:\n  stage_split: {shares}\n")


def test_override_of_aliased_mapping_changes_one_place() -> None:
    text = "sft: {optimizer: &o {learning_rate: 0.5}}\nppo: {optimizer: *o}\n"
    config = loaded(text, "ppo.optimizer.learning_rate=0.25")
    assert (config.sft.optimizer.learning_rate, config.ppo.optimizer.learning_rate) == (0.5, 0.25)


def test_section_without_keys_is_the_default() -> None:
    assert loaded("ppo:\n#  steps: 3\nseed: 3\n") == Config(seed=3)
