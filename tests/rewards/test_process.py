"""Reward functions in a separate process: their arguments, and the one line about each way to fail."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import RewardFunctionConfig, build_config
from rlhf.errors import RewardError
from rlhf.rewards.process import RewardProcess, Sample, check_reward_functions

ROOT = Path(__file__).parents[2]
FUNCTIONS = '''
import asyncio, ctypes, importlib, math, os, re, stat, subprocess, sys, time

import neighbour

calls = []

def counted(prompt, completion, row):
    """How often it was called, and what it was called with."""
    calls.append((prompt, completion, row))
    return len(calls) + len(completion) / 100 + row.get("bonus", 0)

def pid(prompt, completion, row): return os.getpid()
def whole(prompt, completion, row): return neighbour.ONE
def true(prompt, completion, row): return completion == "right"
def torch_is_loaded(prompt, completion, row): return "torch" in sys.modules
def with_default(prompt, completion, row, scale=3): return scale

def noisy(prompt, completion, row):
    print("from Python")
    os.system("echo from a shell")
    return 1.0

def raises(prompt, completion, row):
    return helper(row)

def helper(row):
    return row["answer"]  # this line

def in_a_library(prompt, completion, row):
    return re.compile("(")  # this one

def endless(prompt, completion, row):
    while True:
        pass

def endless_expression(prompt, completion, row):  # which lets no thread run
    return bool(re.match("(a+)+$", "a" * 64 + "b"))

def leaves(prompt, completion, row): os._exit(7)
def leaves_with_a_fork(prompt, completion, row): os._exit(7) if os.fork() else time.sleep(1000)
def exits(prompt, completion, row): sys.exit(3)

def detaches(prompt, completion, row):
    """A child in another session, which holds the connection open."""
    if child := os.fork():
        return child
    os.setsid()
    time.sleep(1000)

def writes(prompt, completion, row):
    """To each socket, as a message of the connection."""
    message = bytes.fromhex(row["message"])
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(descriptor, len(message).to_bytes(4, "big") + message)
        except OSError:
            pass
    time.sleep(100)

def knows_the_secret(prompt, completion, row): return float("RLHF_SECRET" in os.environ)
def imports_colorsys(prompt, completion, row): return float(importlib.import_module("colorsys").ONE_THIRD > 0)
def closes(prompt, completion, row): os.closerange(3, 100); time.sleep(100)
def crashes(prompt, completion, row): ctypes.string_at(0)
def killed(prompt, completion, row): os.kill(os.getpid(), 9)
def no_number(prompt, completion, row): return math.nan
def too_large(prompt, completion, row): return math.inf
def text(prompt, completion, row): return "1.0"
def nothing(prompt, completion, row): pass

def second_fails(prompt, completion, row):
    return 1 / (completion != "b")

def two(prompt, completion): return 1.0
async def later(prompt, completion, row): return 1.0
number = 3.0

def starts_another(prompt, completion, row):
    sleeper = subprocess.Popen(["sleep", "1000"])
    with open(row["pids"], "w") as file:
        print(os.getpid(), sleeper.pid, file=file)
    while True:
        pass
'''
SAMPLES = [Sample("what is it?", "an answer", {"source": "rows.jsonl:3"}), Sample("and this?", "b", {})]
LARGE = [Sample(f"{number:01000}", "y", {}) for number in range(2000)]  # pickle stores equal objects once
SHOWN = "for the prompt 'what is it?' with the completion 'an answer' (rows.jsonl:3)"
WHERE = f"{SHOWN}; fix the function, then repeat this command, with --resume if the run has completed a step"


@pytest.mark.parametrize(
    ("code", "known"),
    [
        ("def says(prompt, completion, row): return 1.0", False),
        ("def wanted(prompt, completion, row): return 1.0", True),
        ("wanted = lambda prompt, completion, row: 1.0", True),
        ("from other import function as wanted", True),
        ("from other import *", True),
        ("globals()['wanted'] = print", True),
    ],
)
def test_name_that_a_file_lacks_is_an_error_without_running_it(tmp_path: Path, code: str, known: bool) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{code}\nraise SystemExit('was run')\n")
    config = build_config({"ppo": {"reward_functions": [f"{file}:wanted"]}})
    if known:
        check_reward_functions(config, 1, run_code=False)
        return
    with pytest.raises(RewardError, match=r"mine\.py has no wanted; check the name"):
        check_reward_functions(config, 1, run_code=False)


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("ONE = 1\n")
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def start(functions: Path) -> Iterator[Callable[..., RewardProcess]]:
    processes: list[RewardProcess] = []

    def start(*names: str, file: object = functions, timeout: float = 20.0) -> RewardProcess:
        configs = [RewardFunctionConfig(function=f"{file}:{name}") for name in names]
        processes.append(RewardProcess(configs, timeout))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


def is_alive(pid: int) -> bool:
    """Return True if a process runs; one that nobody has waited for has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(RewardError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_functions_score_samples_in_order_and_keep_state(start) -> None:
    process = start("counted", "whole")
    samples = [Sample("p", "12345", {}), Sample("p", "1", {"bonus": 10})]
    assert process([]) == [[], []]
    assert process(samples) == [[1.05, 12.01], [1.0, 1.0]]
    assert process(samples[:1]) == [[3.05], [1.0]]


def test_functions_run_in_another_process_without_torch(start) -> None:
    process = start("pid", "true", "torch_is_loaded", "with_default")
    pids, *values = process([Sample("p", "right", {}), Sample("p", "no", {})])
    assert pids[0] != os.getpid() and values == [[1.0, 0.0], [0.0, 0.0], [3.0, 3.0]]


def test_batch_may_be_larger_than_a_pipe(start) -> None:
    samples = [Sample("x" * 1000, "y" * number, {"more": "z" * 500}) for number in range(2000)]
    (values,) = start("counted")(samples)
    assert values == [pytest.approx(number + 1 + number / 100) for number in range(2000)]


def test_module_is_imported_from_the_working_directory(start, functions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(functions.parent)
    assert start("whole", file="mine")(SAMPLES) == [[1.0, 1.0]]


def test_output_of_functions_goes_to_standard_error(start, capfd: pytest.CaptureFixture[str]) -> None:
    assert start("noisy")(SAMPLES) == [[1.0, 1.0]]
    out, err = capfd.readouterr()
    assert out == "" and err.count("from Python") == err.count("from a shell") == 2


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("raises", "KeyError: 'answer' at {file}:{this line}"),
        ("in_a_library", "missing ), unterminated subpattern at position 0 at {file}:{this one}"),
        ("leaves", "ended its process with exit code 7"),
        ("leaves_with_a_fork", "ended its process with exit code 7"),
        ("closes", "closed the connection of its process to the run"),
        ("exits", "SystemExit: 3 at {file}:"),
        ("crashes", "its process was killed by SIGSEGV"),
        ("killed", "its process was killed by SIGKILL, perhaps because memory ran out"),
        ("no_number", "must return a finite number, got nan (float)"),
        ("too_large", "must return a finite number, got inf (float)"),
        ("text", "must return a finite number, got '1.0' (str)"),
        ("nothing", "must return a finite number, got None (NoneType)"),
    ],
)
def test_function_that_fails_is_named_with_its_sample(start, functions: Path, name: str, problem: str) -> None:
    lines = FUNCTIONS.splitlines()
    numbers = {mark: next(n for n, line in enumerate(lines, 1) if mark in line) for mark in ("this line", "this one")}
    message = error_of(lambda: start(name)(SAMPLES))
    assert message.startswith(f"reward function {functions}:{name}: ")
    assert problem.format(file=functions, **numbers) in message and message.endswith(WHERE)


