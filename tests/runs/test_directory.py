"""The run directory: a stage's files, permission to write to it, and no file that is half-written."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from rlhf.errors import RunError
from rlhf.roles.model_identity import StartModel
from rlhf.runs.directory import RunDirectory
from rlhf.utils.atomic_io import atomic_directory, atomic_rename_dir, atomic_write_json
from rlhf.utils.file_lock import LOCK
from tests.run_folders import check, checkpoint, config_in, fail_in, record, run_stages


def test_a_run_describes_itself(tmp_path: Path) -> None:
    run = run_stages(config_in(tmp_path / "run", "seed=7"), "sft")
    description = json.loads(run.description.read_text())
    assert description["config"]["seed"] == description["seed"] == 7
    assert set(description["versions"]) == {"python", "rlhf", "torch", "deepspeed", "transformers", "peft"}
    assert description["invocations"][0]["stages"] == ["sft"]
    assert description["invocations"][0]["command"] == shlex.join(sys.orig_argv)  # rlhf was called from Python


def test_command_line_with_bytes_that_are_no_text_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", os.fsdecode(b"train\xe9.py")])
    run = run_stages(config_in(tmp_path / "run"), "sft")
    assert json.loads(run.description.read_text())["invocations"][0]["command"] == r"python 'train\udce9.py'"


def test_a_folder_of_other_files_is_refused_even_with_overwrite(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(RunError, match=r"not empty and holds no run.*--output"):
        check(config_in(tmp_path), overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_a_file_is_refused_as_output(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file"):
        check(config_in(tmp_path / "file"))


def test_folder_that_is_not_writable_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    with pytest.raises(RunError, match=r"a/run: cannot be written \(.* is not yours\); choose another --output"):
        check(config_in(tmp_path / "a" / "run"))


def test_a_complete_run_on_a_read_only_disk_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_in(tmp_path / "run")
    run_stages(config, "sft")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    check(config, stages=("sft",), resume=True)
    with pytest.raises(RunError, match="cannot be written"):
        check(config, stages=("reward",))


@pytest.mark.parametrize("leftover", [None, "traceback-rank1.txt", "stacks/rank1.txt"])
def test_folder_without_a_run_may_be_written_to(tmp_path: Path, leftover: str | None) -> None:
    config = config_in(tmp_path / "run")
    config.output.mkdir()
    if leftover:  # of a run that could not start
        (config.output / leftover).parent.mkdir(exist_ok=True)
        (config.output / leftover).write_text("Traceback")
    assert run_stages(config, "sft").stage("sft").done


def test_stages_may_follow_one_another_without_any_flag(tmp_path: Path) -> None:
    for stage in ("sft", "reward", "dpo", "ppo"):
        run = run_stages(config_in(tmp_path / "run"), stage)
    assert [stage.name for stage in run.stages if stage.done] == ["sft", "reward", "dpo", "ppo"]
    assert len(json.loads(run.description.read_text())["invocations"]) == 4


def test_a_stage_that_is_there_is_kept_unless_asked(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    run_stages(config, "sft")
    with pytest.raises(RunError, match=r"holds a run already: sft \(complete\);.*--resume.*--overwrite.*--output"):
        check(config, stages=("sft",))


def test_resume_removes_half_written_files_and_no_others(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    run = run_stages(config, "sft", finish=False)
    newest = checkpoint(run.stage("sft"), 1)
    half = [run.stage("sft").checkpoints / "step-00000002.partial", run.stage("sft").path / "model.partial"]
    written_after = [run.path / "report.html.partial", run.stage("sft").model / "README.md.partial"]
    for folder in half:
        (folder / "shard").mkdir(parents=True)
    run.stage("sft").model.mkdir()
    for file in written_after:
        file.write_text("half")
    (run.path / "film.partial").write_text("mine")
    with run.open_for(config, stages=("sft",), resume=True):
        assert not any(path.exists() for path in (*half, *written_after))
    assert newest.exists() and (run.path / "film.partial").exists()


def test_a_stage_that_was_only_evaluated_has_nothing_to_lose(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    run = run_stages(config, "sft")
    record(run.stage("reward"), 0)
    assert not run.stage("reward").started
    record(run.stage("reward"), 1)
    assert run.stage("reward").started


def test_resume_and_overwrite_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="--resume and --overwrite"):
        check(config_in(tmp_path / "run"), resume=True, overwrite=True)


def test_resume_keeps_stages_and_complete_ones_no_checkpoint(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    run = run_stages(config, "sft", finish=False)
    checkpoint(run.stage("sft"), 1)
    run.stage("sft").finish({"stage": "sft"})
    run_stages(config, "reward", finish=False)
    with check(config, resume=True).open_for(config, resume=True):
        pass
    assert run.stage("sft").done and not run.stage("sft").checkpoints.exists()
    assert run.stage("reward").started


def test_files_that_a_killed_process_did_not_delete_are_deleted(tmp_path: Path) -> None:
    """It was killed after `stage.json` was written."""
    config = config_in(tmp_path / "run")
    run = run_stages(config, "sft", finish=False)
    run.stage("sft").finish({"stage": "sft"})
    checkpoint(run.stage("sft"), 1)
    (run.stage("sft").best / "step-00000001").mkdir(parents=True)
    (run.path / LOCK).touch()
    run.recover()
    assert run.stage("sft").done and not run.stage("sft").checkpoints.exists() and not run.stage("sft").best.exists()


def test_stage_without_a_step_starts_again_without_any_flag(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.stage("sft").path.mkdir(parents=True)
    run.stage("sft").metrics.touch()
    atomic_write_json(run.description, {"config": {}})
    config = config_in(tmp_path / "run")
    with check(config).open_for(config):
        assert not run.stage("sft").path.exists()


def test_models_are_recorded_without_a_description(tmp_path: Path) -> None:
    """A benchmark trains a stage without the rest of a run."""
    run = RunDirectory(tmp_path)
    for content in ("1", "2"):
        run.record_models("sft", {"policy": StartModel("model", {"weights": content})})
        recorded = json.loads(run.description.read_text())["stages"]["sft"]["models"]
        assert recorded == {"policy": {"path": "model", "identity": {"weights": content}}}


@pytest.mark.parametrize("error", [RunError("x"), KeyError("x"), KeyboardInterrupt()])
def test_a_run_that_cannot_start_leaves_no_trace(tmp_path: Path, error: BaseException) -> None:
    config = config_in(tmp_path / "run")
    run = check(config)
    with pytest.raises(type(error)):
        fail_in(run, config, error, 0)
    assert not run.path.exists()


def test_a_stage_that_cannot_start_leaves_the_others(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    run = run_stages(config, "sft")
    with pytest.raises(RunError):
        fail_in(run, config, RunError("x"), 0, stages=("reward",))
    assert [stage.name for stage in run.stages if stage.path.exists()] == ["sft"]
    assert run.description.exists()


def test_an_unreadable_run_json_is_an_error_of_one_line(tmp_path: Path) -> None:
    run = run_stages(config_in(tmp_path / "run"), "sft")
    run.description.write_text("{")
    with pytest.raises(RunError, match=r"run\.json: is not readable as JSON"):
        check(config_in(tmp_path / "run"), stages=("reward",))


def test_the_summary_of_an_incomplete_stage_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="sft stage is not complete"):
        RunDirectory(tmp_path).stage("sft").summary()


def test_the_latest_checkpoint_is_a_complete_one(tmp_path: Path) -> None:
    stage = RunDirectory(tmp_path).stage("ppo")
    for name in ("step-00000009", "step-00000010", "step-00000011.partial"):
        (stage.checkpoints / name).mkdir(parents=True)
    assert stage.latest_checkpoint == stage.checkpoints / "step-00000010"


def test_describe_saved_names_stages_and_the_last_checkpoint(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.describe_saved() is None
    run.stage("sft").finish({"stage": "sft"})
    (run.stage("ppo").checkpoints / "step-00000010").mkdir(parents=True)
    assert run.describe_saved() == f"in {tmp_path}, sft is complete, ppo is saved up to step-00000010"


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    atomic_write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        atomic_write_json(path, {"a": object()})
    with pytest.raises(UnicodeEncodeError):  # when the file is open
        atomic_write_json(path, {"a": "\udcff"})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["value.json"]


def test_a_folder_appears_when_it_is_complete_or_not_at_all(tmp_path: Path) -> None:
    def write(error: type[BaseException] | None) -> None:
        with atomic_directory(tmp_path / "model") as temporary:
            (temporary / "weights").write_text("new")
            assert not (tmp_path / "model").exists()
            if error:
                raise error

    with pytest.raises(KeyError):
        write(KeyError)
    assert list(tmp_path.iterdir()) == []
    write(None)
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "weights"]


def test_publishing_replaces_an_older_folder(tmp_path: Path) -> None:
    for text in ("old", "new"):
        (tmp_path / "building").mkdir()
        (tmp_path / "building" / "weights").write_text(text)
        atomic_rename_dir(tmp_path / "building", tmp_path / "model")
    assert (tmp_path / "model" / "weights").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
