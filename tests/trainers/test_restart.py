"""A run that is killed, interrupted or diverges leaves its last good checkpoint, and continues from it exactly."""

import contextlib
import fcntl
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from rlhf.checkpoint.training_state import Checkpoint
from rlhf.config.schema import Config
from rlhf.engine import distributed
from rlhf.runs.stage_directory import StageDirectory, parse_step
from rlhf.trainers.context import StageContext
from rlhf.trainers.loop import _restore_generators
from rlhf.utils.manifest import write_manifest
from tests.helpers import assert_same_weights, kill_at, models_of, sets, start, user_environment, wait_for


def ppo_arguments(finished_run, output, steps=6, checkpoint_every=1):
    keys = (*models_of(finished_run), f"ppo.steps={steps}", f"ppo.checkpoint_every={checkpoint_every}")
    return ["ppo", "--output", output, *sets(*keys)]


@pytest.fixture(scope="module")
def killed(rlhf, finished_run, tmp_path_factory):
    """The folder of a PPO of six steps that was killed when it had saved the second."""
    output = tmp_path_factory.mktemp("killed") / "run"
    kill_at(output / "ppo" / "checkpoints" / "step-00000002", rlhf, *ppo_arguments(finished_run, output))
    assert not (output / "ppo" / "stage.json").exists()
    return output


def test_killed_run_resumes_to_the_same_weights(rlhf, finished_run, killed, tmp_path):
    whole, resumed = tmp_path / "whole", Path(shutil.copytree(killed, tmp_path / "killed"))
    rlhf(*ppo_arguments(finished_run, whole, checkpoint_every=0))
    output = rlhf(*ppo_arguments(finished_run, resumed), "--resume").stdout
    assert "resumed after step" in output
    log = (resumed / "ppo" / "console.log").read_text()
    assert {line for line in output.splitlines() if line.startswith("ppo: ")} <= set(log.splitlines())
    assert log.count(" rlhf ppo --output") == 2 and log.index("resumed after step") > log.rindex(" rlhf ppo --output")
    assert_same_weights(resumed / "ppo" / "model", whole / "ppo" / "model")
    for folder in (resumed, whole):
        lines = (folder / "ppo" / "metrics.jsonl").read_text().splitlines()
        assert sum('"policy_loss"' in line for line in lines) == 6


def test_interrupted_ranks_finish_their_step_save_and_say_so(rlhf, finished_run, tmp_path):
    output = tmp_path / "run"
    arguments = ppo_arguments(finished_run, output, steps=500, checkpoint_every=0)
    process = rlhf.forks.start("-m", "rlhf", *map(str, [*arguments, "--config", rlhf.recipe, "--ranks", 2]))
    wait_for(output / "ppo" / "evaluations.json", process)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # the launcher alone: ranks have sessions of their own
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    command = f"to continue: rlhf ppo --output {output} --resume --ranks 2"
    assert errors.splitlines()[-1].endswith(command)
    assert (output / "ppo" / "console.log").read_text().splitlines()[-1] == errors.splitlines()[-1]
    (checkpoint,) = (output / "ppo" / "checkpoints").iterdir()
    assert len(list(checkpoint.glob("random-rank*.pt"))) == 2
    assert sorted(path.name for path in output.iterdir()) == ["ppo", "recipe.yaml", "report.html", "run.json"]


def test_stop_file_makes_ranks_save_and_end(rlhf, finished_run, tmp_path):
    """One that lies there when a run starts is of an earlier run."""
    output = tmp_path / "run"
    arguments = ppo_arguments(finished_run, output, steps=500)
    process = rlhf.forks.start("-m", "rlhf", *map(str, [*arguments, "--config", rlhf.recipe, "--ranks", 2]))
    wait_for(output / "ppo" / "checkpoints" / "step-00000001", process)
    (output / "STOP").touch()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert errors.splitlines()[-1].endswith(f"to continue: rlhf ppo --output {output} --resume --ranks 2")
    assert not (output / "STOP").exists()
    steps = parse_step(StageDirectory(output / "ppo", "ppo").latest_checkpoint)
    (output / "STOP").touch()
    done = rlhf("ppo", "--output", output, "--resume", "--set", f"ppo.steps={steps + 1}", "--ranks", 2, recipe=None)
    assert f"note: {output / 'STOP'}: removed; it was there before this run" in done.stdout
    assert not (output / "STOP").exists()