def test_exit_before_the_reply_is_read_names_the_sample(start, monkeypatch: pytest.MonkeyPatch) -> None:
    process, send = start("leaves"), Connection.send

    def preempted(connection: Connection, message: object) -> None:
        send(connection, message)
        time.sleep(0.5)

    monkeypatch.setattr(Connection, "send", preempted)
    assert "exit code 7; for the prompt 'what is it" in error_of(lambda: process(SAMPLES))


@pytest.mark.parametrize("name", [pytest.param("endless", marks=pytest.mark.slow), "endless_expression"])
def test_function_that_never_ends_is_stopped(start, functions: Path, name: str) -> None:
    started = time.monotonic()
    message = error_of(lambda: start(name, timeout=1.5)(SAMPLES))
    assert message == f"reward function {functions}:{name}: took more than 1.5 s (ppo.reward_timeout); {WHERE}"
    assert time.monotonic() - started < 15


def test_worker_that_reads_nothing_is_stopped(start) -> None:
    process = start("pid", timeout=3.0)
    os.kill(int(process(SAMPLES)[0][0]), signal.SIGSTOP)
    assert "took more than 3 s (ppo.reward_timeout)" in error_of(lambda: process(LARGE))


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=lambda number: number.name)
def test_child_that_holds_the_connection_hangs_no_large_batch(start, number: signal.Signals) -> None:
    process = start("pid", "detaches", timeout=3.0)
    (worker,), (child,) = process([Sample("p", "c", {})])
    problem = "took more than 3 s" if number == signal.SIGSTOP else "its process was killed by SIGKILL"
    try:
        os.kill(int(worker), number)
        wait_until(lambda: number == signal.SIGSTOP or not is_alive(int(worker)))
        assert problem in error_of(lambda: process(LARGE))
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_worker_killed_during_a_send_is_named_after_the_limit(start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start("pid", "detaches", timeout=3.0)
    (worker,), (child,) = process([Sample("p", "c", {})])
    poll, first = process._process.poll, iter([lambda: None])  # it has not been noticed before the send
    os.kill(int(worker), signal.SIGKILL)
    monkeypatch.setattr(process._process, "poll", lambda: next(first, poll)())
    try:
        assert "its process was killed by SIGKILL" in error_of(lambda: process(LARGE))
    finally:
        os.kill(int(child), signal.SIGKILL)


@pytest.mark.parametrize("what", ["code", "numbers", "text"])
def test_function_that_writes_to_the_connection_runs_nothing_in_the_run(start, tmp_path: Path, what: str) -> None:
    """Neither pickled code, nor numbers that are none, nor JSON nested deeply."""
    ran = tmp_path / "ran"
    message = {
        "code": pickle.dumps(Malicious(ran)),
        "numbers": b'["done", [[NaN]]]',
        "text": b"[" * 100_000,
    }[what]
    process = start("writes", timeout=5.0)
    problem = error_of(lambda: process([Sample("p", "c", {"message": message.hex()})]))
    assert ":writes: wrote to the connection of its process to the run; for the prompt 'p'" in problem
    assert not ran.exists()


class Malicious:
    """Pickled code, which creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_end_of_the_run_ends_children_that_left_the_group(start) -> None:
    process = start("detaches")
    ((child,),) = process([Sample("p", "c", {})])
    assert is_alive(int(child))
    process.close()
    assert wait_until(lambda: not is_alive(int(child)))


def test_functions_do_not_see_the_secret_of_the_run(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_SECRET", "hidden")
    assert start("knows_the_secret")([Sample("p", "c", {})]) == [[0.0]]


def test_working_directory_replaces_no_module_of_python(start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "colorsys.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert start("imports_colorsys")([Sample("p", "c", {})]) == [[1.0]]


def test_error_names_the_sample_that_failed(start) -> None:
    message = error_of(lambda: start("second_fails")(SAMPLES))
    assert "ZeroDivisionError" in message and "prompt 'and this?' with the completion 'b'; fix the function" in message


def test_next_batch_after_a_failure_has_a_new_process(start) -> None:
    """As in a notebook, in which the file has been fixed."""
    process = start("raises")
    assert "KeyError: 'answer'" in error_of(lambda: process(SAMPLES))
    assert process([Sample("p", "c", {"answer": 2})]) == [[2.0]]


def test_functions_of_the_example(start) -> None:
    process = start("form", "exact", "brief", file=ROOT / "example_scripts/rewards/rewards.py")
    completions = ["The answer is: 42.", "the answer is 41", "42", "so " * 30 + "the answer is 42"]
    values = process([Sample("6 x 7?", completion, {"answer": 42}) for completion in completions])
    assert values == [[1, 1, 0, 1], [1, 0, 0, 1], [0, 0, 0, -0.7]]


def test_interrupted_batch_leaves_no_reply_behind(start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start("counted")

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Connection, "recv_bytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process(SAMPLES)
    assert process(SAMPLES[1:]) == [[1.01]]


def test_process_killed_between_batches_is_an_error(start, functions: Path) -> None:
    process = start("pid")
    os.kill(int(process(SAMPLES)[0][0]), signal.SIGKILL)
    problem = "its process was killed by SIGKILL, perhaps because memory ran out"
    assert error_of(lambda: process(SAMPLES[:1])) == f"ppo.reward_functions: {functions}:pid: {problem}"


def test_long_sample_is_shortened_in_errors(start) -> None:
    process = start("nothing")
    assert len(error_of(lambda: process([Sample("p" * 1000, "c\n" * 1000, {})]))) < 500


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("two", "takes (prompt, completion), but is called with (prompt, completion, row); change its parameters"),
        ("later", "must not be `async`; name a plain function, which may call asyncio.run"),
        ("number", "not a function; name a function that takes (prompt, completion, row)"),
        ("contd", "{file} has no contd; did you mean counted?"),
    ],
)
def test_name_that_cannot_be_called_is_an_error(start, functions: Path, name: str, problem: str) -> None:
    message = error_of(lambda: start(name))
    assert message == f"ppo.reward_functions: {functions}:{name}: {problem.format(file=functions)}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def f(:\n    pass", "SyntaxError: invalid syntax at {file}:1"),
        ("import math\nimport absent", "ModuleNotFoundError: No module named 'absent' at {file}:2"),
        ("1 / 0", "ZeroDivisionError: division by zero at {file}:1"),
        ("while True: pass", "importing it took more than 1.5 s (ppo.reward_timeout)"),
        ("import os\nos._exit(5)", "ended its process with exit code 5"),
    ],
)
def test_file_that_cannot_be_imported_is_an_error(start, tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    message = error_of(lambda: start("f", file=file, timeout=1.5 if "while" in text else 20.0))
    assert message == f"ppo.reward_functions: {file}:f: {problem.format(file=file)}"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("{folder}/none.py:f", "{folder}/none.py: no such file; check its path"),
        (
            "absent.module:f",
            "absent.module:f: no module absent; install it, start rlhf in its folder, or name a file: "
            "./rewards.py:function",
        ),
        ("plugin:nothing", "plugin:nothing: no plugin offers nothing; use one of (none)"),
    ],
)
def test_missing_function_is_an_error(start, tmp_path: Path, name: str, problem: str) -> None:
    file, _, attribute = name.format(folder=tmp_path).rpartition(":")
    message = error_of(lambda: start(attribute, file=file))
    assert message == f"ppo.reward_functions: {problem.format(folder=tmp_path)}"


def test_worker_ends_when_closed_and_when_forgotten(functions: Path) -> None:
    config = RewardFunctionConfig(function=f"{functions}:pid")
    first, second = (RewardProcess([config], 20) for _ in range(2))
    pids = [int(process(SAMPLES)[0][0]) for process in (first, second)]
    assert all(map(is_alive, pids))
    first.close()
    del second
    assert wait_until(lambda: not any(map(is_alive, pids)))


PARENT = """
import sys
from rlhf.config.schema import RewardFunctionConfig
from rlhf.rewards.process import RewardProcess, Sample
process = RewardProcess([RewardFunctionConfig(function=sys.argv[1])], 60)
process([Sample("p", "c", {"pids": sys.argv[2]})])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_worker_and_its_children_end_with_a_killed_run(functions: Path, number: signal.Signals) -> None:
    """In the middle of a call that never ends."""
    file = functions.parent / "pids"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, f"{functions}:starts_another", str(file)])
    assert wait_until(lambda: file.exists() and len(file.read_text().split()) == 2, 30)
    pids = [int(word) for word in file.read_text().split()]
    assert all(map(is_alive, pids))
    parent.send_signal(number)
    parent.wait()
    assert wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no kernel ends it")
def test_worker_that_lets_no_thread_run_ends_with_the_run(functions: Path) -> None:
    script = PARENT.replace("process([", "print(process._process.pid, flush=True); process([")
    arguments = [sys.executable, "-c", script, f"{functions}:endless_expression", ""]
    parent = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    time.sleep(0.5)
    assert is_alive(pid)
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not is_alive(pid))


def test_signals_to_end_do_not_break_a_batch(start) -> None:
    """Ctrl-C in a terminal and a scheduler's SIGTERM may reach all processes."""
    process = start("pid")
    pid = int(process(SAMPLES)[0][0])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(pid, number)
    assert process(SAMPLES) == [[pid, pid]]
    assert os.getpgid(pid) != os.getpgid(0)
