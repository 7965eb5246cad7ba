"""Run Python in processes that are forked from one that has imported torch, transformers and DeepSpeed.

A new interpreter takes six seconds for these imports, a fork a tenth of one. All else is as in a user's shell:
arguments, environment, output, signals, exit code, the end of the interpreter. Ranks that such a process starts are
forked too. tests/launchers/test_local.py starts new interpreters.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import math
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

ROOT = Path(__file__).parents[1]
IMPORTS = (
    "transformers.models.llama.modeling_llama",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # DeepSpeed 0.19.8 takes a second for it, at ZeRO
    "torch.utils.tensorboard",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "peft",  # for LoRA
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "setuptools",  # DeepSpeed imports it when it is asked for an operator
    "accelerators.backends.cpu.backend",
    "rlhf.cli.app",
    "rlhf.contrib.sweep.runner",
    "rlhf.trainers.pipeline",
    "rlhf.trainers.run",
)
"""Modules that runs import late; tests/test_forks.py checks the list."""

RANKS = """
import sys
from rlhf.launchers import local
status = local.spawn_ranks(int(sys.argv[1]), [sys.executable, "-c", sys.argv[2]])
sys.exit(status.report() if status else 0)
"""


class Forks:
    """The client: starts the process that is forked, and asks it for others."""

    def __init__(self, environment: dict[str, str], imports: tuple[str, ...] = IMPORTS) -> None:
        self._environment, self._imports = environment, imports
        self._server: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")

    def run(
        self, *arguments: str, timeout: float, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `python -m rlhf ARGUMENTS`; `environment` is added to the client's."""
        return self.python("-m", "rlhf", *arguments, timeout=timeout, environment=environment)

    def ranks(self, count: int, code: str, *, timeout: float = 600, environment: dict[str, str] | None = None) -> None:
        """Run `python -c CODE` as ranks of one run, which must succeed."""
        done = self.python("-c", RANKS, str(count), code, timeout=timeout, environment=environment)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    def python(
        self, *arguments: str, timeout: float, environment: dict[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `python ARGUMENTS`.

        Raises:
            subprocess.TimeoutExpired: it took longer; it was killed.
        """
        process = self.start(*arguments, environment=environment, cwd=cwd)
        try:
            stdout, stderr = process.communicate(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(arguments, timeout, *process.communicate()) from None
        return subprocess.CompletedProcess(["python", *arguments], process.wait(), stdout, stderr)

    def start(
        self, *arguments: str, environment: dict[str, str] | None = None, cwd: Path | None = None
    ) -> ForkedProcess:
        """Start `python ARGUMENTS` in a separate session and do not wait."""
        if self._server is None:
            path = os.pathsep.join(filter(None, [str(ROOT), self._environment.get("PYTHONPATH")]))
            self._server = subprocess.Popen(
                [sys.executable, "-c", "from tests import forks; forks.main()", *self._imports],
                env=self._environment | {"PYTHONPATH": path},
                cwd=self._folder.name,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._server.stdin is not None and self._server.stdout is not None
        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        request = {
            "arguments": arguments,
            "cwd": str(cwd or Path.cwd()),
            "environment": self._environment | (environment or {}),
            "folder": str(folder),
        }
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return ForkedProcess(arguments, int(self._server.stdout.readline()), folder)

    def close(self) -> None:
        if self._server and self._server.stdin:
            self._server.stdin.close()
            self._server.wait()
        self._folder.cleanup()


class ForkedProcess:
    """A process of the server, with those methods of subprocess.Popen that tests call."""

    def __init__(self, arguments: tuple[str, ...], pid: int, folder: Path) -> None:
        self.args, self.pid, self._folder = arguments, pid, folder
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and (self._folder / "code").exists():
            self.returncode = int((self._folder / "code").read_text())
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return code

    def communicate(self, timeout: float = math.inf) -> tuple[str, str]:
        self.wait(timeout)
        stdout, stderr = (
            (self._folder / name).read_text(encoding="utf-8", errors="replace") for name in ("stdout", "stderr")
        )
        return stdout, stderr


def serve() -> None:
    """Fork a process for each line of standard input, answer with its number, and write its exit code when it ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what is printed while importing is no answer
    for module in sys.argv[1:]:
        importlib.import_module(module)
    _fill_caches()
    import rlhf.launchers.local

    rlhf.launchers.local.subprocess = SimpleNamespace(**(vars(subprocess) | {"Popen": ForkedPopen}))
    gc.collect()
    gc.freeze()  # so that no fork copies the pages of all that was imported
    processes: dict[Path, ForkedPopen] = {}
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], 0.01 if processes else None)
        if readable:
            line = sys.stdin.readline()
            if not line:
                break
            request = json.loads(line)
            folder = Path(request["folder"])
            with open(folder / "stdout", "wb") as stdout, open(folder / "stderr", "wb") as stderr:
                command = [sys.executable, *request["arguments"]]
                processes[folder] = ForkedPopen(
                    command, env=request["environment"], stdout=stdout, stderr=stderr, cwd=request["cwd"]
                )
            print(processes[folder].pid, file=answers)
        for folder, process in [*processes.items()]:
            if process.poll() is not None:
                (folder / "partial").write_text(str(process.returncode))
                (folder / "partial").rename(folder / "code")
                del processes[folder]
    for process in processes.values():
        os.killpg(process.pid, signal.SIGKILL)


