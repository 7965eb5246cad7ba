"""A run knows its settings and its rows: what goes on from it takes them from there, or is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.cli.options import Options
from rlhf.config import STAGES, Stage, load_config
from rlhf.errors import RunError
from rlhf.run import RunDirectory
from tests.run_folders import accelerator, config_in, contents, record, run_stages

ROWS = {"a.jsonl": {"rows": 76, "digest": "12"}}


def test_the_recipe_in_a_run_gives_its_settings_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    config = load_config(None, ["output=run", "model.path=model", "data.datasets=rows.jsonl", "ppo.kl_coef=0.3"])
    run = run_stages(config, "sft")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = load_config(tmp_path / "run" / "recipe.yaml")
    assert found.output == tmp_path / "run" and found.model.path == str(tmp_path / "model")
    assert found.data.datasets[0].path == str(tmp_path / "rows.jsonl") and found.ppo.kl_coef == 0.3
    assert found.model_dump(mode="json") == json.loads((tmp_path / run.description).read_text())["config"]


@pytest.mark.parametrize("stages", [STAGES, ("reward",)])
def test_what_goes_on_without_a_recipe_takes_the_runs_own(tmp_path: Path, stages: tuple[Stage, ...]) -> None:
    run_stages(config_in(tmp_path / "run", "sft.batch_size=8", "ppo.kl_coef=0.3"), "sft")
    options = Options(output=tmp_path / "run", overrides=["ppo.steps=7"]).of_run(stages)
    config = options.load()
    assert options.config == tmp_path / "run" / "recipe.yaml"
    assert (config.sft.batch_size, config.ppo.kl_coef, config.ppo.steps) == (8, 0.3, 7)


def test_a_run_that_was_moved_goes_on_where_it_is(tmp_path: Path) -> None:
    run_stages(config_in(tmp_path / "run"), "sft")
    (tmp_path / "run").rename(tmp_path / "moved")
    for options in (Options(output=tmp_path / "moved"), Options(overrides=[f"output={tmp_path / 'moved'}"])):
        assert options.of_run(("reward",)).load().output == tmp_path / "moved"


def test_what_replaces_all_of_a_run_does_not_take_its_settings(tmp_path: Path) -> None:
    run_stages(config_in(tmp_path / "run"), *STAGES)
    options = Options(output=tmp_path / "run", overwrite=True)
    assert options.of_run(STAGES).config is None
    assert options.of_run(("ppo",)).config == tmp_path / "run" / "recipe.yaml"


def test_a_recipe_that_is_named_counts(tmp_path: Path) -> None:
    run_stages(config_in(tmp_path / "run"), "sft")
    own = tmp_path / "own.yaml"
    own.write_text("seed: 5")
    assert Options(config=own, output=tmp_path / "run").of_run(STAGES).load().seed == 5


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It recorded paths as they were given, and knew fewer keys."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    config = load_config(None, ["output=run", "model.path=model"])
    run = run_stages(config, "sft")
    description = json.loads(run.description.read_text())
    description["config"]["model"]["path"] = "model"
    del description["config"]["data"]["chat_template"], description["data"]
    run.description.write_text(json.dumps(description))
    run.recipe.unlink()
    RunDirectory.check(config, stages=("reward",))
    with pytest.raises(RunError, match=r"model\.path \('/.*/model' there, '/.*/other' now\)"):
        RunDirectory.check(load_config(None, ["output=run", "model.path=./other"]), stages=("reward",))


@pytest.mark.parametrize("folder", ["absent", "empty"])
def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunError, match=f"{folder}: holds no run to resume; check --output"):
        RunDirectory.check(config_in(tmp_path / folder), resume=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("override", "there", "now"),
    [
        ("ppo.steps=120", 40, 120),
        ("ppo.optimizer.learning_rate=0.1", 0.0002, 0.1),
        ("sft.epochs=3", 2, 3),
        ("reward.max_steps=2", 270, 2),
        ("lora.rank=4", 0, 4),
        ("precision=bf16", "fp32", "bf16"),
    ],
)
def test_a_complete_run_with_other_settings_is_refused_and_stays_as_it_was(
    tmp_path: Path, override: str, there: Any, now: Any
) -> None:
    run = run_stages(config_in(tmp_path / "run", "precision=fp32"), *STAGES)
    before = contents(run.path)
    config = config_in(tmp_path / "run", "precision=fp32", override)
    with pytest.raises(RunError) as caught:
        RunDirectory.check(config, resume=True)
    key = override.partition("=")[0]
    assert f"complete was trained with other settings: {key} ({there!r} there, {now!r} now)" in str(caught.value)
    assert contents(run.path) == before


@pytest.mark.parametrize("override", ["ppo.log_every=3", "ppo.micro_batch_size=1", "ppo.checkpoint_every=7"])
def test_what_changes_no_result_is_no_other_setting(tmp_path: Path, override: str) -> None:
    run_stages(config_in(tmp_path / "run"), *STAGES)
    RunDirectory.check(config_in(tmp_path / "run", override), resume=True)


def test_settings_for_stages_to_come_are_no_other_settings_of_complete_ones(tmp_path: Path) -> None:
    run_stages(config_in(tmp_path / "run"), "sft")
    RunDirectory.check(config_in(tmp_path / "run", "ppo.steps=7", "engine.zero_stage=2"), resume=True)
    with pytest.raises(RunError, match=r"sft\.epochs"):
        RunDirectory.check(config_in(tmp_path / "run", "sft.epochs=7"), resume=True)


def test_what_auto_came_to_is_no_other_precision(tmp_path: Path) -> None:
    config, run = config_in(tmp_path / "run"), RunDirectory(tmp_path / "run")
    with run.opened(config, stages=("sft",), accelerator=accelerator("bf16")):
        record(run.stage("sft"), 1)
        run.stage("sft").finish({})
    RunDirectory.check(config, stages=("sft",), resume=True)


def test_a_source_that_has_changed_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    config, run = config_in(tmp_path / "run"), RunDirectory(tmp_path / "run")
    with run.opened(config, stages=("sft",), data=ROWS):
        record(run.stage("sft"), 1)
    before = contents(run.path)
    changed = {"a.jsonl": {"rows": 57, "digest": "34"}, "b.jsonl": {"rows": 1, "digest": "5"}}
    for stages, wishes in ((("sft",), {"resume": True}), (("reward",), {})):
        with (
            pytest.raises(RunError, match=r"made with other rows: a\.jsonl \(76 rows there, 57 now\); bring back"),
            run.opened(config, stages=stages, data=changed, **wishes),
        ):
            pass
    assert contents(run.path) == before
    with run.opened(config, stages=("sft",), resume=True, data=ROWS):
        pass


def test_a_dry_run_compares_rows_and_precision_too(tmp_path: Path) -> None:
    config, run = config_in(tmp_path / "run"), RunDirectory(tmp_path / "run")
    with run.opened(config, stages=("sft",), data=ROWS, accelerator=accelerator("bf16")):
        record(run.stage("sft"), 1)
    wishes: dict[str, Any] = {"stages": ("sft",), "resume": True}
    RunDirectory.check(config, **wishes, data=ROWS, accelerator=accelerator("bf16"))
    with pytest.raises(RunError, match="made with other rows"):
        RunDirectory.check(config, **wishes, data={"a.jsonl": {"rows": 5, "digest": "1"}})
    with pytest.raises(RunError, match="precision"):
        RunDirectory.check(config, **wishes, accelerator=accelerator("fp32"))


def test_a_run_that_is_replaced_may_have_other_rows(tmp_path: Path) -> None:
    config, run = config_in(tmp_path / "run"), RunDirectory(tmp_path / "run")
    with run.opened(config, stages=("sft",), data=ROWS):
        record(run.stage("sft"), 1)
    with run.opened(config, stages=("sft",), overwrite=True, data={"a.jsonl": {"rows": 57, "digest": "34"}}):
        record(run.stage("sft"), 1)
    assert json.loads(run.description.read_text())["data"]["a.jsonl"]["rows"] == 57
