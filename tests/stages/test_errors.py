"""What a user can get wrong is one line and exit code 2, and leaves nothing half-written."""

import json

import pytest


def refused(rlhf, output, *arguments):
    """The line that a refused command prints."""
    found = rlhf(*arguments, "--output", output, check=False)
    assert found.returncode == 2, found.stdout + found.stderr
    (line,) = found.stderr.strip().splitlines()
    assert line.startswith("rlhf: error: ")
    return line


def settings(**keys):
    return [part for key, value in keys.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]


def test_missing_columns_are_answered_with_those_found(rlhf, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "a", "label": 1}) + "\n")
    line = refused(rlhf, tmp_path / "run", "sft", *settings(data__datasets=f"[{{path: {path}}}]"))
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


def test_a_reward_model_with_another_vocabulary_is_refused(rlhf, finished_run, tmp_path):
    from tests.helpers import build_tokenizer

    other = tmp_path / "reward"
    import shutil

    shutil.copytree(finished_run / "reward" / "model", other)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(other)
    models = settings(ppo__actor=finished_run / "sft" / "model", ppo__reward_model=other)
    assert "vocabulary" in refused(rlhf, tmp_path / "run", "ppo", *models)


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


def test_an_error_on_every_rank_is_printed_once(rlhf, tmp_path):
    line = refused(rlhf, tmp_path / "run", "sft", "--ranks", 2, *settings(model__path=tmp_path / "absent"))
    assert "absent" in line
