"""A terminal shows what rlhf says, and of libraries nothing but errors; with --debug, all of it."""

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
from tests.helpers import llama, user_environment

Rlhf = Callable[..., subprocess.CompletedProcess[str]]

OURS = re.compile(
    r"rlhf \d+\.\d+\.\d+|(stages|recipe|model|data|accelerator|output) +\S.*|(sft|reward|ppo): .*|\w+: LoRA of rank .*"
    r"|(prompt|completion) +\S.*| {13}\S.*|"
)


def assert_ours(done: subprocess.CompletedProcess[str]) -> None:
    """Every line is one of ours; after the samples of PPO the closing table and its samples follow."""
    assert done.returncode == 0
    assert done.stderr == ""
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


def test_a_run_says_what_is_its_own(rlhf: Any, tmp_path: Path) -> None:
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
def test_a_run_with_other_parts_of_the_libraries_does_too(rlhf: Rlhf, tmp_path: Path, settings: list[str]) -> None:
    assert_ours(rlhf("--output", tmp_path / "run", *(part for setting in settings for part in ("--set", setting))))


@pytest.mark.slow
def test_ranks_do_too(rlhf: Rlhf, tmp_path: Path) -> None:
    assert_ours(rlhf("--output", tmp_path / "run", "--ranks", "2"))


def test_debug_shows_what_libraries_say(rlhf: Rlhf, tmp_path: Path) -> None:
    done = rlhf("sft", "--output", tmp_path / "run", "--set", "model.gradient_checkpointing=true", "--debug")
    assert "Writing model shards" in done.stderr


def test_chat_says_what_the_model_says(forks: Forks, model_folder: Path) -> None:
    done = forks.run("chat", str(model_folder), timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def reward_model(folder: Path) -> None:
    from transformers import LlamaForSequenceClassification

    config = llama(300).config
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(folder)


def without_a_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def other_shapes(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 64}))


def unknown_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "lama"}')


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (reward_model, "is a reward model"),
        (without_a_tokenizer, "holds no tokenizer"),
        (other_shapes, "its weights do not fit"),
        (unknown_type, "does not know the model type 'lama'"),
        (adapter, "this adapter names no base model"),
    ],
)
def test_chat_with_what_is_no_model_is_one_line(
    forks: Forks, model_folder: Path, tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    spoil(folder)
    done = forks.run("chat", str(folder), timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"rlhf: error: .*{said}.*; .*\n", done.stderr), done.stderr


def test_chat_with_an_unfinished_run_is_one_line(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    done = forks.run("chat", str(tmp_path), timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"rlhf: error: .*: has no finished ppo, dpo or sft stage; .*\n", done.stderr)


SPEAKING = """
import logging, sys, warnings
from rlhf.reporting import verbosity
verbosity.configure_logging(debug="--debug" in sys.argv)
warnings.warn("old", FutureWarning)
for name in ("rlhf.part", "accelerators.part", "library"):
    for level in (logging.DEBUG, logging.WARNING, logging.ERROR):
        logging.getLogger(name).log(level, f"{name} {logging.getLevelName(level)}")
"""


def test_our_warnings_are_notes_and_of_libraries_errors_are_left() -> None:
    assert python(SPEAKING).stderr.splitlines() == [
        "rlhf: note: rlhf.part WARNING",
        "rlhf: note: rlhf.part ERROR",
        "rlhf: note: accelerators.part WARNING",
        "rlhf: note: accelerators.part ERROR",
        "library ERROR",
    ]


def test_debug_shows_details_of_ours_and_warnings_of_libraries() -> None:
    said = python(SPEAKING, "--debug").stderr
    for line in ("rlhf: note: rlhf.part DEBUG", "FutureWarning: old", "library WARNING"):
        assert line in said


def test_warnings_that_a_user_asks_for_are_shown() -> None:
    assert "FutureWarning: old" in python(SPEAKING, PYTHONWARNINGS="default").stderr


def test_deepspeed_has_nothing_to_say_of_the_device_that_it_would_choose() -> None:
    """It does so while it is imported, on standard output."""
    done = python("from rlhf.reporting import verbosity; verbosity.configure_logging(debug=False); import deepspeed")
    assert (done.returncode, done.stdout) == (0, "")


LOUD = """
import os, sys
from rlhf.reporting import verbosity
if "--host" not in sys.argv:
    verbosity.configure_logging(debug="--debug" in sys.argv)
print("before")
with verbosity.suppress_stdout():
    print("printed")
    os.system("echo compiled")
    os.system("echo broken >&2")
print("after")
"""


def test_what_is_printed_unasked_is_not_heard() -> None:
    done = python(LOUD)
    assert (done.stdout, done.stderr) == ("before\nafter\n", "broken\n")


@pytest.mark.parametrize("who", ["--debug", "--host"])
def test_with_debug_and_in_a_program_of_somebody_elses_it_is(who: str) -> None:
    done = python(LOUD, who, PYTHONUNBUFFERED="1")
    assert (done.stdout, done.stderr) == ("before\nprinted\ncompiled\nafter\n", "broken\n")


def test_a_failure_where_nothing_is_heard_ends_the_silence() -> None:
    code = """
from rlhf.reporting import verbosity
verbosity.configure_logging(debug=False)
try:
    with verbosity.suppress_stdout():
        raise RuntimeError
except RuntimeError:
    print("after")
"""
    assert python(code).stdout == "after\n"


def test_silences_of_two_threads_last_until_the_later_one_ends() -> None:
    code = """
import os, threading
from rlhf.reporting import verbosity
verbosity.configure_logging(debug=False)
entered, left, open_files = threading.Event(), threading.Event(), len(os.listdir("/proc/self/fd"))
def first():
    with verbosity.suppress_stdout(), verbosity.suppress_stdout():
        entered.set()
        second_entered.wait(10)
    left.set()
second_entered = threading.Event()
thread = threading.Thread(target=first)
thread.start()
entered.wait(10)
with verbosity.suppress_stdout():
    second_entered.set()
    left.wait(10)
    print("unasked", flush=True)
thread.join()
print("after", len(os.listdir("/proc/self/fd")) - open_files)
"""
    assert python(code).stdout == "after 0\n"


def test_what_a_backend_and_deepspeed_print_while_they_are_opened_is_not_heard() -> None:
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

sys.stdout = cell = io.StringIO()  # as in a notebook: no file
found, ticks, done = state(), 0, threading.Event()

def tick():
    global ticks
    while not done.wait(0.005):
        os.write(1, b"tick %d\\n" % ticks)
        ticks += 1

thread = threading.Thread(target=tick)
thread.start()
try:
    run.run(load_config(Path(sys.argv[1]), [f"output={sys.argv[2]}"]), stages=("sft",))
finally:
    done.set()
    thread.join()
assert state() == found
assert "sft: training: 3 steps" in cell.getvalue()
os.write(1, b"ticks: %d\\n" % ticks)
"""


def test_a_run_in_a_program_of_somebody_elses_leaves_its_output_and_its_logging_alone(
    rlhf: Any, tmp_path: Path
) -> None:
    done = python(HOST, str(rlhf.recipe), str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-3000:]
    *_, last = done.stdout.splitlines()
    # While backends are looked for, all that is printed goes to standard error.
    heard = sorted(int(number) for number in re.findall(r"tick (\d+)\n", done.stdout + done.stderr))
    assert last == f"ticks: {len(heard)}" and heard == list(range(len(heard))) and len(heard) > 100
