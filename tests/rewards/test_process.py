"""Reward functions in a process of their own: what they are given, and how each way to fail is said in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf.config.schema import RewardFunctionConfig
from rlhf.errors import RewardError
from rlhf.rewards.process import RewardProcess, Sample

ROOT = Path(__file__).parents[2]
FUNCTIONS = '''
import asyncio, ctypes, math, os, re, subprocess, sys, time

import beside

calls = []

def counted(prompt, completion, row):
    """How often it was called, and what it was called with."""
    calls.append((prompt, completion, row))
    return len(calls) + len(completion) / 100 + row.get("bonus", 0)

def pid(prompt, completion, row): return os.getpid()
def whole(prompt, completion, row): return beside.ONE
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
def exits(prompt, completion, row): sys.exit(3)
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


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("ONE = 1\n")
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def begin(functions: Path) -> Iterator[Callable[..., RewardProcess]]:
    begun: list[RewardProcess] = []

    def process(*names: str, timeout: float = 20.0) -> RewardProcess:
        begun.append(RewardProcess([function(functions, name) for name in names], timeout))
        return begun[-1]

    yield process
    for process_ in begun:
        process_.close()


def function(file: Path, name: str) -> RewardFunctionConfig:
    return RewardFunctionConfig(function=f"{file}:{name}")


def is_there(pid: int) -> bool:
    """Whether a process is, other than as the entry of one that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def refusal(begin: Callable[..., RewardProcess], name: str, timeout: float = 20.0) -> str:
    with pytest.raises(RewardError) as found:
        begin(name, timeout=timeout)(SAMPLES)
    message = str(found.value)
    assert "\n" not in message
    return message


def test_each_function_scores_each_sample_in_order_and_keeps_what_it_remembers(begin) -> None:
    process = begin("counted", "whole")
    samples = [Sample("p", "12345", {}), Sample("p", "1", {"bonus": 10})]
    assert process(samples) == [[1.05, 12.01], [1.0, 1.0]]
    assert process(samples[:1]) == [[3.05], [1.0]]


def test_no_sample_is_no_call(begin) -> None:
    process = begin("counted")
    assert process([]) == [[]]
    assert process(SAMPLES[1:]) == [[1.01]]


def test_it_is_another_process_without_torch_and_a_test_s_truth_is_a_number(begin) -> None:
    found = begin("pid", "true", "torch_is_loaded", "with_default")([Sample("p", "right", {}), Sample("p", "no", {})])
    assert found[0][0] != os.getpid() and found[1:] == [[1.0, 0.0], [0.0, 0.0], [3.0, 3.0]]


def test_a_batch_larger_than_any_pipe(begin) -> None:
    samples = [Sample("x" * 1000, "y" * number, {"more": "z" * 500}) for number in range(2000)]
    (found,) = begin("counted")(samples)
    assert found == [pytest.approx(number + 1 + number / 100) for number in range(2000)]


