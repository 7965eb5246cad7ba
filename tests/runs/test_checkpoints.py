"""The checkpoints of a run: listed with their damage, removed by name, and set aside for an older one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import Stage
from rlhf.errors import RunError
from rlhf.runs import checkpoints
from rlhf.runs.checkpoints import list_saved, remove_checkpoints, resume_from
from rlhf.runs.directory import RunDirectory
from rlhf.utils.file_lock import lock_folder
from rlhf.utils.manifest import write_manifest
from tests.run_folders import config_in, run_stages


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with three checkpoints of PPO, one of SFT, and a model."""
    run = RunDirectory(tmp_path / "run")
    folders = [run.stage("ppo").checkpoints / f"step-0000000{step}" for step in (2, 4, 6)]
    for folder in (*folders, run.stage("sft").checkpoints / "step-00000009", run.stage("sft").model):
        folder.mkdir(parents=True)
        (folder / "numbers").write_bytes(b"x" * 1000)
        write_manifest(folder)
    run.description.write_text("{}")
    return run


def names(run: RunDirectory) -> list[str]:
    return [item.name for item in list_saved(run)]


def resume(
    run: RunDirectory, name: str, *stages: Stage, lines: list[str] | None = None, act: Callable[[], None] = lambda: None
) -> list[str]:
    """Resume from a checkpoint, and return the lines that are printed."""
    lines = [] if lines is None else lines
    with resume_from(run, name, stages, lines.append):
        act()
    return lines


def damage(run: RunDirectory, name: str) -> None:
    (run.stage("ppo").checkpoints / name / "numbers").write_bytes(b"y" * 1000)


def test_damage_is_found_where_contents_are_read(run: RunDirectory) -> None:
    damage(run, "step-00000004")
    assert [(item.stage, item.name, item.damage) for item in list_saved(run)] == [
        ("sft", "step-00000009", ""),
        *(("ppo", f"step-0000000{step}", "") for step in (2, 4, 6)),
    ]
    found = {(item.stage, item.name): item.damage for item in list_saved(run, verify=True)}
    assert {key for key, text in found.items() if text} == {("ppo", "step-00000004")}
    assert "numbers has other content" in found["ppo", "step-00000004"] and ("sft", "model") in found
    (run.stage("ppo").checkpoints / "step-00000002" / "numbers").unlink()
    assert {item.name: item.damage for item in list_saved(run)}["step-00000002"] == "numbers is missing"
    assert all(item.bytes > 1000 for item in list_saved(run) if not item.damage)


