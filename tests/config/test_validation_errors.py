"""What is wrong with settings, in the words of whoever wrote them, and where they wrote it."""

from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import build_config, load_config
from rlhf.errors import ConfigError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def problem(text: str | None = None, *overrides: str, options: dict[str, Any] | None = None) -> str:
    """The one line about a recipe and a command line."""
    path = None if text is None else Path("r.yaml")
    if path:
        path.write_text(text or "")
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, options=options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("ppo.steps=many", "expected a whole number, got 'many'"),
        ("ppo.steps=1.5", "expected a whole number, got 1.5"),
        ("sft.optimizer.learning_rate=.nan", "expected a finite number, got nan"),
        ("ppo.steps=", "expected a whole number, got nothing"),
        ("ppo.steps=0", "expected a number of at least 1, got 0"),
        ("ppo.gamma=1.5", "expected a number of at most 1, got 1.5"),
        ("ppo.gamma=high", "expected a number, got 'high'"),
        ("lora.dropout=1", "expected a number below 1, got 1"),
        ("lora.alpha=0", "expected a number above 0, got 0"),
        ("model.trust_remote_code=maybe", "expected true or false, got 'maybe'"),
        ("precision=bf8", "expected 'auto', 'bf16', 'fp16' or 'fp32', got 'bf8'"),
        ("engine.zero_stage=4", "expected 'auto', 0, 1, 2 or 3, got 4"),
        ("accelerator=7", "expected text, got 7; put it in quotes"),
        ("output=2024", "expected a path, got 2024; put it in quotes"),
        ("output={a: b}", "expected a path, got {'a': 'b'}"),
        ("data.datasets=[]", "expected at least 1 item, got []"),
        ("sft.optimizer.betas=0.9", "expected a list, got 0.9"),
        ("sft.optimizer.betas=[0.9]", "expected more items, got [0.9]"),
        ("sft.optimizer.betas=[1, 2, 3]", "expected 2 items, got [1, 2, 3]"),
        ("lora.target_modules=3", "expected auto or names of layers, e.g. [q_proj, v_proj], got 3"),
        ("ppo=fast", "expected keys and values, got 'fast'"),
        ("ppo.sampling.temperature=0", "PPO needs different completions, and 0 samples only one; set e.g. 1"),
    ],
)
def test_invalid_value_names_key_and_expectation(override: str, expected: str) -> None:
    assert problem("seed: 1\n", override) == f"--set {override}: {expected}"
    key, _, value = override.partition("=")
    section, *below = key.split(".")
    for part in reversed(below):
        value = f"{{{part}: {value}}}"
    assert problem(f"seed: 1\n{section}: {value}\n") == f"r.yaml:2: {key}: {expected}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nsead: 2\n", "r.yaml:2: unknown key 'sead'; did you mean 'seed'?"),
        ("data:\n\n  dataset: x\n", "r.yaml:3: unknown key 'data.dataset'; did you mean 'datasets'?"),
        ("data:\n  datasets:\n  - a\n  - {path: b,\n     wait: 2}\n", "r.yaml:5: unknown key 'data.datasets.1.wait'"),
        ("data:\n  datasets:\n    path: b\n    wait: 2\n", "r.yaml:4: unknown key 'data.datasets.0.wait'"),
        ("data:\n  datasets:\n  - a\n  - weight: 2\n", "r.yaml:4: data.datasets.1.path: missing; set a value"),
        ("data:\n  datasets: [a,\n    3]\n", "r.yaml:3: data.datasets.1: expected keys and values, got 3"),
        ("data:\n  stage_split: [0, 0, 0]\n", "r.yaml:2: data.stage_split: expected shares >= 0"),
        (
            "ppo:\n  sampling:\n    temperature: 0\n",
            "r.yaml:3: ppo.sampling.temperature: PPO needs different completions",
        ),
        ("ppo:\n  kl_in: loss\n", "r.yaml:2: ppo.kl_in: k1 has no effect in the loss"),
        ("ppo:\n  kl_stop: 1\n", "r.yaml:2: ppo.kl_stop: has no effect with one update per rollout"),
        ("ppo:\n  kl_in: loss\n  kl_estimator: k1\n", "r.yaml:3: ppo.kl_estimator: k1 has no effect in the loss"),
        ("on: 3\n", "r.yaml:1: unknown key 'on'"),
        ("12: 3\n", "r.yaml:1: unknown key '12'"),
        ("? [1]\n: 3\n", "r.yaml:1: not valid YAML (a list or mapping cannot be a key)"),
        ("seed: 1\nppo:\n  steps: 3\n  steps: 4\n", "r.yaml:4: 'steps' is given a second time (first in line 3)"),
        ("sft: &s {epochs: 3}\nreward:\n  <<: *s\n  epochs: 0\n", "r.yaml:4: reward.epochs: expected"),
        ("sft: &s\n  epochs: 0\n  max_steps: 1\n", "r.yaml:2: sft.epochs: expected"),
        ("data:\n  datasets:\n    path: ''\n", "r.yaml:3: data.datasets.0.path: expected a name, got ''"),
        ("data:\n  datasets:\n    path: a\n    columns: [q]\n", "r.yaml:4: data.datasets.0.columns: expected keys and"),
    ],
)
def test_invalid_file_names_the_line(text: str, expected: str) -> None:
    assert problem(text).startswith(expected)


