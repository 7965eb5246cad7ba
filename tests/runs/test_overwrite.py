"""Who may write to a run's folder, and what a new run may replace: nothing is lost, and there is one writer."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from rlhf.config.schema import STAGES, Stage
from rlhf.errors import RunError
from rlhf.runs.directory import RunDirectory
from rlhf.utils.file_lock import LOCK, OWNER, find_owner, lock_folder, read_owner
from tests.forks import Forks
from tests.run_folders import check, checkpoint, config_in, contents, fail_in, record, run_stages


def test_overwrite_removes_only_the_stages_that_are_run(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    run_stages(config, "sft", "reward")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    run = run_stages(config, "reward", overwrite=True, finish=False)
    assert run.stage("sft").done
    assert not run.stage("reward").done
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_overwrite_refuses_stages_that_later_ones_started_from(tmp_path: Path) -> None:
    run = run_stages(config_in(tmp_path / "run"), *STAGES)
    config, before = config_in(tmp_path / "run"), contents(run.path)
    for stage, later in (("sft", "reward"), ("reward", "ppo")):
        with pytest.raises(RunError, match=rf"{later} comes from the {stage} stage, .*`rlhf --overwrite`"):
            check(config, stages=(stage,), overwrite=True)
    assert contents(run.path) == before
    for stages in (STAGES, ("ppo",)):
        check(config, stages=stages, overwrite=True)
    run_stages(config, "dpo")  # none of the default stages
    with pytest.raises(RunError, match=rf"dpo comes from the sft stage, .* replaces; delete {run.path}/dpo, or"):
        check(config, stages=STAGES, overwrite=True)
    assert run_stages(config, "dpo", overwrite=True).stage("sft").done


def test_overwrite_keeps_a_stage_of_other_base_models(tmp_path: Path) -> None:
    run_stages(config_in(tmp_path / "run"), "sft")
    own = config_in(tmp_path / "run", "ppo.actor=x", "ppo.reward_model=y")
    run = run_stages(own, "ppo")
    run_stages(config_in(tmp_path / "run"), "sft", overwrite=True)
    assert run.stage("ppo").done


@pytest.mark.parametrize(("error", "stages"), [(OSError("x"), STAGES), (KeyboardInterrupt(), ("ppo",))])
def test_overwrite_that_fails_before_a_step_restores_the_run(
    tmp_path: Path, error: BaseException, stages: tuple[Stage, ...]
) -> None:
    run = run_stages(config_in(tmp_path / "run"), *STAGES)
    (run.stage("sft").path / "model").mkdir()
    (run.stage("sft").path / "model" / "weights").write_bytes(b"precious")
    before = contents(run.path)
    other = config_in(tmp_path / "run", "reward.batch_size=8")
    with pytest.raises(type(error)):
        fail_in(run, other, error, 0, overwrite=True, stages=stages)
    assert contents(run.path) == before


def test_failed_overwrite_of_another_version_leaves_no_recipe(tmp_path: Path) -> None:
    """Its settings cannot be written as a recipe; those of the run that failed must not stand for them."""
    run = run_stages(config_in(tmp_path / "run"), "sft")
    recorded = json.loads(run.description.read_text())
    recorded["config"]["unknown"] = 1
    run.description.write_text(json.dumps(recorded))
    run.recipe.unlink()
    before = contents(run.path)
    with pytest.raises(KeyError):
        fail_in(run, config_in(tmp_path / "run", "seed=5"), KeyError("x"), overwrite=True, stages=("sft",))
    assert contents(run.path) == before


def test_overwrite_deletes_the_old_run_after_the_first_step(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    run = run_stages(config, *STAGES)
    with pytest.raises(KeyError):
        fail_in(run, config, KeyError("x"), 0, 1, overwrite=True)
    assert sorted(path.name for path in run.path.iterdir()) == ["recipe.yaml", "run.json", "sft"]
    assert not run.stage("sft").done


def test_a_checkpoint_settles_a_stage_whose_records_are_rare(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    run = run_stages(config, "sft")
    with run.open_for(config, stages=("sft",), overwrite=True):
        checkpoint(run.stage("sft"), 3)
        run.commit(run.stage("sft"))
        assert not list(run.path.glob(".rlhf.replaced*"))
    assert not run.stage("sft").done and run.stage("sft").latest_checkpoint


@pytest.mark.parametrize("moment", ["copy2", "rename", "atomic_write_json", "in the block", "settled", "rmtree"])
def test_overwrite_killed_at_any_moment_loses_nothing(forks: Forks, tmp_path: Path, moment: str) -> None:
    """A killed process does not clean up; the next one finds the old run, or the new one, and nothing between."""
    run = run_stages(config_in(tmp_path / "run"), *STAGES)
    before = contents(run.path)
    script = f"""
import json, os, shutil, sys
from pathlib import Path
import rlhf.runs.directory
from rlhf.config.schema import load_config
from rlhf.runs.directory import RunDirectory
moment = {moment!r}
def dying(function):
    def call(*arguments, **options):
        if counts.pop(0) == 0:
            os.kill(os.getpid(), 9)
        return function(*arguments, **options)
    return call
