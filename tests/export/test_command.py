"""`rlhf export`: its folders, its one-line errors, and that it needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf.cli.app import app
from rlhf.errors import RLHFError
from tests.run_folders import contents


def export(*arguments: object) -> list[str]:
    """Return the lines that the command prints."""
    done = CliRunner().invoke(app, ["export", *map(str, arguments)])
    assert done.exit_code == 0, done.exception
    return done.stdout.splitlines()


def refusal(*arguments: object) -> str:
    error = CliRunner().invoke(app, ["export", *map(str, arguments)]).exception
    assert isinstance(error, RLHFError) and error.exit_code == 2 and "\n" not in str(error)
    return str(error)


def test_csv_goes_to_export_in_the_runs_folder_and_changes_nothing_else(run: Path) -> None:
    before = contents(run)
    lines = export(run, "--to", "csv")
    names = ["sft.csv", "ppo.csv", "ppo-heldout.csv"]
    assert lines == [f"wrote {run / 'export' / name}" for name in names]
    after = contents(run)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {f"export/{name}" for name in names}


def test_output_names_another_folder_whose_other_files_stay(run: Path, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/mine.json").write_text("{}")
    lines = export(run, "--to", "inspect", "-o", tmp_path / "logs")
    assert len(list((tmp_path / "logs").iterdir())) == 3 and (tmp_path / "logs/mine.json").read_text() == "{}"
    assert lines[-1] == f"open it: inspect view --log-dir {tmp_path / 'logs'}"
    assert not (run / "export").exists()


def test_folder_of_another_program_is_replaced_only_in_export(run: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert export(run, "--to", "tensorboard")[0] == f"wrote {run / 'export/tensorboard'}"
    assert len(list((run / "export/tensorboard/sft").iterdir())) == 1
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("x")
    message = f"{tmp_path / 'full'}: is not empty; name a new folder with --output"
    assert refusal(run, "--to", "tensorboard", "-o", tmp_path / "full") == message
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]


def test_working_directory_may_be_the_output(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export(run, "--to", "tensorboard", "-o", ".")
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["ppo", "sft"]


def test_mistakes_are_one_line(run: Path, tmp_path: Path) -> None:
    assert refusal(run, "--to", "xls") == (
        "--to xls: no such format; use one of inspect, csv, tensorboard, trackio, wandb"
    )
    assert "contains no run.json; name the folder of a run" in refusal(tmp_path, "--to", "csv")
    (tmp_path / "file").write_text("x")
    assert "is a file" in refusal(run, "--to", "csv", "-o", tmp_path / "file")


def test_texts_need_no_torch(run: Path) -> None:
    script = (
        "import sys; from rlhf.cli.app import app\n"
        f"for name in ('csv', 'inspect'): app(['export', {str(run)!r}, '--to', name], standalone_mode=False)\n"
        "print({'torch', 'transformers', 'deepspeed', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
