"""A terminal shows our messages and only the errors of libraries; with --debug, everything."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Forks
from tests.helpers import llama, sets, user_environment

Rlhf = Callable[..., subprocess.CompletedProcess[str]]

OURS = re.compile(
    r"rlhf \d+\.\d+\.\d+|(stages|recipe|model|data|accelerator|output) +\S.*|(sft|reward|ppo): .*|\w+: LoRA of rank .*"
    r"|(prompt|completion) +\S.*| {13}\S.*|"
)


def assert_ours(done: subprocess.CompletedProcess[str]) -> None:
    """Every line is one of ours; after the samples of PPO the closing table and its samples follow."""
    assert done.returncode == 0
    assert re.fullmatch(r"(rlhf: note: .* not computed in C: a size is no multiple of \d+\n)?", done.stderr)
    before, table = re.split(r"\n(?= +before +after\n)", done.stdout)
    assert [line for line in before.splitlines() if not OURS.fullmatch(line)] == []
    assert "before" in table.splitlines()[0]
    assert [line.split(":")[0] for line in before.splitlines() if ": plan: peak about" in line] == [
        "sft",
        "reward",
        "ppo",
    ]


def python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = user_environment() | {"PYTHONWARNINGS": ""} | variables
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_run_prints_only_our_lines(rlhf: Any, tmp_path: Path) -> None:
    """In a process that has imported nothing yet, as every user's."""
    settings = ["--config", rlhf.recipe, "--output", tmp_path / "run", "--set", "model.gradient_checkpointing=true"]
    done = subprocess.run(
        [sys.executable, "-m", "rlhf", *settings],
        capture_output=True,
        text=True,
        env=user_environment(),
        stdin=subprocess.DEVNULL,
    )
    assert_ours(done)


@pytest.mark.parametrize("settings", [["lora.rank=2", "model.gradient_checkpointing=true"], ["engine.zero_stage=3"]])
def test_run_with_lora_or_zero3_prints_only_our_lines(rlhf: Rlhf, tmp_path: Path, settings: list[str]) -> None:
    one_step = ("sft.max_steps=1", "reward.max_steps=1", "ppo.steps=1")
    assert_ours(rlhf("--output", tmp_path / "run", *sets(*settings, *one_step)))


@pytest.mark.slow
def test_ranks_print_only_our_lines(rlhf: Rlhf, tmp_path: Path) -> None:
    assert_ours(rlhf("--output", tmp_path / "run", "--ranks", "2"))


def test_debug_shows_messages_of_libraries(rlhf: Rlhf, tmp_path: Path) -> None:
    done = rlhf("sft", "--output", tmp_path / "run", "--set", "model.gradient_checkpointing=true", "--debug")
    assert "Writing model shards" in done.stderr


def test_chat_prints_only_replies(forks: Forks, model_folder: Path) -> None:
    done = forks.run("chat", str(model_folder), timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def reward_model(folder: Path) -> None:
    from transformers import LlamaForSequenceClassification

    config = llama(300).config
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(folder)


def other_shapes(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 64}))