def _fill_caches() -> None:
    """Compute what these libraries compute once in a process, at the first model or group: half a second of a run."""
    if ops := sys.modules.get("deepspeed.ops"):
        ops.__compatible_ops__  # noqa: B018  # runs a compiler to see which operators it would compile
    if conversions := sys.modules.get("transformers.conversion_mapping"):
        conversions.get_checkpoint_conversion_mapping("llama")  # compiles a thousand patterns


class ForkedPopen:
    """subprocess.Popen of `python ARGUMENTS`, as far as it is used here."""

    # To the standard input of processes; one that is forked later must not hold them open.
    _pipes: ClassVar[list[Any]] = []

    def __init__(
        self,
        command: Any,
        *,
        env: Any,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        cwd: Any = None,
        **options: Any,
    ) -> None:
        python, *arguments = command
        assert python == sys.executable, command
        self.returncode: int | None = None
        reads, writes = os.pipe()
        self.stdin = os.fdopen(writes, "wb")
        self._pipes.append(self.stdin)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for file, descriptor in ((stdout, 1), (stderr, 2)):
                if file is not None:
                    os.dup2(file.fileno(), descriptor)
            for pipe in self._pipes:
                pipe.close()
            os.dup2(reads, 0)
            os.close(reads)
            sys.stdin = open(0, closefd=False)  # noqa: SIM115  # the server has read from its own
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(env)
            sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
            os.chdir(cwd or os.getcwd())
            raise _Forked(arguments)
        os.close(reads)
        if stdin is None:
            self.stdin.close()

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        while self.poll() is None:
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class _Forked(BaseException):
    """Leaves the server's frames in the forked process, which then runs `python ARGUMENTS` and ends as that does."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments


def main() -> None:
    """Be the server; in a fork, what was asked for."""
    try:
        serve()
    except _Forked as forked:
        arguments = forked.arguments
    else:
        return
    while True:
        try:
            run_python(arguments)
        except _Forked as forked:  # a rank of that process
            arguments = forked.arguments
        except SystemExit as leaving:
            if isinstance(leaving.code, str):
                print(leaving.code, file=sys.stderr)
            _end(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
        except BaseException:
            traceback.print_exc()
            _end(1)
        else:
            _end(0)


def run_python(arguments: list[str]) -> None:
    option, *sys.argv[1:] = arguments
    if option == "-c":
        sys.argv[:] = arguments[:1] + arguments[2:]
        exec(arguments[1], vars(sys.modules["__main__"]))
    elif option == "-m":
        del sys.argv[1]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[0] = option
        runpy.run_path(option, run_name="__main__")


def _end(code: int) -> None:
    """End as an interpreter does, but for taking every module apart, which costs a second after these imports."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
