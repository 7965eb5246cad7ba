"""The run directory: who may write to it, what a stage leaves, and that nothing is ever half-written."""

import json
from pathlib import Path

import pytest

from rlhf.config import Config, Stage, load_config
from rlhf.errors import RunError
from rlhf.run import RunDirectory, atomic_directory, atomic_write_json, publish


def config_in(folder: Path, *overrides: str) -> Config:
    return load_config(None, [f"output={json.dumps(str(folder))}", *overrides])


def run_stages(config: Config, *stages: Stage, finish: bool = True, **wishes: bool) -> RunDirectory:
    """Do to the folder what a run of `stages` does."""
    run = RunDirectory.check(config, stages=stages, **wishes)
    run.begin(config, stages=stages, overwrite=wishes.get("overwrite", False))
    for stage in map(run.stage, stages):
        stage.path.mkdir(exist_ok=True)
        stage.metrics.write_text('{"step": 1}\n')
        if finish:
            stage.finish({"stage": stage.name, "config": config.model_dump(mode="json")})
    return run


def test_a_run_describes_itself(tmp_path: Path) -> None:
    run = run_stages(config_in(tmp_path / "run", "seed=7"), "sft")
    description = json.loads(run.description.read_text())
    assert description["config"]["seed"] == description["seed"] == 7
    assert set(description["versions"]) == {"python", "rlhf", "torch", "deepspeed", "transformers", "peft"}
    assert description["invocations"][0]["stages"] == ["sft"]
    assert description["invocations"][0]["command"].startswith("rlhf")


def test_an_empty_folder_may_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert run_stages(config_in(tmp_path / "run"), "sft").stage("sft").done


