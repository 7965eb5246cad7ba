"""Signals while a command starts, and when it is done."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import Forks
from tests.helpers import user_environment

# The process forks at every STEP-th import after the first; the child gets the signal there and continues. It does not
# fork once torch.distributed has threads, because a child would wait for them when it ends. So the process sends the
# last signal to itself.
SCRIPT = """
import json, os, signal, sys, threading
number, step, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
count, is_child, outcomes = 0, False, []

def at_import(event, arguments):
    global count, is_child
    if event != "import" or is_child or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
        return
    count += 1
    has_threads = len(os.listdir("/proc/self/task")) > 1
    if arguments[0] == "rlhf.trainers.pipeline":
        json.dump(outcomes, open(folder + "/outcomes", "w"))
        is_child = True
        signal.alarm(60)
        os.kill(os.getpid(), number)
    if count % step or has_threads:
        return
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        outcomes.append([arguments[0], code, open(folder + "/stderr").read(), os.listdir(folder + "/temp")])
        return
    is_child = True
    os.dup2(os.open(folder + "/stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    signal.alarm(60)  # ends a child that hangs
    os.kill(os.getpid(), number)

sys.addaudithook(at_import)
sys.argv[1:] = sys.argv[4:]
from rlhf.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "step"), [("SIGTERM", 500), ("SIGINT", 100)])
def test_signal_during_any_import_ends_the_start_in_one_line(
    recipe: dict[str, object], tmp_path: Path, name: str, step: int
) -> None:
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    (tmp_path / "temp").mkdir()
    command = [sys.executable, "-c", SCRIPT, str(int(signal.Signals[name])), str(step), str(tmp_path)]
    command += ["sft", "--config", str(tmp_path / "recipe.yaml"), "--output", str(tmp_path / "run")]
    environment = user_environment() | {"TMPDIR": str(tmp_path / "temp")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    outcomes = json.loads((tmp_path / "outcomes").read_text())
    outcomes.append(("rlhf.trainers.pipeline", done.returncode, done.stderr, os.listdir(tmp_path / "temp")))
    bad = [
        (module, code, errors, temporary)
        for module, code, errors, temporary in outcomes
        if code != 130 or not errors.startswith("rlhf: interrupted; ") or errors.count("\n") != 1 or temporary
    ]
    assert bad == []
    assert len(outcomes) >= 4
    assert not (tmp_path / "run").exists()


def test_signal_while_the_interpreter_ends_does_not_change_the_exit_code() -> None:
    """Modules are taken apart after Python has restored the default handlers."""
    script = """
import os, signal, sys
class Last:
    def __del__(self, kill=os.kill, process=os.getpid()):
        kill(process, signal.SIGTERM)
last = Last()
sys.argv = ["rlhf", "--version"]
from rlhf.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_signal_before_a_command_is_parsed_ends_it(forks: Forks) -> None:
    """The import of the commands is where it may arrive."""
    script = """
import os, signal, sys
from rlhf.reporting import verbosity
verbosity.configure_logging = lambda **options: os.kill(os.getpid(), signal.SIGUSR1)
sys.argv = ["rlhf", "--version"]
from rlhf.cli import main
main()
"""
    done = forks.python("-c", script, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "rlhf: interrupted; nothing was started\n")
