"""The configuration: one schema for files, `--set` and Python, and errors that name the key."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from rlhf.config.schema import (
    EMBEDDED_RECIPE,
    Config,
    DatasetConfig,
    ModelConfig,
    PPOConfig,
    SFTConfig,
    build_config,
    load_config,
)
from rlhf.errors import ConfigError
from tests.helpers import NAMES


def sections(model: type[BaseModel]) -> set[type[BaseModel]]:
    """A section and all those below it, the items of lists included."""
    found = {model}
    for field in model.model_fields.values():
        for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(candidate, type(BaseModel)):  # on Python 3.10 list[str] is a type
                found |= sections(candidate)
    return found


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_load_config_without_file_uses_embedded_recipe() -> None:
    assert load_config() == load_config(EMBEDDED_RECIPE)


def test_load_config_named_model_or_data_uses_defaults() -> None:
    assert load_config(None, ["model.path=x"]) == Config(model=ModelConfig(path="x"))
    assert load_config(None, ["data.datasets.0.path=x"]).ppo == PPOConfig()


@pytest.mark.parametrize("override", ["model.path=x", "model={path: x}", "data={datasets: [{path: x}]}"])
def test_load_config_model_or_data_in_any_form_uses_defaults(override: str) -> None:
    assert load_config(None, [override]).sft == SFTConfig()


@pytest.mark.parametrize(
    "override",
    [
        "model.gradient_checkpointing=true",
        "model.path=null",
        "data.datasets.0.weight=2",
        "data.datasets=[{path: world}]",
    ],
)
def test_load_config_other_keys_keep_embedded_recipe(override: str) -> None:
    assert load_config(None, [override]).sft == load_config().sft != SFTConfig()


@pytest.mark.parametrize(
    "key",
    ["output", *NAMES],
)
def test_load_config_expands_tilde_in_paths(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    value: object = load_config(None, ["data.datasets.0.path=x", f"{key}=~/a"])
    for part in key.split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, part)  # type: ignore[index]
    assert str(value) == "/home/me/a"


def test_load_config_recipe_in_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written(tmp_path, "seed: 3\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config(Path("~/recipe.yaml")).seed == 3


def test_load_config_empty_name_is_none() -> None:
    assert load_config(None, ["model.path=''", "reward.model=''"], example=False) == Config()


def test_load_config_empty_file_is_the_default(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "# nothing\n")) == Config()


def test_load_config_overrides_replace_values_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "seed: 1\nppo:\n  steps: 7\n  kl_coef: 0.5\n")
    config = load_config(path, ["ppo.steps=9"])
    assert (config.seed, config.ppo.steps, config.ppo.kl_coef) == (1, 9, 0.5)


def test_load_config_override_is_yaml() -> None:
    config = load_config(None, ["data.stage_split=[1, 2, 3]", "model.path=null", "ppo.whiten_advantages=false"])
    assert config.data.stage_split == (1, 2, 3)
    assert config.model.path is None
    assert config.ppo.whiten_advantages is False


def test_load_config_override_indexes_lists() -> None:
    config = load_config(None, ["data.datasets.0.path=a.jsonl", "data.datasets.0.weight=2", "data.datasets.1.path=b"])
    assert config.data.datasets == (DatasetConfig(path="a.jsonl", weight=2), DatasetConfig(path="b"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sead=1", r"unknown key 'sead'; did you mean 'seed'\?"),
        ("ppo.kl_coeff=1", r"unknown key 'ppo.kl_coeff'; did you mean 'kl_coef'\?"),
        (
            "ppo.estimator=graph",
            "ppo.estimator=graph: unknown estimator 'graph'; use one of gae, rloo, grpo, reinforce",
        ),
        ("ppo.optimizer.lr_rate=1", "unknown key 'ppo.optimizer.lr_rate'"),
        ("data.datasets=[{path: a, wait: 2}]", r"did you mean 'weight'\?"),
        ("data.datasets=[{path: a, weight: 0}]", "weight: expected a number above 0, or all, got 0"),
        ("data.datasets=[{path: a, weight: most}]", "weight: expected a number above 0, or all, got 'most'"),
        ("engine.zzz=1", "unknown key 'engine.zzz'; use one of zero_stage"),
        ("data.datasets=[]", "at least 1 item"),
        ("ppo.steps", "expected key=value"),
        ("ppo.steps=[", "the value is not valid YAML"),
        ("ppo.steps=!!int x", "the value is not valid YAML"),
        ("seed.x=1", "seed: expected a whole number, got {'x': 1}"),
        ("data.datasets.7.path=x", "'7' is not a key here"),
    ],
)
def test_load_config_invalid_override_names_the_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(None, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dpo.loss=kto"], "dpo.loss=kto: "),
        (["dpo.beta=0"], "dpo.beta=0: "),
        (["dpo.label_smoothing=0.5"], "dpo.label_smoothing=0.5: expected a number below 0.5, got 0.5"),
        (["dpo.loss=ipo", "dpo.label_smoothing=0.1"], "dpo.label_smoothing=0.1: not used by the ipo loss; set 0, or "),
        (["dpo.loss=robust"], "dpo.loss=robust: robust equals sigmoid if dpo.label_smoothing is 0; set"),
        (["ppo.kl_in=loss"], "ppo.kl_in=loss: k1 has no effect in the loss"),
        (["ppo.kl_in=loss", "ppo.kl_estimator=k1"], "ppo.kl_estimator=k1: k1 has no effect in the loss"),
        (
            ["dpo.keep=best(margin)"],
            r"models cannot be selected by 'margin' in this stage; use best\(loss\) or best\(accuracy\), or last",
        ),
        (
            ["data.datasets=[{path: a, stages: [dpo]}]"],
            r"data.datasets.0.stages.0: expected 'sft', 'reward' or 'ppo', got 'dpo'",
        ),
    ],
)
def test_load_config_invalid_dpo_settings_raise(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(None, overrides)
    assert "\n" not in str(caught.value)


def test_dpo_optimizer_keeps_its_low_learning_rate() -> None:
    config = build_config({"dpo": {"optimizer": {"schedule": "linear"}}})
    assert config.dpo.optimizer.learning_rate == 1e-6 < config.sft.optimizer.learning_rate


@pytest.mark.parametrize("every", ["0", "7", "epoch"])
def test_eval_every_accepts_steps_or_epoch(every: str) -> None:
    config = load_config(None, [f"sft.eval_every={every}"])
    assert config.sft.eval_every == (every if every == "epoch" else int(every))
    assert build_config(config.model_dump(mode="json")).sft == config.sft


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sft.eval_every=-1", "sft.eval_every=-1: expected a number of steps, at least 0, or epoch, got -1"),
        ("reward.eval_every=epochs", "expected a number of steps, at least 0, or epoch, got 'epochs'"),
        ("reward.eval_every=0.5", "expected a number of steps, at least 0, or epoch, got 0.5"),
        ("reward.eval_every=true", "expected a number of steps, at least 0, or epoch, got true"),
        ("engine.kernels={adam: x}", "unknown operation 'adam'; use one of adamw, adamw_cpu_offload, "),
        ("ppo.eval_every=epoch", "ppo.eval_every=epoch: expected a whole number, got 'epoch'"),
        ("sft.keep=first", r"sft.keep=first: expected last or best\(METRIC\), got 'first'"),
        (
            "sft.keep=best(loss)",
            r"sft.keep=best\(loss\): models cannot be selected by 'loss' .*; use best\(perplexity\), or last",
        ),
        (
            "reward.keep=best(margin)",
            r"models cannot be selected by 'margin' in this stage; use best\(accuracy\) or best\(loss\), or last",
        ),
        (
            "ppo.keep=best(kl)",
            r"models cannot be selected by 'kl' in this stage; use best\(reward\) or best\(approved_share\), or last",
        ),
        ("ppo.keep=best(reward)", r"best\(reward\) needs evaluations during training; set eval_every"),
        ("ppo.samples_every=-1", "expected a number of at least 0"),
        ("ppo.samples=0", "expected a number of at least 1"),
    ],
)
def test_eval_every_and_keep_invalid_raise(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [override])


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("kl_target", ["kl_target=6", "kl_coef=0"]),
        ("ema_on_host", ["ema_on_host=true"]),
        ("ptx_length", ["ptx_length=64"]),
        ("ptx_batch_size", ["ptx_batch_size=8"]),
    ],
)
def test_ppo_key_without_effect_raises(key: str, settings: list[str]) -> None:
    with pytest.raises(
        ConfigError, match=rf"ppo\.{key}=[\w.]+: has no effect without ppo\.\w+; set that too, or remove"
    ):
        load_config(None, [f"ppo.{setting}" for setting in settings])


def test_kl_horizon_too_short_raises() -> None:
    """The controller takes at most batch_size / (5 * kl_horizon) of it."""
    given = ["ppo.kl_target=6", "ppo.batch_size=40"]
    assert load_config(None, [*given, "ppo.kl_horizon=9"]).ppo.kl_horizon == 9
    with pytest.raises(ConfigError, match=r"ppo\.kl_horizon=8: one step with 40 completions .* set more than 8"):
        load_config(None, [*given, "ppo.kl_horizon=8"])


@pytest.mark.parametrize(("every", "shown"), [(None, [4, 8, 12]), (5, [5, 10]), (0, [])])
def test_shows_samples_ten_times_per_run_by_default(every: int | None, shown: list[int]) -> None:
    steps = 48 if every is None else 12
    settings = PPOConfig(samples_every=every)
    assert [step for step in range(1, 13) if settings.shows_samples(step, steps)] == shown


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"steps": 7}, 7),
        ({"steps": 7, "epochs": 1, "batch_size": 4}, 3),
        ({"epochs": 2, "batch_size": 4}, 5),
        ({"epochs": 2, "batch_size": 10}, 2),
        ({"epochs": 1, "batch_size": 16, "estimator": "rloo"}, 3),  # four completions of each of four prompts
    ],
)
def test_total_steps_counts_steps_or_passes(settings: dict[str, Any], steps: int) -> None:
    assert PPOConfig(**settings).total_steps(10) == steps


@pytest.mark.parametrize(
    ("estimator", "override", "message"),
    [
        ("rloo", "lam=0.9", "ppo.lam=0.9: needs ppo.estimator=gae, got rloo; change one of them"),
        ("grpo", "gamma=0.9", r"ppo.gamma=0.9: needs ppo.estimator=gae or reinforce\+\+, got grpo"),
        ("gae", "group_std=false", "ppo.group_std=false: needs ppo.estimator=grpo, got gae"),
        ("rloo", "value_clip=0.3", "ppo.value_clip=0.3: needs ppo.estimator=gae, got rloo"),
        ("rloo", "critic_dropout=0.1", "ppo.critic_dropout=0.1: needs ppo.estimator=gae, got rloo"),
        ("rloo", "critic=folder", "ppo.critic=folder: rloo has no critic; remove this key"),
        ("rloo", "completions_per_prompt=1", "rloo compares the completions of a prompt and needs at least 2, got 1"),
        ("grpo", "completions_per_prompt=1", "grpo compares the completions of a prompt and needs at least 2, got 1"),
    ],
)
def test_estimator_unused_key_raises(estimator: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(None, [f"ppo.{override}", f"ppo.estimator={estimator}"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("estimator", ["gae", "rloo", "grpo", "reinforce++"])
def test_estimator_alone_is_valid(estimator: str) -> None:
    assert load_config(None, [f"ppo.estimator={estimator}"]).ppo.prompts(1) > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nppo: [1, 2\nmodel:\n", r"recipe\.yaml:\d: not valid YAML"),
        ("- 1\n- 2\n", "expected keys and values, got a list"),
        ("3\n", "expected keys and values, got a single value"),
        ("seed: 1\nsead: 2\n", r"recipe\.yaml:2: unknown key 'sead'"),
        ("[" * 5000, "not valid YAML"),
        ("seed: " + "1" * 5000, "not valid YAML"),
    ],
)
def test_load_config_invalid_file_names_it(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(written(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_load_config_missing_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read"):
        load_config(tmp_path / "absent.yaml")


def test_load_config_binary_file_names_it(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a UTF-8 text file"):
        load_config(path)


def test_micro_batch_indivisible_raises() -> None:
    assert SFTConfig(batch_size=8).micro_batch(2, section="sft") == 4
    assert SFTConfig(batch_size=8, micro_batch_size=2).micro_batch(2, section="sft") == 2
    with pytest.raises(ConfigError, match=r"sft\.batch_size: 8 rows cannot be divided among 3 ranks"):
        SFTConfig(batch_size=8).micro_batch(3, section="sft")
    with pytest.raises(ConfigError, match=r"not a multiple of sft\.micro_batch_size 3 x 2 ranks"):
        SFTConfig(batch_size=8, micro_batch_size=3).micro_batch(2, section="sft")


def test_minibatch_indivisible_raises() -> None:
    assert PPOConfig(batch_size=8, minibatch_size=4).minibatch(2) == (4, 2)
    with pytest.raises(ConfigError, match=r"ppo\.minibatch_size 3"):
        PPOConfig(batch_size=8, minibatch_size=3).minibatch(1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ppo.ema=1", "expected a number below 1, got 1"),
        ("ppo.ema=0", "expected a number above 0, got 0"),
    ],
)
def test_ema_out_of_range_raises(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as found:
        load_config(None, [override])
    assert str(found.value) == f"--set {override}: {message}"


def test_config_is_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().seed = 3  # type: ignore[misc]


def test_build_config_recorded_config_is_equal() -> None:
    config = load_config(None, ["data.datasets=[{path: a, columns: {prompt: q}}]", "ppo.kl_target=2.5", "output=/a"])
    assert build_config(config.model_dump(mode="json")).sft == config.sft


@pytest.mark.parametrize("section", sorted(sections(Config), key=lambda section: section.__name__))
def test_every_key_has_a_description(section: type[BaseModel]) -> None:
    undescribed = [name for name, field in section.model_fields.items() if not field.description]
    assert not undescribed


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sft.batch_size=true", "sft.batch_size=true: expected a number, got true"),
        ("ppo.kl_coef=false", "ppo.kl_coef=false: expected a number, got false"),
        ("ppo.micro_batch_size=TRUE", "ppo.micro_batch_size=TRUE: expected a number, got true"),
        ("seed=20261122051159123", "seed=20261122051159123: expected a number"),
        ("seed=4294967296", "seed=4294967296: expected a number below 4.29497e+09, got 4294967296"),
        (f"sft.batch_size={'9' * 400}", "expected a number of at most 9,007,199,254,740,992, got 99999"),
    ],
)
def test_number_boolean_or_huge_raises(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert message in str(caught.value) and "\n" not in str(caught.value)
