"""A run that is killed, interrupted or diverges leaves its last good checkpoint, and continues from it exactly."""

import os
import signal
import subprocess
import sys
import time

from tests.helpers import assert_same_weights, user_environment


def start(rlhf, *arguments):
    command = [sys.executable, "-m", "rlhf", *map(str, arguments), "--config", str(rlhf.recipe)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, env=user_environment(), start_new_session=True)


def wait_for(path, process, seconds=240):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def ppo_arguments(finished_run, output, steps=6):
    keys = {
        "ppo.actor": finished_run / "sft" / "model",
        "ppo.reward_model": finished_run / "reward" / "model",
        "ppo.steps": steps,
        "ppo.checkpoint_every": 1,
    }
    return ["ppo", "--output", output, *(part for key, value in keys.items() for part in ("--set", f"{key}={value}"))]


def test_a_killed_run_continues_to_the_weights_of_one_that_was_not(rlhf, finished_run, tmp_path):
    rlhf(*ppo_arguments(finished_run, tmp_path / "whole"))
    process = start(rlhf, *ppo_arguments(finished_run, tmp_path / "killed"))
    wait_for(tmp_path / "killed" / "ppo" / "checkpoints" / "step-00000002", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "killed" / "ppo" / "stage.json").exists()
    found = rlhf(*ppo_arguments(finished_run, tmp_path / "killed"), "--resume")
    assert "resumed after step" in found.stdout
    assert_same_weights(tmp_path / "killed" / "ppo" / "model", tmp_path / "whole" / "ppo" / "model")
    for folder in ("killed", "whole"):
        lines = (tmp_path / folder / "ppo" / "metrics.jsonl").read_text().splitlines()
        assert sum('"policy_loss"' in line for line in lines) == 6


def test_an_interrupted_run_finishes_its_step_saves_and_says_so(rlhf, finished_run, tmp_path):
    output = tmp_path / "run"
    arguments = ppo_arguments(finished_run, output, steps=500)
    process = start(rlhf, *arguments, "--set", "ppo.checkpoint_every=0")
    wait_for(output / "ppo" / "before.json", process)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "--resume" in errors.splitlines()[-1]
    assert list((output / "ppo" / "checkpoints").glob("step-*"))


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(rlhf, tmp_path):
    output = tmp_path / "run"
    rising = ["optimizer.learning_rate=1e30", "optimizer.warmup=0.9", "max_steps=8", "checkpoint_every=1"]
    settings = [part for key in rising for part in ("--set", f"sft.{key}")]
    found = rlhf("sft", "--output", output, *settings, check=False)
    assert found.returncode == 2
    (line,) = found.stderr.strip().splitlines()
    assert "sft: loss became" in line or "sft: grad_norm became" in line
    assert "step" in line and "batch" in line and not (output / "sft" / "model").exists()
    kept = list((output / "sft" / "checkpoints").glob("step-*"))
    assert len(kept) == 1 and str(kept[0]) in line


def test_a_checkpoint_of_another_number_of_ranks_is_refused(rlhf, finished_run, tmp_path):
    output = tmp_path / "run"
    process = start(rlhf, *ppo_arguments(finished_run, output, steps=500))
    wait_for(output / "ppo" / "checkpoints" / "step-00000001", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    found = rlhf(*ppo_arguments(finished_run, output, steps=500), "--resume", "--ranks", 2, check=False)
    assert found.returncode == 2 and "resume with --ranks 1" in found.stderr