@pytest.mark.slow
def test_closed_terminal_leaves_a_checkpoint_to_resume(rlhf, finished_run, tmp_path):
    """The kernel sends SIGHUP, and what is written to the terminal from then on is an error."""
    output = tmp_path / "run"
    terminal, other = os.openpty()
    arguments = ppo_arguments(finished_run, output, steps=500, checkpoint_every=0)
    process = start(rlhf, *arguments, stdin=other, stdout=other, stderr=other, preexec_fn=on_terminal)
    os.close(other)
    closing = threading.Event()
    reader = threading.Thread(target=drain, args=(terminal, closing))  # or the process would wait for a reader
    reader.start()
    wait_for(output / "ppo" / "evaluations.json", process)
    time.sleep(1)
    closing.set()
    reader.join()
    os.close(terminal)
    assert process.wait(timeout=120) == 130
    (checkpoint,) = (output / "ppo" / "checkpoints").iterdir()
    steps = int(checkpoint.name.removeprefix("step-"))
    done = rlhf("ppo", "--output", output, "--resume", "--set", f"ppo.steps={steps + 1}", recipe=None)
    assert f"ppo: resumed after step {steps}" in done.stdout


def test_output_to_a_closed_terminal_is_no_error():
    """Lines printed to it are lost; the process continues and ends as usual."""
    script = """
import os, signal, sys
terminal, other = os.openpty()
os.dup2(other, 1), os.dup2(other, 2), os.close(other)
from rlhf.utils import signals
from rlhf.reporting.console import console
from rlhf.reporting.progress import progress
with signals.tolerate_closed_terminal():
    console.print("seen")
    assert b"seen" in os.read(terminal, 1000)
    os.close(terminal)
    console.print("lost")
    with progress(3, "steps") as bar:
        bar.advance(3)
    print("lost", file=sys.stderr, flush=True)
os._exit(7)
"""
    done = subprocess.run([sys.executable, "-c", script], env=user_environment(), capture_output=True)
    assert done.returncode == 7, done


def on_terminal():
    """In a process about to be started: standard input is its terminal, of which it hears also under `nohup`."""
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def drain(terminal, closing):
    while not closing.is_set():
        if select.select([terminal], [], [], 0.05)[0]:
            with suppress(OSError):  # nobody is there yet
                os.read(terminal, 10_000)


def test_nonfinite_loss_stops_at_the_last_good_checkpoint(rlhf, tmp_path):
    output = tmp_path / "run"
    rising = ["optimizer.learning_rate=1e30", "optimizer.warmup=0.9", "max_steps=8", "checkpoint_every=1"]
    done = rlhf("sft", "--output", output, *sets(*(f"sft.{key}" for key in rising)), check=False)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert re.search(
        r"sft: the gradients of the sft model are not finite at step (\d) \(batch \d\), so its update", line
    )
    assert (output / "sft" / "not-finite").is_dir() and not (output / "sft" / "model").exists()
    checkpoints = list((output / "sft" / "checkpoints").glob("step-*"))
    assert len(checkpoints) == 1 and str(checkpoints[0]) in line
    assert (output / "sft" / "console.log").read_text().splitlines()[-1] == line