def unknown_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "lama"}')


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (reward_model, "is a reward model"),
        (other_shapes, "its weights do not fit"),
        (unknown_type, "does not know the model type 'lama'"),
    ],
)
def test_chat_with_a_wrong_model_is_one_line(
    forks: Forks, model_folder: Path, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    spoil(folder)
    done = forks.run("chat", str(folder), timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"rlhf: error: .*{message}.*; .*\n", done.stderr), done.stderr


SPEAKING = """
import logging, sys, warnings
from rlhf.reporting import verbosity
verbosity.configure_logging(debug="--debug" in sys.argv)
warnings.warn("old", FutureWarning)
for name in ("rlhf.part", "accelerators.part", "library"):
    for level in (logging.DEBUG, logging.WARNING, logging.ERROR):
        logging.getLogger(name).log(level, f"{name} {logging.getLevelName(level)}")
"""


def test_our_warnings_are_notes_and_libraries_log_errors() -> None:
    """With --debug everything is shown, and with PYTHONWARNINGS the warnings that the user asks for."""
    assert python(SPEAKING).stderr.splitlines() == [
        "rlhf: note: rlhf.part WARNING",
        "rlhf: note: rlhf.part ERROR",
        "rlhf: note: accelerators.part WARNING",
        "rlhf: note: accelerators.part ERROR",
        "library ERROR",
    ]
    debug = python(SPEAKING, "--debug").stderr
    for line in ("rlhf: note: rlhf.part DEBUG", "FutureWarning: old", "library WARNING"):
        assert line in debug
    assert "FutureWarning: old" in python(SPEAKING, PYTHONWARNINGS="default").stderr


LOUD = """
import os, sys
from rlhf.reporting import verbosity
if "--host" not in sys.argv:
    verbosity.configure_logging(debug="--debug" in sys.argv)
print("before")
try:
    with verbosity.suppress_stdout():
        print("printed")
        os.system("echo compiled")
        os.system("echo broken >&2")
        raise RuntimeError
except RuntimeError:
    print("after")
"""


@pytest.mark.parametrize("option", ["", "--debug", "--host"])
def test_suppressed_stdout_is_shown_to_hosts_and_with_debug(option: str) -> None:
    done = python(LOUD, option, PYTHONUNBUFFERED="1")
    shown = "printed\ncompiled\n" if option else ""
    assert (done.stdout, done.stderr) == (f"before\n{shown}after\n", "broken\n")


def test_stdout_stays_suppressed_until_the_last_thread_ends() -> None:
    code = """
import os, threading
from rlhf.reporting import verbosity
verbosity.configure_logging(debug=False)
entered, finished, open_files = threading.Event(), threading.Event(), len(os.listdir("/proc/self/fd"))
def first():
    with verbosity.suppress_stdout(), verbosity.suppress_stdout():
        entered.set()
        second_entered.wait(10)
    finished.set()
second_entered = threading.Event()
thread = threading.Thread(target=first)
thread.start()
entered.wait(10)
with verbosity.suppress_stdout():
    second_entered.set()
    finished.wait(10)
    print("unasked", flush=True)
thread.join()
print("after", len(os.listdir("/proc/self/fd")) - open_files)
"""
    assert python(code).stdout == "after 0\n"


def test_output_of_backend_and_deepspeed_start_is_suppressed() -> None:
    """In a new interpreter, where DeepSpeed is imported and probes its operators for the first time."""
    code = """
import os
from rlhf.reporting import verbosity
verbosity.configure_logging(debug=False)
import accelerators
from accelerators.backends.cpu.backend import CPU
from rlhf.engine import distributed
prepare = CPU.prepare_deepspeed
def loud(self):
    os.system("echo opened")
    view = prepare(self)
    import deepspeed
    start = deepspeed.init_distributed
    deepspeed.init_distributed = lambda **options: (print("built successfully"), start(**options))
    return view
CPU.prepare_deepspeed = loud
with distributed.start_process_group(accelerators.select("cpu", environ={})):
    print("ready")
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ready\n"


HOST = """
import io, logging, os, sys, threading, time
from pathlib import Path
import datasets, deepspeed, huggingface_hub, transformers
from huggingface_hub import constants
from rlhf.trainers import run
from rlhf.config.schema import load_config

loggers = [logging.getLogger(name) for name in (
    None, "transformers", "huggingface_hub", "datasets", "torch", "torch.distributed", "DeepSpeed", "rlhf"
)]
for logger in loggers[1:-2]:
    logger.setLevel(logging.INFO)

def state():
    return (
        [(logger.level, logger.filters[:], logger.handlers[:], logger.disabled) for logger in loggers],
        transformers.utils.logging.is_progress_bar_enabled(),
        huggingface_hub.utils.are_progress_bars_disabled(),
        datasets.utils.are_progress_bars_disabled(),
        constants.HF_HUB_OFFLINE,
        dict(os.environ),
        sys.stdout,
    )

os.environ.pop("DS_ACCELERATOR", None)  # of the process that this one is forked from
sys.stdout = cell = io.StringIO()  # as in a notebook: no file
before, ticks, done = state(), 0, threading.Event()

def tick():
    global ticks
    while not done.wait(0.002):
        os.write(1, b"tick %d\\n" % ticks)
        ticks += 1

thread = threading.Thread(target=tick)
thread.start()
try:
    run.run(load_config(Path(sys.argv[1]), [f"output={sys.argv[2]}"]), stages=("sft",))
finally:
    done.set()
    thread.join()
assert state() == before
assert "sft: training: 3 steps" in cell.getvalue()
os.write(1, b"ticks: %d\\n" % ticks)
"""


def test_run_leaves_output_and_logging_of_a_host_program_alone(rlhf: Any, tmp_path: Path) -> None:
    done = rlhf.forks.python("-c", HOST, str(rlhf.recipe), str(tmp_path / "run"), timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    *_, last = done.stdout.splitlines()
    # While backends are looked for, all that is printed goes to standard error.
    heard = sorted(int(number) for number in re.findall(r"tick (\d+)\n", done.stdout + done.stderr))
    assert last == f"ticks: {len(heard)}" and heard == list(range(len(heard))) and len(heard) > 100