counts = [1, 1, 1, 0] if moment == "rename" else [0]  # two files and sft are moved, reward is not
if moment == "atomic_write_json":
    rlhf.runs.directory.atomic_write_json = dying(rlhf.runs.directory.atomic_write_json)
elif moment == "copy2":
    shutil.copy2 = dying(shutil.copy2)
elif moment == "rename":
    os.rename = dying(os.rename)
run = RunDirectory(Path({str(tmp_path / "run")!r}))
with run.open_for(load_config(None, [f"output={{run.path}}", "seed=5"]), overwrite=True):
    if moment == "in the block":
        os.kill(os.getpid(), 9)
    run.stage("sft").path.mkdir()
    run.stage("sft").metrics.write_text('{{"step": 1}}\\n')
    if moment == "rmtree":
        def half(path, **options):
            if path.exists():
                os.unlink(path / "run.json")
                os.kill(os.getpid(), 9)
        shutil.rmtree = half
    run.commit(run.stage("sft"))
    os.kill(os.getpid(), 9)
"""
    assert forks.python("-c", script, timeout=60).returncode == -9
    if moment in ("settled", "rmtree"):
        check(config_in(tmp_path / "run", "seed=5"), resume=True)
        with run.open_for(config_in(tmp_path / "run", "seed=5"), resume=True):
            pass
        assert sorted(path.name for path in run.path.iterdir()) == ["recipe.yaml", "run.json", "sft"]
        assert json.loads(run.description.read_text())["seed"] == 5
    else:
        with pytest.raises(RunError, match=r"sft \(complete\), reward \(complete\), ppo \(complete\)"):
            check(config_in(tmp_path / "run"))
        assert contents(run.path) == before


def test_stage_that_cannot_start_leaves_the_description(tmp_path: Path) -> None:
    run = run_stages(config_in(tmp_path / "run"), "sft")
    before = contents(run.path)
    with pytest.raises(RunError):
        fail_in(run, config_in(tmp_path / "run", "engine.zero_stage=2"), RunError("x"), 0, stages=("reward",))
    assert contents(run.path) == before


def test_a_second_writer_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    run = RunDirectory(config.output)
    named = rf"process {os.getpid()} on {socket.gethostname()} is writing"
    with run.open_for(config):
        with pytest.raises(RunError, match=named):
            check(config)
        with pytest.raises(RunError, match=named), run.open_for(config, overwrite=True):
            pass
        record(run.stage("sft"), 1)
    assert {path.name for path in run.path.iterdir()} == {"run.json", "recipe.yaml", "sft"}


def test_a_dead_owner_holds_no_lock(forks: Forks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    script = (
        "import os; from pathlib import Path; from rlhf.utils.file_lock import lock_folder\n"
        f"with lock_folder(Path({str(folder)!r})): "
    )
    dead = forks.python("-c", script + "os.kill(os.getpid(), 9)", timeout=60)
    assert dead.returncode == -9 and (folder / LOCK).exists()
    assert run_stages(config_in(folder), "sft").stage("sft").done
    assert not (folder / LOCK).exists()


@pytest.mark.parametrize("owner", ["living", "dead", "remote"])
def test_lock_without_kernel_locks_trusts_the_owner_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], owner: str
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    config = config_in(tmp_path / "run")
    run = run_stages(config, "sft")
    assert not (run.path / LOCK).exists()
    run.create_backup(["sft"])  # as --overwrite has it until its first step
    other = subprocess.Popen(["sleep", "60"])
    host = "elsewhere" if owner == "remote" else socket.gethostname()
    (run.path / LOCK).write_text(f"{other.pid}\n{host}\n")
    (run.path / OWNER).write_text(f"process {other.pid} on {host}\n")
    if owner != "living":
        other.kill()
        other.wait()
    before = contents(run.path)
    try:
        if owner == "dead":
            check(config, resume=True)
            assert run.stage("sft").done and not (run.path / LOCK).exists()
        else:
            with pytest.raises(RunError, match=rf"process {other.pid} on {host} is writing .* delete .*lock if it has"):
                check(config, resume=True)
            assert contents(run.path) == before
    finally:
        other.kill()
        other.wait()
    assert capsys.readouterr().err.count("cannot be locked") == 1


def test_later_process_of_the_same_number_is_no_owner(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        assert find_owner(tmp_path) == "alive"
        line, start = (tmp_path / OWNER).read_text().splitlines()
        assert line == f"process {os.getpid()} on {socket.gethostname()}" == read_owner(tmp_path)
        (tmp_path / OWNER).write_text(f"{line}\n{int(start) - 1}\n")
        assert find_owner(tmp_path) == "none"
        (tmp_path / OWNER).write_text(f"{line}\n")  # of a system that does not say when a process started
        assert find_owner(tmp_path) == "alive"


def test_lock_does_not_stay_with_a_forked_process(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "run"):
        child = os.fork()
        if not child:
            time.sleep(30)
            os._exit(0)
    try:
        with lock_folder(tmp_path / "run"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