def test_folder_whose_name_is_not_utf8_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--output .*: expected a path in UTF-8, got '.*\\udcff'"):
        load_config(options={"output": "runs/\udcff"})
    assert load_config(options={"output": "runs/ä"}).output == Path("runs/ä")


def test_merged_key_may_be_given_again() -> None:
    Path("r.yaml").write_text("sft: &s {epochs: 3}\nreward: {<<: *s, epochs: 4}\n")
    config = load_config(Path("r.yaml"))
    assert (config.sft.epochs, config.reward.epochs) == (3, 4)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.dataset=x", "--set data.dataset=x: unknown key 'data.dataset'; did you mean 'datasets'?"),
        ("ppo={stepz: 5}", "--set ppo={stepz: 5}: unknown key 'ppo.stepz'; did you mean 'steps'?"),
        ("ppo={steps: 0}", "--set ppo={steps: 0}: ppo.steps: expected a number of at least 1, got 0"),
        ("ppo={steps: 1, steps: 2}", "--set ppo={steps: 1, steps: 2}: 'steps' is given a second time; remove one"),
        ("data.datasets.1.weight=2", "--set data.datasets.1.weight=2: data.datasets.1.path: missing"),
        ("seed.x=1", "--set seed.x=1: 'x' is not a key here"),
        ("accelerator=[a,\n b]", "--set accelerator=[a, b]: expected text, got ['a', 'b']"),
    ],
)
def test_invalid_override_names_the_option(override: str, expected: str) -> None:
    assert problem("seed: 3\ndata: {datasets: a}\n", override).startswith(expected)


def test_invalid_value_names_its_last_origin() -> None:
    assert problem("seed: 1\n", "seed=x").startswith("--set seed=x: expected")
    assert problem("seed: x\n", "ppo.steps=3").startswith("r.yaml:1: seed: expected")
    assert problem("seed: 1\n", "seed=x", options={"seed": -1}).startswith("--seed -1: expected")
    assert problem("precision: x\n", options={"precision": "bf8"}).startswith("--precision bf8: expected 'auto'")
    assert problem(None, options={"precision": "bf8", "seed": None}).startswith("--precision bf8: expected 'auto'")


def test_invalid_value_from_python_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"^the configuration: ppo\.steps: expected a whole number, got 'x'$"):
        build_config({"ppo": {"steps": "x"}})
    with pytest.raises(ConfigError, match=r"^mine: unknown key 'ppo\.stepz'; did you mean 'steps'\?$"):
        build_config({"ppo": {"stepz": 1}}, source="mine")


def test_long_value_is_shortened() -> None:
    assert problem(None, f"seed='{'1' * 5000}'").count("1") < 200
    assert len(problem(None, f"accelerator=[{'a' * 1000}]")) < 250


def test_all_wrong_values_of_a_recipe_are_reported_at_once() -> None:
    Path("r.yaml").write_text("model: {learning_rate: 1}\ndata: {dataset: x}\nppo: {step: 3}\nseed: abc\n")
    with pytest.raises(ConfigError) as caught:
        load_config(Path("r.yaml"), ["ppo.gamma=2"])
    heading, *lines = str(caught.value).splitlines()
    assert heading == "5 values are wrong:"
    starts = ["r.yaml:1", "r.yaml:2", "r.yaml:3", "r.yaml:4", "--set ppo.gamma=2"]
    assert all(any(line.startswith(f"  {start}: ") for line in lines) for start in starts)
    unknown = next(line for line in lines if "model.learning_rate" in line)
    assert "did you mean 'lora.learning_rate' or 'sft.optimizer.learning_rate' or" in unknown


def test_list_without_a_valid_item_is_one_problem() -> None:
    assert "data.datasets.0.weight" in problem("data: {datasets: [{path: x, weight: []}]}")
