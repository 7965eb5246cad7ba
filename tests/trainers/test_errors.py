"""A user's mistake is one line and exit code 2, and leaves nothing half-written."""

import json
import shutil

import pytest

from tests.helpers import build_tokenizer, sets


def refused(rlhf, output, *arguments):
    """The line that a refused command prints."""
    done = rlhf(*arguments, "--output", output, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("rlhf: error: ")
    return line


def settings(**keys):
    return sets(*(f"{key.replace('__', '.')}={value}" for key, value in keys.items()))


def contents(folder):
    """Every file with its time and its bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_error_of_all_ranks_is_printed_once_and_leaves_nothing(rlhf, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "a", "label": 1}) + "\n")
    line = refused(rlhf, tmp_path / "run", "sft", "--ranks", 2, *settings(data__datasets=f"[{{path: {path}}}]"))
    assert str(path) in line and "label, text" in line
    assert not (tmp_path / "run").exists()


def test_failing_stage_leaves_the_one_it_was_to_replace(rlhf, finished_run, tmp_path):
    """A reward model with another vocabulary is refused after the stage has started."""
    shutil.copytree(finished_run, tmp_path / "run")
    before = contents(tmp_path / "run")
    other = tmp_path / "reward"
    shutil.copytree(finished_run / "reward" / "model", other)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(other)
    (other / "manifest.json").unlink()
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
