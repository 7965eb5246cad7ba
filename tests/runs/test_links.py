"""A run's folder with links that somebody else made: nothing is written, moved or deleted through them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.errors import RunError
from rlhf.reporting.console import append_line, copy_console_to
from rlhf.runs.directory import RunDirectory
from rlhf.utils.atomic_io import atomic_directory, atomic_file, atomic_write
from tests.run_folders import check, config_in, contents, run_stages

FILES = (".rlhf.lock", ".rlhf.lock.owner", "recipe.yaml.partial", "run.json.partial", "console.log", "traceback.txt")
FILES_OF_STAGE = ("ppo/console.log", "ppo/metrics.jsonl", "ppo/stage.json.partial")
FOLDERS = (".rlhf.replaced", ".rlhf.replaced.partial", "ppo", "dpo")
FOLDERS_OF_STAGE = ("ppo/tensorboard", "ppo/checkpoints", "ppo/model.partial", "ppo/best")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    victim = tmp_path / "home"
    (victim / ".ssh").mkdir(parents=True)
    for name in (".bashrc", ".ssh/id_rsa", "a.partial", "step-00000001"):
        (victim / name).write_text("precious")
    return victim


@pytest.mark.parametrize("name", [*FILES, *FILES_OF_STAGE, *FOLDERS, *FOLDERS_OF_STAGE])
def test_link_in_a_run_folder_is_refused(name: str, victim: Path, tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    directory = run_stages(config, "sft")
    link = directory.path / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(victim if name in FOLDERS + FOLDERS_OF_STAGE else victim / ".bashrc")
    before = contents(victim)
    with pytest.raises(RunError, match=r"is a link to .*, and runs do not write through links; remove it"):
        check(config, stages=("reward", "ppo"))  # begins with `recover`, as commands do that only look
    with pytest.raises(RunError, match="is a link to"), directory.open_for(config, stages=("reward", "ppo")):
        pass
    assert contents(victim) == before and link.is_symlink()


def test_dangling_link_is_refused(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    directory = run_stages(config, "sft")
    (directory.path / ".rlhf.lock").symlink_to(tmp_path / "new")
    with pytest.raises(RunError, match="is a link to"), directory.open_for(config, stages=("reward",)):
        pass
    assert not (tmp_path / "new").exists()


def test_writers_refuse_links(victim: Path, tmp_path: Path) -> None:
    before = contents(victim)
    for name, target in {"file.partial": ".bashrc", "folder.partial": ".ssh", "log": ".bashrc"}.items():
        (tmp_path / name).symlink_to(victim / target)
    for write in (
        lambda: atomic_write(tmp_path / "file", "text"),
        lambda: atomic_file(tmp_path / "file").__enter__(),
        lambda: atomic_directory(tmp_path / "folder").__enter__(),
        lambda: append_line(tmp_path / "log", "line"),
        lambda: copy_console_to(tmp_path / "log", "title").__enter__(),
    ):
        with pytest.raises(RunError, match="is a link to"):
            write()
    assert contents(victim) == before


def test_link_to_the_run_folder_itself_is_followed(tmp_path: Path) -> None:
    directory = run_stages(config_in(tmp_path / "run"), "sft")
    (tmp_path / "name").symlink_to(directory.path)
    RunDirectory(tmp_path / "name").recover()
    check(config_in(tmp_path / "name"), stages=("reward",))
