"""A grid file: the names, keys and configurations of its points, and mistakes in one line."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import load_config
from rlhf.contrib.sweep.grid import Grid, load_grid
from rlhf.errors import ConfigError

ROOT = Path(__file__).parents[3]
SIXTEEN = """
stages: [ppo]
share: [sft, reward]
grid:
  engine.zero_stage: [2, 3]
  rollout: {plain: {ppo.generation_batch_size: 4}, parts: {ppo: {generation_batch_size: 2}}}
  engine.offload: [none, optimizer]
  lora: {full: {}, lora16: {lora.rank: 16, lora.alpha: 32}}
names:
  engine.zero_stage: zero
  engine.offload: {none: "", optimizer: offload}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def grid(text: str, *overrides: str, **options: Any) -> Grid:
    Path("grid.yaml").write_text(text)
    return load_grid(Path("grid.yaml"), overrides, **options)


def test_points_are_all_combinations_and_named_for_them() -> None:
    sweep = grid(SIXTEEN)
    labels = (["zero2", "zero3"], ["plain", "parts"], ["", "offload"], ["full", "lora16"])
    assert [point.name for point in sweep.points] == [
        "-".join(filter(None, parts)) for parts in itertools.product(*labels)
    ]
    assert len(sweep.points) == 16
    last = sweep.points[-1]
    assert last.name == "zero3-parts-offload-lora16"
    assert last.keys == {
        "engine.zero_stage": 3,
        "ppo.generation_batch_size": 2,
        "engine.offload": "optimizer",
        "lora.rank": 16,
        "lora.alpha": 32,
    }
    config = last.config
    assert (config.engine.zero_stage, config.engine.offload, config.ppo.generation_batch_size) == (3, "optimizer", 2)
    assert (config.lora.rank, config.lora.alpha) == (16, 32)
    assert config.output == Path("runs/grid/zero3-parts-offload-lora16")
    first = sweep.points[0].config
    assert (first.engine.zero_stage, first.engine.offload, first.lora.rank) == (2, "none", 0)
    longer = {point.name: point.config for point in grid(SIXTEEN.replace("[2, 3]", "[1, 2, 3]")).points}
    assert {point.name: point.config for point in sweep.points}.items() <= longer.items(), "names are stable"


@pytest.mark.parametrize(
    ("axis", "names"),
    [
        ("lora.rank: [0, 8]", ["rank0", "rank8"]),
        ("model.gradient_checkpointing: [true, false]", ["gradient_checkpointing", "no-gradient_checkpointing"]),
        ("ppo.optimizer.learning_rate: [1e-5, 0.001]", ["learning_rate1e-5", "learning_rate0.001"]),
        ("lora.target_modules: [[q_proj, v_proj], auto]", ["target_modulesq_proj_v_proj", "target_modulesauto"]),
        ("model.path: [./models/opt-125m, facebook/opt-350m]", ["pathopt-125m", "pathopt-350m"]),
        ("size: {'': {}, large: {sft.batch_size: 64}}", ["base", "large"]),
    ],
)
def test_point_names_come_from_values(axis: str, names: list[str]) -> None:
    assert [point.name for point in grid(f"grid:\n  {axis}").points] == names


def test_point_is_recipe_then_base_then_options_then_its_keys() -> None:
    Path("recipes").mkdir()
    Path("recipes/r.yaml").write_text(
        "model: {path: ./tiny}\ndata: {datasets: [{path: rows.jsonl, weight: 2}]}\n"
        "sft: {batch_size: 8, max_steps: 7}\nreward: {batch_size: 8}\nppo: {batch_size: 8, kl_coef: 0.5}\n"
    )
    sweep = grid(
        "recipe: recipes/r.yaml\nbase: {sft.batch_size: 4, reward: {batch_size: 4}, data: {datasets: other.jsonl}}\n"
        "grid: {ppo.batch_size: [16]}",
        "reward.batch_size=2",
        "ppo.kl_coef=0.25",
        options={"seed": 3, "output": Path("out")},
        ranks=2,
    )
    (config,) = (point.config for point in sweep.points)
    plain = load_config(
        Path("recipes/r.yaml"),
        [
            *("sft.batch_size=4", "reward.batch_size=2", "ppo.kl_coef=0.25", "ppo.batch_size=16", "seed=3"),
            *("data.datasets=other.jsonl", "output=out/batch_size16"),
        ],
    )
    assert config.model_dump() == plain.model_dump()
    assert config.model.path == "./recipes/tiny"  # in the recipe's folder
    assert sweep.ranks == 2


