"""The configuration: one schema for files, `--set` and Python, and errors that name the key."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from rlhf.config.schema import (
    EMBEDDED_RECIPE,
    Config,
    DatasetConfig,
    PPOConfig,
    SFTConfig,
    build_config,
    load_config,
)
from rlhf.errors import ConfigError
from tests.helpers import NAMES

ALIASES_IN_LISTS = "a0: &a0 [1, 1]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 8)
)
"""Ten million values, in a text of 500 bytes."""
ALIASES_IN_MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 4)}]}}\n" for level in range(1, 14)
)


def sections(model: type[BaseModel]) -> set[type[BaseModel]]:
    """Return a section and all sections below it, also in items of lists."""
    classes = {model}
    for field in model.model_fields.values():
        for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(candidate, type(BaseModel)):  # on Python 3.10 list[str] is a type
                classes |= sections(candidate)
    return classes


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_load_config_without_file_uses_embedded_recipe() -> None:
    assert load_config() == load_config(EMBEDDED_RECIPE)


@pytest.mark.parametrize(
    "override", ["model.path=x", "model={path: x}", "data.datasets.0.path=x", "data={datasets: [{path: x}]}"]
)
def test_load_config_model_or_data_in_any_form_uses_defaults(override: str) -> None:
    config = load_config(None, [override])
    assert (config.sft, config.ppo) == (SFTConfig(), PPOConfig())


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


def test_load_config_overrides_replace_values_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "seed: 1\nmodel: {path: x}\nppo:\n  steps: 7\n  kl_coef: 0.5\n")
    config = load_config(path, ["ppo.steps=9", "model.path=''", "data.stage_split=[1, 2, 3]"])
    assert (config.seed, config.ppo.steps, config.ppo.kl_coef) == (1, 9, 0.5)
    assert (config.model.path, config.data.stage_split) == (None, (1, 2, 3))
    assert load_config(written(tmp_path, "# nothing\n")) == Config()


def test_load_config_override_indexes_lists() -> None:
    config = load_config(None, ["data.datasets.0.path=a.jsonl", "data.datasets.0.limit=2", "data.datasets.1.path=b"])
    assert config.data.datasets == (DatasetConfig(path="a.jsonl", limit=2), DatasetConfig(path="b"))


KEPT = "expected last or best(METRIC), got 'first'"
STEPS = "expected a number of steps, at least 0, or epoch, got"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("ppo.steps", "--set ppo.steps: expected key=value"),
        ("ppo.steps=[", "--set ppo.steps=[: the value is not valid YAML"),
        ("ppo.steps=!!int x", "the value is not valid YAML"),
        ("engine.deepspeed={a: &a [*a]}", "the value is not valid YAML"),
        ("data.datasets.7.path=x", "'7' is not a key here"),
        ("engine.zzz=1", "unknown key 'engine.zzz'; use one of zero_stage"),
        ("engine.kernels={adam: x}", "unknown operation 'adam'; use one of adamw, adamw_cpu_offload, "),
        ("data.datasets=[{path: a, weight: 0}]", "weight: expected a number above 0, or all, got 0"),
        ("data.datasets=[{path: a, weight: most}]", "weight: expected a number above 0, or all, got 'most'"),
        ("data.datasets=[{path: a, stages: [dpo]}]", "stages.0: expected 'sft', 'reward' or 'ppo', got 'dpo'"),
        (
            "data.datasets=[{path: a, weight: 2}, b]",
            "weight: has no effect, because no other source has one, got 2; set",
        ),
        (
            "data.datasets=[{path: a, columns: {text: b}, stages: [ppo]}]",
            "stages: columns.text is for sft alone, got ppo",
        ),
        ("data.datasets=[{path: a, template: Hi}]", "expected {prompt} once, got 'Hi'; write {prompt} in place of"),
        ("data.datasets=[{path: a, template: '{prompt} {prompt}'}]", "expected {prompt} once, got '{prompt} {prompt}'"),
        ("data.datasets=[{path: a, template: '{prompt} {input}'}]", "got '{prompt} {input}'; remove {input}"),
        (
            r"data.datasets=[{path: a, template: '{prompt}\n'}]",
            "line break, got '{prompt}\\\\n'; put it in double quotes",
        ),
        (
            "data.datasets=[{path: a, columns: {text: b}, template: '{prompt}'}]",
            "template: columns.text has no prompts",
        ),
        ("data.datasets=[{path: a, heldout_revision: v1}]", "heldout_revision: is for a second source; name that in"),
        (
            "data.datasets=[{path: a, heldout_split: train}]",
            "heldout_split: the same as split, got 'train'; name anoth",
        ),
        # Numbers
        ("sft.batch_size=true", "--set sft.batch_size=true: expected a number, got true"),
        ("ppo.kl_coef=false", "--set ppo.kl_coef=false: expected a number, got false"),
        ("ppo.micro_batch_size=TRUE", "expected a number, got true"),
        ("seed=20261122051159123", "--set seed=20261122051159123: expected a number"),
        ("seed=4294967296", "expected a number below 4.29497e+09, got 4294967296"),
        (f"sft.batch_size={'9' * 400}", "expected a number of at most 9,007,199,254,740,992, got 99999"),
        ("ppo.ema=1", "--set ppo.ema=1: expected a number below 1, got 1"),
        ("ppo.ema=0", "--set ppo.ema=0: expected a number above 0, got 0"),
        ("ppo.samples_every=-1", "expected a number of at least 0"),
        ("ppo.samples=0", "expected a number of at least 1"),
        # Evaluation and the model that is kept
        ("sft.eval_every=-1", f"--set sft.eval_every=-1: {STEPS} -1"),
        ("reward.eval_every=epochs", f"{STEPS} 'epochs'"),
        ("reward.eval_every=0.5", f"{STEPS} 0.5"),
        ("reward.eval_every=true", f"{STEPS} true"),
        ("ppo.eval_every=epoch", "--set ppo.eval_every=epoch: expected a whole number, got 'epoch'"),
        ("sft.keep=first", f"--set sft.keep=first: {KEPT}"),
        ("sft.keep=best(loss)", "cannot be selected by 'loss' in this stage; use best(perplexity), or last"),
        ("reward.keep=best(margin)", "by 'margin' in this stage; use best(accuracy) or best(loss), or last"),
        ("dpo.keep=best(margin)", "by 'margin' in this stage; use best(loss) or best(accuracy), or last"),
        (
            "ppo.keep=best(kl)",
            "by 'kl' in this stage; use best(reward) or best(judge_reward) or best(approved_share), or last",
        ),
        ("ppo.keep=best(judge_reward) ppo.eval_every=1", "best(judge_reward) needs ppo.judge, a second reward model"),
        ("ppo.stop=over_optimized", "ppo.stop=over_optimized: over_optimized would save the model that it finds"),
        ("ppo.keep=best(reward)", "best(reward) needs evaluations during training; set eval_every"),
        ("reward.reset_final_norm=never", "reset_final_norm=never: expected 'auto', true or false, got 'never'"),
        # DPO
        ("dpo.loss=kto", "--set dpo.loss=kto: "),
        ("dpo.beta=0", "--set dpo.beta=0: "),
        ("dpo.label_smoothing=0.5", "--set dpo.label_smoothing=0.5: expected a number below 0.5, got 0.5"),
        ("dpo.loss=ipo dpo.label_smoothing=0.1", "dpo.label_smoothing=0.1: not used by the ipo loss; set 0, or "),
        ("dpo.loss=robust", "dpo.loss=robust: robust equals sigmoid if dpo.label_smoothing is 0; set"),
        # PPO
        ("ppo.kl_in=loss", "ppo.kl_in=loss: k1 has no effect in the loss"),
        ("ppo.kl_in=loss ppo.kl_estimator=k1", "ppo.kl_estimator=k1: k1 has no effect in the loss"),
        ("ppo.kl_target=6 ppo.kl_coef=0", "ppo.kl_target=6: has no effect without ppo.kl_coef; set that too, or"),
        ("ppo.ema_on_host=true", "ppo.ema_on_host=true: has no effect without ppo.ema"),
        ("ppo.ptx_length=64", "ppo.ptx_length=64: has no effect without ppo.ptx_coef"),
        ("ppo.ptx_batch_size=8", "ppo.ptx_batch_size=8: has no effect without ppo.ptx_coef"),
        (  # the controller takes at most batch_size / (5 * kl_horizon) of the coefficient
            "ppo.kl_target=6 ppo.batch_size=40 ppo.kl_horizon=8",
            "ppo.kl_horizon=8: one step with 40 completions (ppo.batch_size) could reduce the KL coefficient to 0; set "
            "more than 8",
        ),
        ("ppo.estimator=graph", "ppo.estimator=graph: unknown estimator 'graph'; use one of gae, rloo, grpo, reinf"),
        ("ppo.lam=0.9 ppo.estimator=rloo", "ppo.lam=0.9: needs ppo.estimator=gae, got rloo; change one of them"),
        ("ppo.gamma=0.9 ppo.estimator=grpo", "ppo.gamma=0.9: needs ppo.estimator=gae or reinforce++, got grpo"),
        ("ppo.group_std=false", "ppo.group_std=false: needs ppo.estimator=grpo, got gae"),
        ("ppo.value_clip=0.3 ppo.estimator=rloo", "ppo.value_clip=0.3: needs ppo.estimator=gae, got rloo"),
        ("ppo.critic_dropout=0.1 ppo.estimator=rloo", "ppo.critic_dropout=0.1: needs ppo.estimator=gae, got rloo"),
        ("ppo.critic=folder ppo.estimator=rloo", "ppo.critic=folder: rloo has no critic; remove this key"),
        ("ppo.completions_per_prompt=1 ppo.estimator=rloo", "rloo compares the completions of a prompt and needs at"),
        ("ppo.completions_per_prompt=1 ppo.estimator=grpo", "grpo compares the completions of a prompt and needs at"),
    ],
)
def test_load_config_invalid_override_names_the_key(overrides: str, message: str) -> None:
    words = [overrides] if "{" in overrides or "!" in overrides else overrides.split()
    with pytest.raises(ConfigError) as caught:
        load_config(None, words)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_longest_step_of_the_kl_controller_is_accepted() -> None:
    config = load_config(None, ["ppo.kl_target=6", "ppo.batch_size=40", "ppo.kl_horizon=9"])
    assert config.ppo.kl_horizon == 9
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 3  # type: ignore[misc]


def test_dpo_optimizer_keeps_its_low_learning_rate() -> None:
    config = build_config({"dpo": {"optimizer": {"schedule": "linear"}}})
    assert config.dpo.optimizer.learning_rate == 1e-6 < config.sft.optimizer.learning_rate


@pytest.mark.parametrize("every", ["0", "7", "epoch"])
def test_eval_every_accepts_steps_or_epoch(every: str) -> None:
    config = load_config(None, [f"sft.eval_every={every}"])
    assert config.sft.eval_every == (every if every == "epoch" else int(every))
    assert build_config(config.model_dump(mode="json")).sft == config.sft


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
    ("settings", "message"),
    [
        ({"batch_size": 8}, "ppo.minibatch_size: 8 rows cannot be divided among 3 ranks"),
        ({"batch_size": 9, "micro_batch_size": 2}, "9 is not a multiple of ppo.micro_batch_size 2 x 3 ranks"),
        ({"batch_size": 9, "minibatch_size": 6}, "ppo.batch_size: 9 is not a multiple of ppo.minibatch_size 6"),
    ],
)
def test_batch_that_cannot_be_divided_raises(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PPOConfig(**settings).minibatch(3)
    assert message in str(caught.value)
    assert PPOConfig(batch_size=8, minibatch_size=4).minibatch(2) == (4, 2)
    assert SFTConfig(batch_size=8, micro_batch_size=2).micro_batch(2, section="sft") == 2


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
        ("[" * 600, "not valid YAML"),
        ("seed: " + "1" * 5000, "not valid YAML"),
        ("seed: !!bool x", r"recipe\.yaml: not valid YAML \('x' does not fit its tag\)"),
        (
            "engine: {deepspeed: &a {x: *a}}",
            r"recipe\.yaml:1: not valid YAML \(an alias contains itself\)",
        ),
        (ALIASES_IN_LISTS, r"recipe\.yaml:\d: not valid YAML \(its aliases make more than 100,000 values"),
        (ALIASES_IN_MERGES, r"recipe\.yaml:\d+: not valid YAML \(its aliases make more than 100,000 values"),
        ("\udcff\udcfe", "not a UTF-8 text file"),
        (None, r"recipe\.yaml: cannot be read"),
    ],
)
def test_load_config_invalid_file_names_it(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    if text is not None:
        path.write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("section", sorted(sections(Config), key=lambda section: section.__name__))
def test_every_key_has_a_description(section: type[BaseModel]) -> None:
    undescribed = [name for name, field in section.model_fields.items() if not field.description]
    assert not undescribed