def test_a_folder_of_other_files_is_refused_even_with_overwrite(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(RunError, match=r"not empty and holds no run.*--output"):
        RunDirectory.check(config_in(tmp_path), overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_a_file_is_refused_as_output(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file"):
        RunDirectory.check(config_in(tmp_path / "file"))


def test_stages_may_follow_one_another_without_any_flag(tmp_path: Path) -> None:
    for stage in ("sft", "reward", "ppo"):
        run = run_stages(config_in(tmp_path / "run"), stage)
    assert all(stage.done for stage in run.stages)
    assert len(json.loads(run.description.read_text())["invocations"]) == 3


def test_a_stage_that_is_there_is_kept_unless_asked(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    run_stages(config, "sft")
    with pytest.raises(RunError, match=r"holds a run already: sft \(complete\);.*--resume.*--overwrite.*--output"):
        RunDirectory.check(config, stages=("sft",))


def test_resume_keeps_what_is_there(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    run_stages(config, "sft")
    run_stages(config, "reward", finish=False)
    run = RunDirectory.check(config, resume=True)
    run.begin(config)
    assert run.stage("sft").done
    assert run.stage("reward").begun


def test_overwrite_removes_the_stages_that_are_run_and_nothing_else(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    run_stages(config, "sft", "reward")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    run = RunDirectory.check(config, stages=("reward",), overwrite=True)
    run.begin(config, stages=("reward",), overwrite=True)
    assert run.stage("sft").done
    assert not run.stage("reward").path.exists()
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_overwriting_all_stages_allows_any_settings(tmp_path: Path) -> None:
    run_stages(config_in(tmp_path / "run"), "sft")
    other = config_in(tmp_path / "run", "seed=5")
    RunDirectory.check(other, overwrite=True)


def test_resume_and_overwrite_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="--resume and --overwrite"):
        RunDirectory.check(config_in(tmp_path / "run"), resume=True, overwrite=True)


@pytest.mark.parametrize("override", ["seed=5", "data.stage_split=[1,1,1]", "data.datasets.0.path=x", "model.path=x"])
def test_a_stage_of_other_shared_settings_is_no_continuation(tmp_path: Path, override: str) -> None:
    run_stages(config_in(tmp_path / "run"), "sft")
    key = override.split("=")[0]
    with pytest.raises(RunError, match=f"other settings.*{key}.*there.*now"):
        RunDirectory.check(config_in(tmp_path / "run", override), stages=("reward",))


def test_a_continuation_may_change_the_sections_of_other_stages(tmp_path: Path) -> None:
    run_stages(config_in(tmp_path / "run", "sft.batch_size=8"), "sft")
    run = run_stages(config_in(tmp_path / "run", "ppo.kl_coef=0.3"), "reward")
    recorded = json.loads(run.description.read_text())["config"]
    assert recorded["sft"]["batch_size"] == 8, "what the sft stage was run with stays recorded"


@pytest.mark.parametrize("override", ["ppo.kl_coef=0.3", "engine.zero_stage=2", "precision=fp32"])
def test_a_stage_resumes_only_with_its_own_settings(tmp_path: Path, override: str) -> None:
    run_stages(config_in(tmp_path / "run"), "ppo", finish=False)
    with pytest.raises(RunError, match=override.split("=")[0]):
        RunDirectory.check(config_in(tmp_path / "run", override), stages=("ppo",), resume=True)


@pytest.mark.parametrize("override", ["ppo.steps=200", "ppo.log_every=5", "ppo.checkpoint_every=7", "accelerator=cpu"])
def test_a_resumed_stage_may_run_longer_and_record_otherwise(tmp_path: Path, override: str) -> None:
    run_stages(config_in(tmp_path / "run"), "ppo", finish=False)
    RunDirectory.check(config_in(tmp_path / "run", override), stages=("ppo",), resume=True)


def test_a_stage_that_left_nothing_is_started_anew_without_any_flag(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run", "model.path=missing")
    run = RunDirectory.check(config)
    run.begin(config)
    run.stage("sft").path.mkdir()
    run.stage("sft").metrics.touch()
    repaired = config_in(tmp_path / "run")
    RunDirectory.check(repaired).begin(repaired)
    assert not run.stage("sft").path.exists()


def test_an_abandoned_run_leaves_no_trace(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    run = RunDirectory.check(config)
    run.begin(config)
    run.stage("sft").path.mkdir()
    run.abandon()
    assert not run.path.exists()


def test_an_abandoned_stage_leaves_the_others(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    run = run_stages(config, "sft")
    run.begin(config, stages=("reward",))
    run.stage("reward").path.mkdir()
    run.abandon(("reward",))
    assert [stage.name for stage in run.stages if stage.path.exists()] == ["sft"]
    assert run.description.exists()


def test_an_unreadable_run_json_is_an_error_of_one_line(tmp_path: Path) -> None:
    run = run_stages(config_in(tmp_path / "run"), "sft")
    run.description.write_text("{")
    with pytest.raises(RunError, match=r"run\.json: is not readable as JSON"):
        RunDirectory.check(config_in(tmp_path / "run"), stages=("reward",))


def test_the_summary_of_an_incomplete_stage_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="sft stage is not complete"):
        RunDirectory(tmp_path).stage("sft").summary()


def test_the_latest_checkpoint_is_a_complete_one(tmp_path: Path) -> None:
    stage = RunDirectory(tmp_path).stage("ppo")
    for name in ("step-00000009", "step-00000010", "step-00000011.partial"):
        (stage.checkpoints / name).mkdir(parents=True)
    assert stage.latest_checkpoint == stage.checkpoints / "step-00000010"


def test_saved_state_names_complete_stages_and_the_last_checkpoint(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert "nothing is saved yet" in run.saved_state()
    run.stage("sft").finish({})
    (run.stage("ppo").checkpoints / "step-00000010").mkdir(parents=True)
    assert "sft is complete, ppo is saved up to step-00000010; continue with --resume" in run.saved_state()


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    atomic_write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        atomic_write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "model") as temporary:
        (temporary / "weights").write_text("new")
        assert not (tmp_path / "model").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "weights"]


def test_a_folder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic_directory(tmp_path / "model") as temporary:
            (temporary / "weights").write_text("new")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_publishing_replaces_an_older_folder(tmp_path: Path) -> None:
    for text in ("old", "new"):
        (tmp_path / "building").mkdir()
        (tmp_path / "building" / "weights").write_text(text)
        publish(tmp_path / "building", tmp_path / "model")
    assert (tmp_path / "model" / "weights").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