def test_points_without_a_recipe_start_as_plain_rlhf_does() -> None:
    embedded = grid("grid: {ppo.steps: [40]}").points[0].config
    assert embedded.model_dump(exclude={"output"}) == load_config().model_dump(exclude={"output"})
    own = grid("grid: {model.path: [./tiny]}").points[0].config
    assert own.model_dump(exclude={"output"}) == load_config(None, ["model.path=./tiny"]).model_dump(exclude={"output"})


def test_points_can_be_added_and_excluded() -> None:
    sweep = grid(
        "grid: {engine.zero_stage: [1, 2, 3], lora: {full: {}, lora8: {lora.rank: 8}}}\n"
        "names: {engine.zero_stage: zero}\n"
        "points: {quick: {sft.max_steps: 1}, bare: }\n"
        "exclude: [{where: {engine.zero_stage: [1, 3], lora: full}, reason: 'takes too long'}]"
    )
    combinations = ["zero1-lora8", "zero2-full", "zero2-lora8", "zero3-lora8"]
    assert [point.name for point in sweep.points] == [*combinations, "quick", "bare"]
    assert sweep.excluded == {"zero1-full": "takes too long", "zero3-full": "takes too long"}
    quick, bare = sweep.points[-2:]
    assert (quick.config.sft.max_steps, quick.labels) == (1, {})
    assert bare.config.model_dump(exclude={"output"}) == load_config().model_dump(exclude={"output"})
    invalid = "grid: {engine.zero_stage: [2, 7]}\nexclude: [{where: {engine.zero_stage: 7}, reason: there is none}]"
    assert [point.name for point in grid(invalid).points] == ["zero_stage2"]


def test_points_start_from_shared_stages_or_named_models() -> None:
    sweep = grid(SIXTEEN)
    assert sweep.shared and sweep.shared.stages == ("sft", "reward")
    assert sweep.shared.config.engine.zero_stage == 0 and sweep.shared.config.lora.rank == 0
    shared = Path("runs/grid/shared")
    assert sweep.shared.config.output == shared
    for point in sweep.points:
        assert point.config.ppo.actor == str(shared / "sft/model")
        assert point.config.ppo.reward_model == str(shared / "reward/model")
    from_sft = grid("stages: [reward, dpo]\nshare: [sft]\ngrid: {dpo.beta: [1]}").points[0].config
    assert from_sft.reward.model == from_sft.dpo.model == str(shared / "sft/model")
    named = "stages: [ppo]\nbase: {ppo: {actor: ./a, reward_model: ./b}}\ngrid: {ppo.kl_coef: [0.1]}"
    (point,) = grid(named).points
    assert (point.config.ppo.actor, point.config.ppo.reward_model) == ("./a", "./b")


