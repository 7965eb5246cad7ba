"""Points over shared stages never train on, or hold out, rows that the shared stages were trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from rlhf.config.schema import Config, Stage, build_config, load_config
from rlhf.contrib.sweep.grid import Grid, load_grid
from rlhf.data import toy_world
from rlhf.data.stage_dataset import prompt_key
from rlhf.errors import ConfigError
from rlhf.trainers.preflight import look_at_data
from tests.helpers import llama

EXAMPLES = Path(__file__).parents[3] / "example_scripts/sweeps"

VALUES: dict[str, Any] = {
    "accelerator": "hpu",
    "data.datasets": [{"path": "other.jsonl"}],
    "data.pretraining": [{"path": "text.jsonl"}],
    "data.seed": 1,
    "engine.deepspeed": {"dump_state": True},
    "engine.kernels": {"adamw": "torch-foreach"},
    "model.eos_token": "<end>",
    "distill.judge": "trained",
    "distill.model": "trained",
    "distill.teacher": "trained",
    "distill.teacher_servers": ["http://node07:8653"],
    "ppo.actor": "trained",
    "ppo.critic": "trained",
    "ppo.estimator": "grpo",
    "ppo.judge": "trained",
    "ppo.rollout.where": ["http://node07:8653"],
    "ppo.reward_functions": [{"function": "rewards.py:score"}],
    "ppo.reward_model": "trained",
}
"""Other values of keys that no candidate suits."""
CANDIDATES = (True, False, 0, 1, 2, 3, 64, 0.3, 0.7, [1, 1, 1], [0.8, 0.9], ["norms"], ["q_proj"], "x")
_SERVER = {"ppo.rollout.where": ["http://node07:8653"]}
NEEDS: dict[str, dict[str, Any]] = {
    "distill.keep": {"distill.eval_every": 1, "distill.keep": "best(loss)"},
    "distill.teacher_timeout": {"distill.teacher_servers": ["http://node07:8653"], "distill.teacher_timeout": 5.0},
    "dpo.keep": {"dpo.eval_every": 1, "dpo.keep": "best(loss)"},
    "ppo.ema_on_host": {"ppo.ema": 0.9},
    "ppo.group_std": {"ppo.estimator": "grpo"},
    "ppo.keep": {"ppo.eval_every": 1, "ppo.keep": "best(reward)"},
    "ppo.kl_stop": {"ppo.kl_stop": 5.0, "ppo.ppo_epochs": 2},
    "ppo.ptx_batch_size": {"ppo.ptx_coef": 1.0},
    "ppo.ptx_length": {"ppo.ptx_coef": 1.0},
    "ppo.rollout.correction": _SERVER | {"ppo.rollout.correction": "tis"},
    "ppo.rollout.correction_limit": _SERVER | {"ppo.rollout.correction": "tis", "ppo.rollout.correction_limit": 3.0},
    "ppo.rollout.staleness": _SERVER | {"ppo.rollout.correction": "tis", "ppo.rollout.staleness": 1},
    "ppo.rollout.timeout": _SERVER | {"ppo.rollout.timeout": 5.0},
    "ppo.rollout.weights": _SERVER | {"ppo.rollout.weights": "files"},
    "ppo.stop": {
        "ppo.stop": "over_optimized",
        "ppo.judge": "trained",
        "ppo.eval_every": 1,
        "ppo.keep": "best(judge_reward)",
    },
}
"""Other keys without which a key is refused."""


def write_rows(path: Path, start: int = 0) -> None:
    words = ("red", "green", "blue", "cold", "warm")
    rows = [
        {"prompt": f"{words[n % 5]} {n}", "response": "yes", "chosen": "good " + words[n % 5], "rejected": "bad"}
        for n in range(start, start + 60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(toy_world, "build_world_tokenizer", WORLD_TOKENIZER)
    write_rows(tmp_path / "rows.jsonl")
    write_rows(tmp_path / "other.jsonl", start=30)
    return tmp_path


WORLD_TOKENIZER = cache(toy_world.build_world_tokenizer)
BASE = "base: {data: {datasets: rows.jsonl, heldout_fraction: 0.2}}\nstages: [ppo]\nshare: [sft, reward]\n"


def grid(text: str) -> Grid:
    Path("grid.yaml").write_text(BASE + text)
    return load_grid(Path("grid.yaml"))


def prompts(config: Config, stages: tuple[Stage, ...]) -> dict[tuple[str, str], set[str]]:
    """Return the prompts that each stage trains on and holds out."""
    return {
        (plan.stage, part): {prompt_key(example.row) for example in getattr(plan.data, part)}
        for plan in look_at_data(config, stages)
        for part in ("train", "heldout")
    }


def leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value, annotation) of all keys of the schema."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, field.annotation


def literals(annotation: Any) -> Iterator[Any]:
    for argument in get_args(annotation):
        if isinstance(argument, str | int):
            yield argument
        yield from literals(argument)


def nest(keys: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in keys.items():
        *sections, last = key.split(".")
        section = values
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return values


def get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def is_valid(keys: dict[str, Any]) -> bool:
    try:
        build_config(nest(keys))
    except ConfigError:
        return False
    return True


def change(key: str, value: Any, annotation: Any) -> dict[str, Any]:
    """Return keys and values of a valid configuration in which `key` is not `value`."""
    for other in [VALUES[key]] if key in VALUES else [*literals(annotation), *CANDIDATES]:
        keys = {key: other} | NEEDS.get(key, {})
        if is_valid(keys) and get(build_config(nest(keys)), key) != value:
            return keys
    raise AssertionError(f"{key}: name another value in VALUES, or the keys that it needs in NEEDS")


def find_problem(keys: dict[str, Any]) -> str:
    """Return the error of a grid with a point that sets `keys`; empty if it is accepted."""
    try:
        grid(f"points: {{other: {json.dumps(keys)}}}")
    except ConfigError as error:
        return str(error)
    return ""


def test_every_key_is_refused_over_shared_stages_or_changes_no_row(here: Path) -> None:
    tokenizer = toy_world.build_world_tokenizer()
    for part in (tokenizer, llama(len(tokenizer))):
        part.save_pretrained(here / "trained")
    shared = grid("points: {same: {}}").shared
    assert shared
    rows = prompts(shared.config, ("ppo",))
    refused, accepted = set(), list[dict[str, Any]]()
    for key, value, annotation in leaves(Config()):
        if key == "output" or key.partition(".")[0] in shared.stages:
            continue  # a point cannot set them
        keys = change(key, value, annotation)
        if problem := find_problem(keys):
            assert problem.startswith(f"grid.yaml: {key}")
            assert "decides which rows or which model each stage gets" in problem
            refused.add(key)
            continue
        together = next((others for others in accepted if is_valid(others | keys)), None)
        if together is None:
            accepted.append(keys)
        else:
            together |= keys
    assert refused >= {"seed", "model.path", "model.tokenizer", "model.eos_token", "data.seed", "data.stage_split"}
    for keys in accepted:
        (point,) = grid(f"points: {{other: {json.dumps(keys)}}}").points
        assert prompts(point.alone, ("ppo",)) == rows, keys


@pytest.mark.parametrize(
    "points",
    [
        "grid: {seed: [0, 1]}",
        "grid: {seed: [1, 0]}",
        "grid: {size: {small: {}, large: {seed: 1}}}",
        "points: {zero: {}, one: {seed: 1, ppo.steps: 3}}",
    ],
)
def test_seed_over_shared_stages_is_refused_until_rows_have_a_seed(points: str) -> None:
    with pytest.raises(ConfigError) as error:
        grid(points)
    message = str(error.value)
    assert message.startswith("grid.yaml: seed: decides which rows") and "\n" not in message
    assert "the value of the shared sft and reward, 0, got 1 in " in message
    assert message.endswith(
        "; set data.seed in `base`, which seeds the rows alone, or remove sft and reward from `share`"
    )
    Path("grid.yaml").write_text(BASE.replace("data: {", "data: {seed: 0, ") + points)
    assert {point.config.seed for point in load_grid(Path("grid.yaml")).points} == {0, 1}


def test_points_of_several_seeds_hold_out_prompts_that_no_shared_stage_saw() -> None:
    sweep = load_grid(EXAMPLES / "kl.yaml", ["data.datasets=rows.jsonl", "data.heldout_fraction=0.2"])
    assert sweep.shared and {point.config.seed for point in sweep.points} == {0, 1}
    shared = prompts(sweep.shared.config, ("sft", "reward"))
    seen = set[str]().union(*shared.values())
    first, second = (prompts(point.alone, ("ppo",)) for point in sweep.points[:2])
    assert [point.config.seed for point in sweep.points[:2]] == [0, 1]
    assert first == second and all(len(part) > 3 for part in first.values())
    assert not seen & set[str]().union(*first.values())


def test_data_seed_alone_divides_the_rows() -> None:
    def divide(*overrides: str) -> dict[tuple[str, str], set[str]]:
        values = ["data.datasets=rows.jsonl", "data.heldout_fraction=0.2", *overrides]
        return prompts(load_config(None, values), ("sft", "ppo"))

    assert divide("seed=3") == divide("data.seed=3") == divide("data.seed=3", "seed=5")
    assert divide("seed=3") != divide("seed=5") == divide("seed=3", "data.seed=5")
