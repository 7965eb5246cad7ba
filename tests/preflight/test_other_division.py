"""Warn about a run that starts from another run's model and divides the rows of that run differently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.data import DataConfig, DatasetConfig
from rlhf.config.schema import Config, Stage, build_config
from rlhf.data import toy_world
from rlhf.data.stage_dataset import prompt_key
from rlhf.runs.directory import RunDirectory
from rlhf.trainers.preflight import describe_divisions, look_at_data

Rows = dict[str, set[str]]
ROWS = 120


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_tokenizer: Any) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(toy_world, "build_world_tokenizer", lambda: world_tokenizer)
    for name, start in (("rows", 0), ("heldout", ROWS), ("other", 2 * ROWS)):
        rows = [
            {
                "prompt": f"cow {n}",
                "question": f"cow {n + 1}",
                "response": "moo",
                "chosen": "hoot",
                "rejected": "x",
            }
            for n in range(start, start + ROWS)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture(scope="module")
def world_tokenizer() -> Any:
    return toy_world.build_world_tokenizer()


def build(source: dict[str, Any], data: dict[str, Any], **values: Any) -> Config:
    return build_config({"data": {"datasets": [{"path": "./rows.jsonl"} | source], **data}} | values)


def read(config: Config, stage: Stage) -> Rows:
    """Return the prompts that a stage trains on and holds out."""
    (plan,) = look_at_data(config.model_copy(update={"ppo": Config().ppo}), [stage])  # its models have no files
    return {part: {prompt_key(example.row) for example in getattr(plan.data, part)} for part in ("train", "heldout")}


def finish(config: Config, folder: str) -> None:
    run = RunDirectory(Path(folder))
    with run.open_for(config, stages=("sft",)):
        run.stage("sft").model.mkdir(parents=True)
        run.stage("sft").finish({"stage": "sft"})


SOURCE: dict[str, Any] = {
    "path": "./other.jsonl",
    "heldout": "./heldout.jsonl",
    "limit": 90,
    "stages": ("sft", "ppo"),
    "columns": {"prompt": "question", "response": "response", "chosen": "chosen", "rejected": "rejected"},
    "weight": 1.0,
    "prefer": "none",
    "clean": ("speaker",),
    "template": "Human: {prompt}",
}
"""Another value of each key of a source; the others name parts of data sets that a file does not have."""
PARTS = {"subset", "split", "revision", "heldout_subset", "heldout_split", "heldout_revision"}
DATA: dict[str, Any] = {
    "stage_split": (1, 1, 18),
    "seed": 1,
    "heldout_fraction": 0.3,
    "max_prompt_length": 64,
    "max_completion_length": 64,
    "too_long": "truncate",
    "pretraining": [{"path": "./other.jsonl", "text": "response"}],
    "chat_template": False,
}
KEYS = [*(f"data.datasets.0.{key}" for key in SOURCE), *(f"data.{key}" for key in DATA)]


def test_every_key_of_data_is_tried() -> None:
    assert set(SOURCE) | PARTS == set(DatasetConfig.model_fields)
    assert set(DATA) | {"datasets"} == set(DataConfig.model_fields)


@pytest.mark.parametrize("key", KEYS)
def test_division_that_shares_rows_with_the_other_runs_training_warns(key: str) -> None:
    """The truth are the prompts themselves: those that SFT was trained on there, and those that PPO reads here."""
    name = key.rpartition(".")[2]
    source, data = ({name: SOURCE[name]}, {}) if "datasets" in key else ({}, {name: DATA[name]})
    plain = {"chat_template": False} if name == "template" else {}
    there, here = build({}, plain), build(source, plain | data, ppo={"actor": "./there/sft/model"}, output="here")
    finish(there, "there")
    trained, now = read(there, "sft")["train"], read(here, "ppo")
    lines = describe_divisions(here, ["ppo"])
    if trained & (now["train"] | now["heldout"]):
        assert len(lines) == 1 and lines[0].startswith("ppo.actor: the run that trained ") and f"{key} (" in lines[0]
    elif name not in ("heldout", "stages", "heldout_fraction"):  # which divide otherwise, but share no row by chance
        assert lines == []


@pytest.mark.parametrize(
    ("seeds", "differences"),
    [
        (({"seed": 0}, {"seed": 1}), ["data.seed (0 there, 1 now)"]),
        (({"seed": 0, "data": {"seed": 3}}, {"seed": 1, "data": {"seed": 3}}), []),
        (({"seed": 0}, {"seed": 1, "data": {"seed": 0}}), []),
    ],
)
def test_seed_that_divides_the_rows_counts(seeds: Any, differences: list[str]) -> None:
    there, here = (
        build({}, values.get("data", {}), seed=values["seed"], ppo={"actor": actor}, output=output)
        for values, actor, output in zip(seeds, (None, "./there/sft/model"), ("there", "here"))
    )
    finish(there, "there")
    assert bool(read(there, "sft")["train"] & read(here, "ppo")["train"]) == bool(differences), "the truth"
    lines = describe_divisions(here, ["ppo"])
    assert [difference for difference in differences if difference in lines[0]] == differences
    assert len(lines) == len(differences)


def test_a_folder_that_is_no_run_and_the_own_run_are_not_compared() -> None:
    Path("plain").mkdir()
    assert describe_divisions(build({}, {}, ppo={"actor": "./plain"}), ["ppo"]) == []
    finish(build({}, {}), "there")
    assert describe_divisions(build({}, {}, seed=1, ppo={"actor": "./there/sft/model"}, output="there"), ["ppo"]) == []