AXIS = "grid:\n  engine.zero_stage: [2, 3]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grd: {}", "grid.yaml:1: unknown key 'grd'; did you mean 'grid'?"),
        ("stages: [ppo]", "grid.yaml: grid: no axis; add a key with values, e.g. engine.zero_stage: [2, 3]"),
        ("grid: {lora.rank: []}", "grid.yaml:1: grid: lora.rank needs a list of values, or labels that set keys"),
        ("grid: {lora.rank: 8}", "lora.rank needs a list of values, or labels that set keys, got 8"),
        ("grid: {a: {b: 3}}", "grid.yaml:1: grid: a.b needs keys and values, got 3"),
        (
            "grid:\n  engine.zero_stge: [2]",
            "grid.yaml:2: unknown key 'engine.zero_stge'; did you mean 'zero_stage'? (po",
        ),
        (
            "grid:\n  engine.zero_stage: [2,\n    5]",
            "grid.yaml:3: engine.zero_stage: expected 'auto', 0, 1, 2 or 3, got 5 (point zero_stage5)",
        ),
        (
            AXIS + "  a:\n    b: {}\n    c: {lora.rank: x}",
            "grid.yaml:5: grid.a.c: lora.rank: expected a whole number, got 'x' (point zero_stage2-c)",
        ),
        (
            "base: {ppo.kl_coef: 0}\ngrid: {ppo.kl_target: [3]}",
            "grid.yaml:2: ppo.kl_target: has no effect without ppo.kl_",
        ),
        (AXIS + "base: {sft: {bach_size: 1}}", "grid.yaml:3: unknown key 'sft.bach_size'; did you mean 'batch_size'?"),
        ("points:\n  a: {sft.max_steps: false}", "grid.yaml:2: sft.max_steps: expected a number, got false (point a)"),
        (
            AXIS + "names: {lora: x}",
            "grid.yaml:3: names: 'lora' is not an axis with a list of values; use one of engine.zero",
        ),
        (AXIS + "names: {engine.zero_stag: x}", "not an axis with a list of values; did you mean 'engine.zero_stage'?"),
        (AXIS + "names: {engine.zero_stage: 3}", "engine.zero_stage needs a word, or a label for each value, got 3"),
        ("grid: {seed: [1, 1]}", "grid.yaml: two points are called seed1; set different labels"),
        (
            "grid: {seed: [1, 2], other: {a: {seed: 3}}}",
            "grid.yaml: seed: set by both axes seed and other; remove it from one of them",
        ),
        (AXIS + "names: {engine.zero_stage: {2: z, 3: z}}", "grid.yaml: two points are called z; set"),
        (AXIS + "points: {zero_stage2: {}}", "grid.yaml: points.zero_stage2: the grid has a point with this name"),
        ("points: {shared: {}}", "grid.yaml: 'shared' is not a valid name of a point (a folder); use at most"),
        ("points: {../up: {}}", "grid.yaml: '../up' is not a valid name of a point"),
        (
            AXIS + "exclude: [{where: {zero: 2}, reason: x}]",
            "exclude: unknown axis 'zero'; use one of engine.zero_stage",
        ),
        (AXIS + "exclude: [{where: {engine.zero_stage: 4}, reason: x}]", "the axis engine.zero_stage has no value '4'"),
        (AXIS + "exclude: [{where: {engine.zero_stage: 2}}]", "exclude.0.reason: missing; set a value"),
        (
            AXIS + "exclude: [{where: {engine.zero_stage: [2, 3]}, reason: x}]",
            "exclude: all points are excluded; remove",
        ),
        (AXIS + "share: [sft]", "grid.yaml: share: sft is also in `stages`; remove it from one of them"),
        (
            "stages: [ppo]\nshare: [sft, reward]\ngrid: {sft.epochs: [1, 2]}",
            "grid.yaml: sft.epochs: differs between points, but the shared stage sft reads it; remove sft",
        ),
        (
            "stages: [ppo]\ngrid: {seed: [1]}",
            "stages: ppo starts from the model of sft, which no point trains; add it to `stages` or to `share`, or set "
            "ppo.actor (point seed1)",
        ),
        ("grid: {output: [a, b]}", "grid.yaml: output: each point has its own folder; remove this key"),
        (
            AXIS + "recipe: absent.yaml",
            "absent.yaml: cannot be read (No such file or directory); check `recipe` in gri",
        ),
        (AXIS + "memory: much", "grid.yaml: memory: must be a size, got much; write e.g. 80GiB or 24GB"),
        (
            AXIS + "stages: [sft, pp]",
            "grid.yaml:3: stages.1: expected 'sft', 'reward', 'dpo', 'ppo' or 'distill', got 'pp'",
        ),
        (AXIS + "ranks: 0", "grid.yaml:3: ranks: expected a number of at least 1, got 0"),
    ],
)
def test_mistake_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        grid(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_command_line_cannot_set_swept_keys() -> None:
    with pytest.raises(ConfigError, match=r"lora.rank: set by the axis lora of grid.yaml; change it there, or remove"):
        grid(SIXTEEN, "lora.rank=4")
    with pytest.raises(ConfigError, match=r"lora.alpha: set by the axis lora"):
        grid(SIXTEEN, "lora={alpha: 3}")
    assert grid(SIXTEEN, "lora.dropout=0.1").points[0].config.lora.dropout == 0.1
    with pytest.raises(ConfigError, match=r"absent.yaml: cannot be read \(No such file or directory\); check the"):
        load_grid(Path("absent.yaml"))