@pytest.mark.parametrize("is_malicious", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_resume_refuses_damage_and_code_in_a_checkpoint(rlhf, killed, tmp_path, is_malicious):
    """Every file; the line has the command that leads to the checkpoint before."""
    output, ran = Path(shutil.copytree(killed, tmp_path / "run")), tmp_path / "ran"
    resume = ["ppo", "--output", output, "--resume"]
    *_, before, newest = StageDirectory(output / "ppo", "ppo").all_checkpoints
    files = sorted(path for path in newest.rglob("*.pt" if is_malicious else "*") if path.is_file())
    assert len(files) == (2 if is_malicious else 6)
    for file in files:
        intact = file.read_bytes()
        if is_malicious:
            torch.save({"module": Malicious(ran)}, file)
            write_manifest(newest)
        else:
            middle = len(intact) // 2
            file.write_bytes(intact[:middle] + bytes([intact[middle] ^ 1]) + intact[middle + 1 :])
        done = rlhf(*resume, recipe=None, check=False)
        (line,) = done.stderr.strip().splitlines()
        reason = "a file holds objects other than" if is_malicious else f"{file.relative_to(newest)} "
        assert done.returncode == 2 and line.startswith(f"rlhf: error: {newest}: cannot be read ({reason}")
        assert not ran.exists() and line.endswith(
            f"; take the one before: rlhf ppo --output {output} --resume={before.name}"
        )
        file.write_bytes(intact)
    newest.joinpath("state.pt").write_bytes(b"damaged")
    done = rlhf(*shlex.split(line.rpartition("before: rlhf ")[2]), recipe=None)
    assert f"ppo: resumes from {before.name}; {newest.name} set aside (.newer)" in done.stdout
    assert f"resumed after step {int(before.name[5:])}" in done.stdout


class Malicious:
    """Pickled code, which creates a file when it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_refused_resume_changes_nothing(rlhf, killed):
    log = (killed / "ppo" / "console.log").read_bytes()
    refused = rlhf("ppo", "--output", killed, "--resume", "--set", "ppo.steps=1", recipe=None, check=False)
    assert refused.returncode == 2 and "ppo: training" not in refused.stdout
    message = r"step-\d+: \d+ steps of ppo are done, but 1 are requested; request \d+ or more"
    assert re.search(message, refused.stderr)
    assert json.loads((killed / "run.json").read_text())["config"]["ppo"]["steps"] == 6
    assert (killed / "ppo" / "console.log").read_bytes() == log


@pytest.mark.slow
def test_a_second_run_in_the_same_process_is_like_the_first(rlhf, tmp_path):
    """The second one in a thread, with another wish for the accelerator."""
    script = f"""
import os, threading
from pathlib import Path
from rlhf.config.schema import load_config
from rlhf.trainers.run import run as run_stages

def run(name, *overrides, **wishes):
    keys = ["sft.max_steps=2", "accelerator=cpu", *overrides]
    config = load_config(Path({str(rlhf.recipe)!r}), [*keys, f"output={tmp_path!s}/{{name}}"])
    run_stages(config, stages=("sft",), **wishes)

run("first", accelerator="auto")
assert "RLHF_ACCELERATOR" not in os.environ
thread = threading.Thread(target=run, args=("second", "accelerator=cpu"))
thread.start()
thread.join()
"""
    done = subprocess.run([sys.executable, "-c", script], env=user_environment(), capture_output=True, text=True)
    assert (tmp_path / "second" / "sft" / "stage.json").exists(), done.stderr
    assert_same_weights(tmp_path / "first" / "sft" / "model", tmp_path / "second" / "sft" / "model")


class Elsewhere:
    """A backend whose generators have other keys, or another format, than those that a checkpoint holds."""

    def __init__(self, error=None):
        self.error, self.seeds = error, []

    def rng_state(self):
        return {"python": 0, "here": 1}

    def set_rng_state(self, state):
        if self.error:
            raise self.error

    def seed(self, number):
        self.seeds.append(number)


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({"python": 0, "there": 1}, KeyError("here")),
        ({"python": 0, "here": 1, "there": 2}, None),
        ({"python": 0, "here": 1}, RuntimeError("RNG state is wrong size")),
    ],
)
def test_other_accelerators_generators_are_seeded(state, error):
    accelerator, world = Elsewhere(error), distributed.World(0, 1)
    context = StageContext(Config(seed=3), accelerator, None, None, world, None, StageDirectory(Path("x"), "ppo"), None)
    for step in (5, 6):
        assert (
            _restore_generators(context, Checkpoint(step, {}, state, 1)) == "another accelerator wrote the checkpoint"
        )
    assert len(set(accelerator.seeds)) == 2, "a later step does not draw what an earlier one drew"


@pytest.mark.parametrize(("ranks", "reason"), [(1, ""), (4, "4 ranks wrote the checkpoint, not 1")])
def test_generators_of_as_many_ranks_continue(ranks, reason):
    accelerator, world = Elsewhere(), distributed.World(0, 1)
    context = StageContext(Config(), accelerator, None, None, world, None, StageDirectory(Path("x"), "ppo"), None)
    assert _restore_generators(context, Checkpoint(5, {}, {"python": 0, "here": 1}, ranks)) == reason
    assert bool(accelerator.seeds) == bool(reason)