@pytest.mark.parametrize("moment", ["before its manifest is read", "after its files are listed"])
def test_checkpoint_that_a_run_removes_meanwhile_is_not_listed(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = run.stage("ppo").checkpoints / "step-00000002"

    def remove_and_call(function: Any, *arguments: Any) -> Any:
        if path in arguments:
            shutil.rmtree(path)
        return function(*arguments)

    name = "find_damage" if moment.startswith("before") else "_describe"
    monkeypatch.setattr(checkpoints, name, partial(remove_and_call, getattr(checkpoints, name)))
    listed = list_saved(run)
    assert [item.name for item in listed] == ["step-00000009", "step-00000004", "step-00000006"]
    assert {item.damage for item in listed} == {""}


def test_changed_record_of_a_complete_stage_is_found(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    run = run_stages(config, "sft", "reward")
    stage = run.stage("reward")
    assert [item.damage for item in list_saved(run, verify=True)] == ["", ""]
    stage.metrics.write_bytes(stage.metrics.read_bytes().replace(b"1", b"7"))
    found = {item.stage: item.damage for item in list_saved(run, verify=True)}
    assert found["sft"] == "" and "metrics.jsonl has other content" in found["reward"]
    stage.metrics.unlink()
    assert [item.damage for item in list_saved(run, verify=True)] == ["", "metrics.jsonl is missing"]


def test_changed_summary_is_not_believed(tmp_path: Path) -> None:
    stage = run_stages(config_in(tmp_path), "sft").stage("sft")
    stage.finish({"stage": "sft", "steps": 8})
    summary = stage.path / "stage.json"
    assert stage.summary()["steps"] == 8
    summary.write_text(summary.read_text().replace("8,", "9,"))
    with pytest.raises(RunError, match=r"stage.json: was changed after rlhf had written it; restore it, or train"):
        stage.summary()
    assert "was changed" in (stage.find_damage() or "")


def test_stage_is_chosen_if_several_have_the_checkpoint(run: RunDirectory) -> None:
    other = run.stage("sft").checkpoints / "step-00000004"
    other.mkdir()
    write_manifest(other)
    with pytest.raises(RunError, match=r"sft and ppo have a checkpoint step-00000004; choose with --stage"):
        remove_checkpoints(run, ["step-00000002", "step-00000004"])
    assert len(names(run)) == 5
    assert remove_checkpoints(run, ["step-00000004"], stage="ppo") == [run.stage("ppo").checkpoints / "step-00000004"]
    assert other.is_dir()
    with pytest.raises(RunError, match="has no checkpoint step-00000009 to use; there are step-00000002"):
        remove_checkpoints(run, ["step-00000009"], stage="ppo")


def test_named_checkpoints_are_removed_but_the_last_good_one(run: RunDirectory) -> None:
    remove_checkpoints(run, ["step-00000002"])
    assert names(run) == ["step-00000009", "step-00000004", "step-00000006"]
    (run.stage("ppo").checkpoints / "step-00000006" / "numbers").unlink()
    with pytest.raises(RunError, match=r"step-00000004: is the last undamaged checkpoint of ppo.* add --last"):
        remove_checkpoints(run, ["step-00000004"])
    with pytest.raises(
        RunError, match=r"has no checkpoint step-00000007 to use; there are step-00000009, step-00000004, "
    ):
        remove_checkpoints(run, ["step-00000006", "step-00000007"])
    assert names(run) == ["step-00000009", "step-00000004", "step-00000006"]
    remove_checkpoints(run, ["step-00000006"])
    remove_checkpoints(run, ["step-00000004"], last=True)
    assert names(run) == ["step-00000009"]


def test_removal_that_is_killed_leaves_no_part_of_a_checkpoint(run: RunDirectory) -> None:
    def kill_at_second_file(event: str, values: Any) -> None:
        if event == "os.remove":
            removed.append(values)
            if len(removed) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    removed: list[Any] = []
    child = os.fork()
    if not child:
        try:
            sys.addaudithook(kill_at_second_file)
            remove_checkpoints(run, ["step-00000006"])
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert names(run) == ["step-00000009", "step-00000002", "step-00000004"]
    assert {item.damage for item in list_saved(run)} == {""}
    run.recover()
    assert not [*run.path.rglob("*.partial")]


def test_a_run_in_progress_keeps_its_checkpoints(run: RunDirectory) -> None:
    with lock_folder(run.path):
        for change in (
            lambda: remove_checkpoints(run, ["step-00000002"]),
            lambda: resume(run, "step-00000002", "ppo"),
        ):
            with pytest.raises(RunError, match="process"):
                change()
    assert len(names(run)) == 4


def test_newer_checkpoints_are_set_aside_and_not_lost(run: RunDirectory) -> None:
    folder = run.stage("ppo").checkpoints
    assert resume(run, "step-00000006", "sft", "ppo") == []
    shutil.copytree(folder / "step-00000006", folder / "step-00000006.newer")
    lines = resume(run, "step-00000002", "sft", "ppo")
    assert lines == ["ppo: resumes from step-00000002; step-00000004, step-00000006 set aside (.newer)"]
    assert run.stage("ppo").latest_checkpoint == folder / "step-00000002"
    assert sorted(path.name for path in folder.iterdir()) == [
        *("step-00000002", "step-00000004.newer", "step-00000006.newer", "step-00000006.newer1"),
    ]
    assert run.stage("sft").latest_checkpoint is not None, "another stage's is left alone"
    with pytest.raises(RunError, match=r"has no checkpoint step-00000008 to use; there are step-00000002"):
        resume(run, "step-00000008", "ppo")


def test_refused_run_sets_no_checkpoint_aside(run: RunDirectory) -> None:
    lines: list[str] = []

    def refuse() -> None:
        assert run.stage("ppo").latest_checkpoint == run.stage("ppo").checkpoints / "step-00000002"
        raise RunError("refused")

    def start_and_fail() -> None:
        run.description.write_text('{"invocations": []}')
        raise KeyboardInterrupt

    with pytest.raises(RunError, match="refused"):
        resume(run, "step-00000002", "ppo", lines=lines, act=refuse)
    assert names(run) == ["step-00000009", "step-00000002", "step-00000004", "step-00000006"]
    assert lines[1] == "ppo: nothing was started, so step-00000004, step-00000006 count again"
    with pytest.raises(KeyboardInterrupt):
        resume(run, "step-00000002", "ppo", act=start_and_fail)
    assert names(run) == ["step-00000009", "step-00000002"], "its records may begin after the older checkpoint"


def test_command_that_is_refused_changes_no_checkpoint(rlhf: Any, run: RunDirectory) -> None:
    refused = rlhf(
        "ppo", "--output", run.path, "--resume=step-00000002", "--set", "ppo.stepz=3", recipe=None, check=False
    )
    assert refused.returncode == 2 and "unknown key" in refused.stderr
    assert names(run) == ["step-00000009", "step-00000002", "step-00000004", "step-00000006"]


def test_complete_stage_is_not_resumed_from_a_checkpoint(run: RunDirectory) -> None:
    (run.stage("ppo").path / "stage.json").write_text("{}")
    with pytest.raises(RunError, match=r"has no checkpoint step-00000002 to use; it has none"):
        resume(run, "step-00000002", "ppo")


def test_commands_list_verify_and_remove(rlhf: Any, run: RunDirectory) -> None:
    listed = json.loads(rlhf("checkpoints", "list", run.path, "--json", recipe=None).stdout)
    assert [item["name"] for item in listed] == names(run) and {item["damage"] for item in listed} == {None}
    assert rlhf("checkpoints", "verify", run.path, recipe=None).returncode == 0
    damage(run, "step-00000004")
    verified = rlhf("checkpoints", "verify", run.path, "--tsv", recipe=None, check=False)
    assert verified.returncode == 3 and "step-00000004" in verified.stdout and "other content" in verified.stdout
    removed = rlhf("checkpoints", "remove", run.path, "step-00000004", recipe=None).stdout
    assert removed == f"removed {run.stage('ppo').checkpoints / 'step-00000004'}\n"
    refused = rlhf("checkpoints", "list", run.path.parent, recipe=None, check=False)
    assert (refused.returncode, refused.stderr) == (2, f"rlhf: error: {run.path.parent}: contains no run\n")
