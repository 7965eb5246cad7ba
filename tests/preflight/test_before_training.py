"""A mistake that would stop a later stage is found before the first one trains, in one line, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import STAGES, load_config
from rlhf.errors import DataError
from rlhf.trainers import preflight
from tests.helpers import assert_same_weights, start, wait_for
from tests.preflight.mistakes import MISTAKES, Bench, make_mistake, settings


@pytest.fixture
def bench(tmp_path: Path, model_folder: Path, data_file: Path, finished_run: Path) -> Bench:
    return Bench(tmp_path, model_folder, data_file, finished_run)


@pytest.mark.parametrize(
    "sources",
    [
        "[{path: PATH}, {path: absent.jsonl}]",
        "[{path: PATH}, {path: PATH, heldout: absent.jsonl}]",
        "[{path: PATH}, {path: absent.jsonl, stages: [reward]}]",
    ],
)
def test_launcher_finds_a_missing_later_source(bench: Bench, sources: str) -> None:
    """`check` runs in the launcher, before it starts any rank."""
    config = load_config(None, [f"output={bench.output}", f"data.datasets={sources.replace('PATH', str(bench.rows))}"])
    with pytest.raises(DataError, match=r"absent\.jsonl: no such file"):
        preflight.check(config, STAGES, ranks=2)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_before_anything_is_trained(rlhf: Any, bench: Bench, name: str) -> None:
    arguments, words = make_mistake(name, bench)
    before = files(bench.folder)
    done = rlhf("--output", bench.output, *arguments, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    *notes, line = done.stderr.strip().splitlines()
    assert line.startswith("rlhf: error: ") and all(note.startswith("rlhf: note: runs reward ") for note in notes)
    assert [word for word in words if word not in line] == [], line
    assert ": training" not in done.stdout and " before:" not in done.stdout
    assert files(bench.folder) == before and not bench.output.exists()


@pytest.mark.parametrize("name", ["no_preferences", "another_vocabulary"])
def test_a_dry_run_finds_it_too(rlhf: Any, bench: Bench, name: str) -> None:
    """It tokenizes all rows; other runs check a sample."""
    arguments, words = make_mistake(name, bench)
    done = rlhf("--dry-run", "--output", bench.output, *arguments, check=False)
    assert done.returncode == 2 and all(word in done.stderr for word in words)


def test_dry_run_shows_each_stage_and_writes_nothing(rlhf: Any, bench: Bench) -> None:
    done = rlhf("--dry-run", "--output", bench.output, "--ranks", 2)
    shown = " ".join(done.stdout.split())
    for part in (
        # 200 rows in the proportions 2:4:4, a fifth of each held out; 3 steps each
        "supervised fine-tuning",
        "32 rows for training, 8 held out",
        "64 rows for training, 16 held out",
        "steps 3 of 4 rows",
        "steps 3 of 4 pairs",
        "steps 3 rollouts of 4 prompts",
        "memory peak about ",
        "on each device (",
        "(at most 24)",
        "example prompt <user>",
        "example chosen please ",
        "(in the loss)",
        f"ppo.reward_model {bench.model}, after sft and reward of this run",
        "nothing was written",
    ):
        assert part in shown
    assert "training:" not in shown and not bench.output.exists() and done.stderr == ""


def test_a_dry_run_of_what_is_left_leaves_the_run_as_it_is(rlhf: Any, finished_run: Path) -> None:
    before = {path: path.read_bytes() for path in files(finished_run)}
    shown = rlhf("ppo", "--dry-run", "--output", finished_run, "--overwrite").stdout
    assert f"{finished_run}/sft/model" in "".join(shown.split()) and "supervised" not in shown
    assert {path: path.read_bytes() for path in files(finished_run)} == before


def test_a_mistake_of_a_stage_that_is_not_to_run_stops_nothing(rlhf: Any, bench: Bench) -> None:
    rlhf("sft", "--output", bench.output, *settings(ppo__reward_model="./nope", sft__max_steps=1))
    assert (bench.output / "sft" / "stage.json").is_file()


def test_changed_data_stop_what_goes_on(rlhf: Any, bench: Bench) -> None:
    path = bench.file("mine.jsonl", bench.rows.read_text())
    source = settings(data__datasets=path)
    rlhf("sft", "--output", bench.output, *source)
    before = {file: file.read_bytes() for file in files(bench.output)}
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:150]))
    done = rlhf("reward", "--output", bench.output, *source, check=False)
    assert done.returncode == 2
    assert f"made with other rows: {path} (200 rows there, 150 now); restore the original data" in done.stderr
    assert {file: file.read_bytes() for file in files(bench.output)} == before


@pytest.mark.slow
def test_rows_that_change_between_two_stages_stop_the_second(rlhf: Any, bench: Bench) -> None:
    """They were looked at when the run began, and its stages are to share no prompts."""
    path = bench.file("mine.jsonl", bench.rows.read_text())
    process = start(rlhf, "--output", bench.output, *settings(data__datasets=path, sft__max_steps=200, sft__epochs=99))
    wait_for(bench.output / "sft" / "evaluations.json", process)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:150]))
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 2
    assert f"made with other rows: {path} (200 rows there, 150 now)" in errors
    assert (bench.output / "sft" / "stage.json").is_file() and not (bench.output / "reward").exists()


def test_later_and_resumed_stages_take_the_settings_of_the_run(
    rlhf: Any, bench: Bench, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one they leave, to the bit, the models that one command with the same seed leaves."""
    rlhf("sft", "--output", bench.output)
    monkeypatch.chdir(bench.folder)
    shown = rlhf("reward", "--output", "run", recipe=None).stdout
    assert "recipe       run/recipe.yaml" in shown and "reward: training: 3 steps" in shown
    again = rlhf("--output", "run", "--resume", recipe=None).stdout
    assert "ppo: training: 3 steps" in again and "sft: training" not in again
    done = rlhf("--output", "run", "--resume", recipe=None).stdout
    assert "run: sft, reward, ppo are complete" in done and ": training" not in done
    for stage in ("sft", "reward", "ppo"):
        assert_same_weights(bench.output / stage / "model", finished_run / stage / "model")