def test_a_module_is_found_in_the_working_directory(functions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(functions.parent)
    process = RewardProcess([RewardFunctionConfig(function="mine:whole")], 20)
    assert process(SAMPLES) == [[1.0, 1.0]]
    process.close()


def test_what_a_function_prints_is_no_answer(begin, capfd: pytest.CaptureFixture[str]) -> None:
    assert begin("noisy")(SAMPLES) == [[1.0, 1.0]]
    out, err = capfd.readouterr()
    assert out == "" and err.count("from Python") == err.count("from a shell") == 2


SHOWN = "for the prompt 'what is it?' with the completion 'an answer' (rows.jsonl:3)"
WHERE = f"{SHOWN}; fix the function, then repeat this command with --resume"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("raises", "KeyError: 'answer' at {file}:{this line}"),
        ("in_a_library", "missing ), unterminated subpattern at position 0 at {file}:{this one}"),
        ("leaves", "ended its process with exit code 7"),
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
def test_a_function_that_fails_is_named_with_its_sample(begin, functions: Path, name: str, what: str) -> None:
    lines = FUNCTIONS.splitlines()
    numbers = {mark: next(n for n, line in enumerate(lines, 1) if mark in line) for mark in ("this line", "this one")}
    message = refusal(begin, name)
    assert message.startswith(f"reward function {functions}:{name}: ")
    assert what.format(file=functions, **numbers) in message and message.endswith(WHERE)


def test_one_that_ends_while_the_run_waits_for_the_processor_is_named_with_its_sample(
    begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, write = begin("leaves"), os.write

    def preempted(descriptor: int, data: bytes) -> int:
        written = write(descriptor, data)
        time.sleep(0.5)
        return written

    monkeypatch.setattr(os, "write", preempted)
    with pytest.raises(RewardError, match="exit code 7; for the prompt 'what is it"):
        process(SAMPLES)


@pytest.mark.parametrize("name", ["endless", "endless_expression"])
def test_one_that_never_ends_is_ended(begin, functions: Path, name: str) -> None:
    begun = time.monotonic()
    message = refusal(begin, name, timeout=4.0)
    assert message == f"reward function {functions}:{name}: took more than 4 s (ppo.reward_timeout); {WHERE}"
    assert time.monotonic() - begun < 15


def test_the_sample_is_the_one_that_failed(begin) -> None:
    message = refusal(begin, "second_fails")
    assert "ZeroDivisionError" in message and "prompt 'and this?' with the completion 'b'; fix the function" in message


def test_after_a_failure_the_next_batch_has_a_new_process(begin, functions: Path) -> None:
    """As in a notebook, where the file has been mended."""
    process = begin("raises")
    with pytest.raises(RewardError, match="KeyError: 'answer'"):
        process(SAMPLES)
    assert process([Sample("p", "c", {"answer": 2})]) == [[2.0]]


def test_the_example_s_functions() -> None:
    names = [f"{ROOT}/example_scripts/rewards/rewards.py:{name}" for name in ("form", "exact", "brief")]
    process = RewardProcess([RewardFunctionConfig(function=name) for name in names], 20)
    said = ["The answer is: 42.", "the answer is 41", "42", "so " * 30 + "the answer is 42"]
    found = process([Sample("6 x 7?", completion, {"answer": 42}) for completion in said])
    assert found == [[1, 1, 0, 1], [1, 0, 0, 1], [0, 0, 0, -0.7]]
    process.close()


def test_one_that_is_interrupted_leaves_no_answer_behind(begin, monkeypatch: pytest.MonkeyPatch) -> None:
    process = begin("counted")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process(SAMPLES)
    assert process(SAMPLES[1:]) == [[1.01]]


def test_a_process_that_was_killed_between_batches(begin, functions: Path) -> None:
    process = begin("pid")
    os.kill(int(process(SAMPLES)[0][0]), signal.SIGKILL)
    with pytest.raises(RewardError) as found:
        process(SAMPLES[:1])
    said = f"{functions}:pid: its process was killed by SIGKILL, perhaps because memory ran out"
    assert str(found.value) == f"ppo.reward_functions: {said}"


def test_a_long_sample_is_shortened(begin) -> None:
    with pytest.raises(RewardError) as found:
        begin("nothing")([Sample("p" * 1000, "c\n" * 1000, {})])
    assert len(str(found.value)) < 500 and "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("two", "takes (prompt, completion), but is called with (prompt, completion, row); change its parameters"),
        ("later", "must not be `async`; name a plain function, which may call asyncio.run"),
        ("number", "not a function; name a function that takes (prompt, completion, row)"),
        ("contd", "{file} has no contd; did you mean counted?"),
    ],
)
def test_one_that_cannot_be_called_is_refused_before_it_is(begin, functions: Path, name: str, what: str) -> None:
    assert refusal(begin, name) == f"ppo.reward_functions: {functions}:{name}: {what.format(file=functions)}"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def f(:\n    pass", "SyntaxError: invalid syntax at {file}:1"),
        (
            "import math\nimport nowhere_to_be_found",
            "ModuleNotFoundError: No module named 'nowhere_to_be_found' at {file}:2",
        ),
        ("1 / 0", "ZeroDivisionError: division by zero at {file}:1"),
        ("while True: pass", "importing it took more than 3 s (ppo.reward_timeout)"),
        ("import os\nos._exit(5)", "ended its process with exit code 5"),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(RewardError) as found:
        RewardProcess([function(file, "f")], 3.0)
    assert str(found.value) == f"ppo.reward_functions: {file}:f: {what.format(file=file)}"


def test_what_is_not_there(tmp_path: Path) -> None:
    for name, what in {
        f"{tmp_path}/none.py:f": f"ppo.reward_functions: {tmp_path}/none.py: no such file; check its path",
        "nowhere.to.be:found": "ppo.reward_functions: nowhere.to.be:found: no module nowhere; install it, "
        "start rlhf in its folder, or name a file: ./rewards.py:function",
        "plugin:nothing": "ppo.reward_functions: plugin:nothing: no plugin offers nothing; use one of (none)",
    }.items():
        with pytest.raises(RewardError) as found:
            RewardProcess([RewardFunctionConfig(function=name)], 20)
        assert str(found.value) == what


def test_it_ends_when_it_is_closed_and_when_it_is_forgotten(begin, functions: Path) -> None:
    first, second = (RewardProcess([function(functions, "pid")], 20) for _ in range(2))
    pids = [int(process(SAMPLES)[0][0]) for process in (first, second)]
    assert all(map(is_there, pids))
    first.close()
    del second
    assert until(lambda: not any(map(is_there, pids)))


PARENT = """
import sys
from rlhf.config.schema import RewardFunctionConfig
from rlhf.rewards.process import RewardProcess, Sample
process = RewardProcess([RewardFunctionConfig(function=sys.argv[1])], 60)
process([Sample("p", "c", {"pids": sys.argv[2]})])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_does_not_outlive_a_run_that_is_killed(functions: Path, number: signal.Signals) -> None:
    """In the middle of a call that never ends; nor does what the function has started."""
    pids = functions.parent / "pids"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, f"{functions}:starts_another", str(pids)])
    assert until(lambda: pids.exists() and len(pids.read_text().split()) == 2, 30)
    both = [int(word) for word in pids.read_text().split()]
    assert all(map(is_there, both))
    parent.send_signal(number)
    parent.wait()
    assert until(lambda: not any(map(is_there, both)))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no kernel ends it")
def test_nor_where_no_thread_of_it_can_run(functions: Path, tmp_path: Path) -> None:
    script = PARENT.replace("process([", "print(process._process.pid, flush=True); process([")
    arguments = [sys.executable, "-c", script, f"{functions}:endless_expression", ""]
    parent = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    time.sleep(0.5)
    assert is_there(pid)
    parent.kill()
    parent.wait()
    assert until(lambda: not is_there(pid))


def test_signals_that_ask_to_end_do_not_break_a_batch(begin) -> None:
    """Ctrl-C in a terminal and a scheduler's SIGTERM may reach all processes."""
    process = begin("pid")
    pid = int(process(SAMPLES)[0][0])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert process(SAMPLES) == [[pid, pid]]
    assert os.getpgid(pid) != os.getpgid(0)
