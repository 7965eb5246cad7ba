"""What a user can get wrong is one line and exit code 2, and leaves nothing half-written."""

import json
import shutil

import pytest

from tests.helpers import build_tokenizer


def refused(rlhf, output, *arguments):
    """The line that a refused command prints."""
    found = rlhf(*arguments, "--output", output, check=False)
    assert found.returncode == 2, found.stdout + found.stderr
    (line,) = found.stderr.strip().splitlines()
    assert line.startswith("rlhf: error: ")
    return line


def settings(**keys):
    return [part for key, value in keys.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]


def contents(folder):
    """Every file with its time and its bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_an_error_of_all_ranks_is_printed_once_and_leaves_nothing(rlhf, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "a", "label": 1}) + "\n")
    line = refused(rlhf, tmp_path / "run", "sft", "--ranks", 2, *settings(data__datasets=f"[{{path: {path}}}]"))
    assert str(path) in line and "label, text" in line
    assert not (tmp_path / "run").exists()


def test_rows_without_preferences_cannot_train_a_reward_model(rlhf, finished_run, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "response": "r"}) + "\n" for i in range(40)))
    model = finished_run / "sft" / "model"
    line = refused(
        rlhf, tmp_path / "run", "reward", *settings(data__datasets=f"[{{path: {path}}}]", reward__model=model)
    )
    assert str(path) in line and "reward" in line


def test_a_stage_without_rows_is_named(rlhf, tmp_path):
    line = refused(rlhf, tmp_path / "run", "sft", *settings(data__stage_split="[0,1,1]"))
    assert "sft" in line and "stage_split" in line


def test_a_batch_that_cannot_be_divided_is_named_before_anything_starts(rlhf, tmp_path):
    line = refused(rlhf, tmp_path / "run", "sft", *settings(sft__batch_size=6, sft__micro_batch_size=4))
    assert "sft.batch_size" in line and "sft.micro_batch_size" in line
    assert not (tmp_path / "run").exists()


def test_a_stage_that_fails_leaves_the_one_that_it_was_to_replace(rlhf, finished_run, tmp_path):
    """A reward model with another vocabulary is refused when the stage has begun."""
    shutil.copytree(finished_run, tmp_path / "run")
    before = contents(tmp_path / "run")
    other = tmp_path / "reward"
    shutil.copytree(finished_run / "reward" / "model", other)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(other)
    models = settings(ppo__actor=finished_run / "sft" / "model", ppo__reward_model=other)
    assert "vocabulary" in refused(rlhf, tmp_path / "run", "ppo", "--overwrite", *models)
    assert contents(tmp_path / "run") == before


def test_ppo_without_earlier_stages_says_which_to_run(rlhf, tmp_path):
    assert "rlhf sft" in refused(rlhf, tmp_path / "run", "ppo")


@pytest.mark.parametrize("arguments", [[], ["sft"]])
def test_a_finished_run_is_not_written_over(rlhf, finished_run, arguments):
    before = sorted((path, path.stat().st_mtime_ns) for path in finished_run.rglob("*"))
    line = refused(rlhf, finished_run, *arguments)
    assert "--resume" in line and "--overwrite" in line
    assert before == sorted((path, path.stat().st_mtime_ns) for path in finished_run.rglob("*"))


def test_an_unknown_accelerator_is_answered_with_the_known(rlhf, tmp_path):
    line = refused(rlhf, tmp_path / "run", "--accelerator", "tpu9")
    assert "tpu9" in line and "cpu" in line
    assert not (tmp_path / "run").exists()
