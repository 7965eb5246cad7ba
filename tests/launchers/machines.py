"""Two machines in one: network namespaces with host names of their own, or two addresses of the loopback."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from tests.helpers import user_environment

ROOT = Path(__file__).parents[2]
PLANTED = """
import os, sys, threading, time

def fail_when_told():
    while not os.path.exists(os.environ["PLANTED"]):
        time.sleep(0.05)
    def all_sum(tensor):
        raise ValueError("planted")
    sys.modules["rlhf.engine.distributed"].all_sum = all_sum

if os.environ.get("RANK") == os.environ.get("PLANTED_RANK", "none"):
    threading.Thread(target=fail_when_told, daemon=True).start()
"""
"""A sitecustomize.py: one rank raises an exception in its next step, once a file is there."""


def namespaces_are_allowed() -> bool:
    """Return whether this process may create network namespaces, by an attempt."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        return False
    name = f"rlhf-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


class Machines:
    """Two machines that see each other, and every process that was started on them.

    `shared` is a folder that both see, `own` a path at which each has a folder of its own, where there are namespaces.
    """

    def __init__(self, folder: Path, *, namespaces: bool) -> None:
        self.namespaces = namespaces
        self.shared, self.own = folder / "shared", folder / "own"
        self._mark = uuid.uuid4().hex
        self._names = [f"rlhf-{self._mark[:5]}-{letter}" for letter in "ab"]
        self._planted = folder / "planted"
        self._started: list[subprocess.Popen[str]] = []
        for path in (self.shared, self.own, *(folder / name for name in self._names)):
            path.mkdir()
        self._folder = folder
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(PLANTED)
        if namespaces:
            self._connect()

    def _connect(self) -> None:
        links = [f"r{self._mark[:6]}{letter}" for letter in "ab"]
        for name in self._names:
            _ip("netns", "add", name)
        _ip("link", "add", links[0], "netns", self._names[0], "type", "veth", "peer", links[1], "netns", self._names[1])
        for number, (name, link) in enumerate(zip(self._names, links), start=1):
            _ip("-n", name, "addr", "add", f"10.213.0.{number}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    @property
    def first(self) -> str:
        """Return the address of the first machine."""
        return "10.213.0.1" if self.namespaces else "127.0.0.1"

    def own_folder(self, machine: int) -> Path:
        """Return the folder that a machine sees as `own`, where there are namespaces."""
        return self._folder / self._names[machine]

    def name(self, machine: int) -> str:
        return f"machine-{machine}" if self.namespaces else os.uname().nodename

    def start(self, machine: int, command: Sequence[object], **variables: str) -> subprocess.Popen[str]:
        """Start a command on a machine, and do not wait."""
        environment = user_environment() | {"PLANTED": str(self._planted), "MARK": self._mark} | variables
        paths = [str(self._folder / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        words = [str(word) for word in command]
        if self.namespaces:
            script = 'hostname "$1"; mount --bind "$2" "$3"; shift 3; exec "$@"'
            own = [str(self._folder / self._names[machine]), str(self.own)]
            inside = ["sh", "-c", script, "sh", f"machine-{machine}", *own, *words]
            words = ["ip", "netns", "exec", self._names[machine], "unshare", "--uts", "--mount", *inside]
        process = subprocess.Popen(
            words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._started.append(process)
        return process

    def plant(self) -> None:
        """Let the rank PLANTED_RANK raise an exception."""
        self._planted.touch()

    def disconnect(self) -> None:
        """Cut the second machine off; no connection is closed."""
        _ip("-n", self._names[1], "link", "set", f"r{self._mark[:6]}b", "down")

    def process(self, rank: int) -> int:
        """Return the process id of a rank."""
        (identifier,) = (process for process, environ in self._alive() if f"\0RANK={rank}\0" in environ)
        return identifier

    def wait_for_all(self, seconds: float) -> float:
        """Seconds until no process is left that was started here or by these.

        Raises:
            AssertionError: that takes longer.
        """
        start = time.monotonic()
        while alive := [process for process, _ in self._alive()]:
            assert time.monotonic() - start < seconds, f"{len(alive)} processes are left after {seconds} s"
            time.sleep(0.05)
        return time.monotonic() - start

    def _alive(self) -> list[tuple[int, str]]:
        alive = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                environ = "\0" + (path / "environ").read_text(errors="replace")
            except OSError:
                continue
            if state != "Z" and f"\0MARK={self._mark}\0" in environ and int(path.name) != os.getpid():
                alive.append((int(path.name), environ))
        return alive

    def close(self) -> None:
        for process, _ in self._alive():
            os.kill(process, signal.SIGKILL)
        for started in self._started:
            started.communicate()
        if self.namespaces:
            for name in self._names:
                _ip("netns", "del", name)


def rlhf(machines: Machines, machine: int, ranks: int, *arguments: object, port: int = 29400) -> list[object]:
    """Our launcher's command on a machine."""
    meeting = ["--nodes", 2, "--node-rank", machine, "--rendezvous", f"{machines.first}:{port}", "--ranks", ranks]
    return [sys.executable, "-m", "rlhf", *arguments, *meeting]


def torchrun(machines: Machines, machine: int, ranks: int, *arguments: object, port: int = 29400) -> list[object]:
    """torchrun's."""
    meeting = ["--nnodes", 2, "--node-rank", machine, "--master-addr", machines.first, "--master-port", port]
    program = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc-per-node", ranks, "-m", "rlhf"]
    return [*program, *arguments]


def deepspeed(machines: Machines, machine: int, ranks: int, *arguments: object, port: int = 29400) -> list[object]:
    """Return the command that the deepspeed launcher starts on each machine."""
    slots = json.dumps({f"machine-{number}": list(range(ranks)) for number in range(2)})
    world = base64.urlsafe_b64encode(slots.encode()).decode()
    meeting = [f"--world_info={world}", f"--node_rank={machine}", f"--master_addr={machines.first}"]
    program = [sys.executable, "-m", "deepspeed.launcher.launch", *meeting, f"--master_port={port}", "--module", "rlhf"]
    return [*program, *arguments]


def srun(machine: int, local: int, ranks: int) -> dict[str, str]:
    """Return the environment of a task that srun starts on a machine."""
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(machine * ranks + local),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(machine),
        "SLURM_STEP_NUM_TASKS": str(2 * ranks),
        "SLURM_STEP_TASKS_PER_NODE": f"{ranks}(x2)",
        "SLURM_STEP_NODELIST": "machine-[0-1]",
    }


def mpirun(machine: int, local: int, ranks: int) -> dict[str, str]:
    """Return the environment of a process that Open MPI starts."""
    return {
        "OMPI_COMM_WORLD_RANK": str(machine * ranks + local),
        "OMPI_COMM_WORLD_SIZE": str(2 * ranks),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks),
    }


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
