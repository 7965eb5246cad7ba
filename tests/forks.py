"""Commands of `rlhf` in processes of their own, forked from one that has imported what they import.

Starting anew costs each process six seconds of imports; a fork costs a tenth of one. Everything else is as in a
user's shell: arguments, environment, output, signals, exit code, the end of the interpreter. Ranks that such a
command starts are forked too. What it is about to start processes from nothing, other tests do:
tests/launchers/test_local.py,
tests/trainers/test_restart.py.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
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


class Forks:
    """The client: starts the process that is forked, and asks it for commands."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment | {"DS_ACCELERATOR": "cpu"}
        self._server: subprocess.Popen[str] | None = None

    def run(
        self, *arguments: str, timeout: float, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """`python -m rlhf ARGUMENTS`; `environment` is added to the client's.

        Raises:
            subprocess.TimeoutExpired: it took longer; it was killed.
        """
        with tempfile.TemporaryDirectory() as folder:
            output, errors = Path(folder, "stdout"), Path(folder, "stderr")
            files = {"stdout": str(output), "stderr": str(errors)}
            whole = self._environment | (environment or {})
            ask = {"arguments": arguments, "folder": os.getcwd(), "environment": whole, **files}
            server = self._ready()
            assert server.stdin is not None and server.stdout is not None
            print(json.dumps(ask), file=server.stdin, flush=True)
            pid = int(server.stdout.readline())
            code = self._wait(server, pid, timeout)
            found = [path.read_text(encoding="utf-8", errors="replace") for path in (output, errors)]
            if code is None:
                raise subprocess.TimeoutExpired(arguments, timeout, *found)
        return subprocess.CompletedProcess(["rlhf", *arguments], code, *found)

    def close(self) -> None:
        if self._server and self._server.stdin:
            self._server.stdin.close()
            self._server.wait()

    def _ready(self) -> subprocess.Popen[str]:
        if self._server is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            path = os.pathsep.join(filter(None, [str(ROOT), self._environment.get("PYTHONPATH")]))
            environment = self._environment | {"PYTHONPATH": path}
            self._server = subprocess.Popen([sys.executable, "-m", "tests.forks"], env=environment, cwd=ROOT, **pipes)
        return self._server

    @staticmethod
    def _wait(server: subprocess.Popen[str], pid: int, timeout: float) -> int | None:
        """The exit code; None where the command had to be killed."""
        killed = []

        def kill(number: int, frame: object) -> None:
            killed.append(number)
            os.killpg(pid, signal.SIGKILL)

        assert server.stdout is not None
        before = signal.signal(signal.SIGALRM, kill)
        signal.setitimer(signal.ITIMER_REAL, timeout)
        try:
            code = int(server.stdout.readline())
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return None if killed else code


def serve() -> None:
    """Fork a command for each line of standard input; answer with its process, and with its exit code when it ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what is printed while importing is no answer
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # DeepSpeed 0.19.8 takes a second for it, at ZeRO
    import transformers.models.llama.modeling_llama  # noqa: F401
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401

    import rlhf.launchers.local
    import rlhf.trainers.pipeline

    rlhf.launchers.local.subprocess = SimpleNamespace(**(vars(subprocess) | {"Popen": ForkedPopen}))
    gc.collect()
    gc.freeze()  # so that no fork copies the pages of all that was imported
    for line in sys.stdin:
        ask = json.loads(line)
        with open(ask["stdout"], "wb") as output, open(ask["stderr"], "wb") as errors:
            command = [sys.executable, "-m", "rlhf", *ask["arguments"]]
            process = ForkedPopen(command, env=ask["environment"], stdout=output, stderr=errors, cwd=ask["folder"])
        print(process.pid, file=answers)
        print(process.wait(), file=answers)


class ForkedPopen:
    """subprocess.Popen of `python -m rlhf ...` or `python -c CODE ...`, as far as it is used here."""

    _pipes: ClassVar[
        list[Any]
    ] = []  # to the standard input of processes; one that is forked later must not hold them open

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
        python, how, what, *arguments = command
        assert python == sys.executable and how in ("-c", "-m"), command
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
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(env)
            sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
            os.chdir(cwd or os.getcwd())
            sys.argv = ["rlhf" if how == "-m" else "-c", *arguments]
            raise _Forked("from rlhf.cli import main; main()" if how == "-m" else what)
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
    """Leaves the server's frames in the forked process, which then runs the code and ends as any interpreter does."""


def _end(code: int) -> None:
    """End as an interpreter does, but for taking every module apart, which costs a second after these imports."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _main() -> None:
    try:
        serve()
    except _Forked as forked:
        code = str(forked)
    else:
        return
    while True:
        try:
            exec(code, {"__name__": "__main__"})
        except _Forked as forked:  # a rank of that command
            code = str(forked)
        except SystemExit as leaving:
            _end(leaving.code if isinstance(leaving.code, int) else 0)
        except BaseException:
            traceback.print_exc()
            _end(1)
        else:
            _end(0)


if __name__ == "__main__":
    _main()
