"""The rank of this process in its run, for any launcher, and its command line.

`current_process` reads the variables of torchrun and the deepspeed launcher (RANK, ...), of `srun` (SLURM_*) or of
`mpirun` (OMPI_*, PMI_*), and returns a `ProcessInfo`. All code takes its rank from there, and libraries read the
variables that it returns. Incomplete or contradictory variables are an error: a process that wrongly assumes to be
alone would write to the folder of the others.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf.errors import ConfigError

STATUS_FOLDER_VARIABLE = "RLHF_OUTCOMES"
"""Environment variable that names the folder in which a rank that rlhf started leaves its exit status."""
RENDEZVOUS_VARIABLE = "RLHF_RENDEZVOUS"
"""Environment variable with the address at which our launchers on several machines met."""

SECRET_VARIABLE = "RLHF_SECRET"
"""Environment variable with the text by which the processes of a run recognize each other."""
SECRET_FILE = ".rlhf.secret"
"""File in the run's folder with the same for machines, if the variable is not set; see `rlhf.launchers.multinode`."""

_TORCH = {
    "rank": ("RANK",),
    "size": ("WORLD_SIZE",),
    "local_rank": ("LOCAL_RANK",),
    "local_size": ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    "node": ("GROUP_RANK", "CROSS_RANK"),
}
_MPIRUN = {
    "rank": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"),
    "size": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    "local_size": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
}
_SRUN = {
    "rank": ("SLURM_PROCID",),
    "size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "local_rank": ("SLURM_LOCALID",),
    "local_size": ("SLURM_NTASKS_PER_NODE",),
    "node": ("SLURM_NODEID",),
}
"""The variables that may contain each of a process's numbers."""
_MARKS = {STATUS_FOLDER_VARIABLE: "rlhf", "TORCHELASTIC_RUN_ID": "torchrun", "CROSS_RANK": "deepspeed"}
_UNKNOWN_LAUNCHER = "the environment"  # a launcher that sets RANK and is otherwise unknown
_PORT = 29500  # torch's default port
_NO_STEP = 0xFFFFFFF0  # step numbers from here on are SLURM's for the shell of a job, which `srun` did not start

_arguments: list[str] | None = None  # of the `rlhf` command; as `sys.argv`, there is one in a process

Numbers = dict[str, int | None]


@dataclass(frozen=True)
class ProcessInfo:
    """A process of a run; the only one if no launcher started it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int | None = None
    """Number of processes on this machine; None if the launcher does not state it."""
    node: int | None = None
    """Number of the machine, if the launcher states it."""
    address: str | None = None
    port: int | None = None
    """The port on the machine of rank 0 at which all ranks connect."""
    launcher: str | None = None

    def count_local_ranks(self, ranks: int | None = None) -> int:
        """Return the number of `ranks` (default: `size`) on this machine; all, if the launcher does not state it."""
        return self.local_size or (self.size if ranks is None else ranks)

    def launcher_options(self) -> list[str]:
        """Return the options that our launcher was started with."""
        if self.launcher != "rlhf":
            return []
        words = ["--ranks", str(self.count_local_ranks())]
        if rendezvous := os.environ.get(RENDEZVOUS_VARIABLE):
            nodes = self.size // self.count_local_ranks()
            words += ["--nodes", str(nodes), "--node-rank", str(self.node), "--rendezvous", rendezvous]
        return words

    def variables(self) -> dict[str, str]:
        """Return the variables that torch, DeepSpeed and device runtimes read; empty without a launcher."""
        if not self.launcher:
            return {}
        values = {names[0]: getattr(self, name) for name, names in _TORCH.items()}
        values |= {"MASTER_ADDR": self.address, "MASTER_PORT": self.port}
        return {variable: str(value) for variable, value in values.items() if value is not None}


def current_process(environ: Mapping[str, str] | None = None) -> ProcessInfo:
    """Read this process's rank and neighbours from the environment.

    Raises:
        ConfigError: the variables are incomplete, or contradict each other.
    """
    environ = os.environ if environ is None else environ
    # A launcher may have been started by another: mpirun starts its helpers with srun. The innermost comes first.
    processes = [process for process in (_from_torch(environ), _from_mpirun(environ), _from_srun(environ)) if process]
    if not processes:
        if values := [f"{name}={environ[name]}" for name in ("WORLD_SIZE", "LOCAL_RANK") if name in environ]:
            raise ConfigError(
                f"RANK is not set, but {' and '.join(values)}: set RANK, WORLD_SIZE and LOCAL_RANK, or none"
            )
        return ProcessInfo()
    process = processes[0]
    if process.launcher == _UNKNOWN_LAUNCHER:
        for outer in processes[1:2]:  # a script may have set RANK from these variables
            if (process.rank, process.size) != (outer.rank, outer.size):
                raise ConfigError(
                    f"RANK and WORLD_SIZE say rank {process.rank} of {process.size}, {outer.launcher} says rank "
                    f"{outer.rank} of {outer.size}; unset RANK, WORLD_SIZE and LOCAL_RANK"
                )
    elif "RANK" not in environ and _number(environ, "WORLD_SIZE") not in (None, process.size):
        raise ConfigError(
            f"WORLD_SIZE is {environ['WORLD_SIZE']}, but {process.launcher} started {process.size} processes; unset it"
        )
    if not 0 <= process.rank < process.size or not 0 <= process.local_rank < process.count_local_ranks():
        raise ConfigError(
            f"{process.launcher} says rank {process.rank} of {process.size}, local rank {process.local_rank} of "
            f"{process.count_local_ranks()}, which is inconsistent; fix or unset these variables"
        )
    if process.size > 1 and not (process.address and process.port):
        raise ConfigError(
            f"{process.launcher} says that there are {process.size} processes, but not where they meet; "
            "set MASTER_ADDR and MASTER_PORT to the host of rank 0 and a free port there"
        )
    return process


def set_command_line(arguments: list[str]) -> None:
    """Take these as the arguments of the `rlhf` command."""
    global _arguments
    _arguments = arguments


def get_command_line() -> str:
    """Return the `rlhf` command, or that of the program that calls rlhf from Python; `run.json` records it.

    Bytes that are not UTF-8 are written as `\\udce9`.
    """
    words = sys.orig_argv if _arguments is None else ["rlhf", *_arguments]
    return shlex.join(words).encode(errors="backslashreplace").decode()


def get_resume_command(checkpoint: str, stage: str, output: Path) -> str:
    """Return this command, but resuming from this checkpoint; of a Python program, the command that does the same."""
    words = ["rlhf", stage, "--output", str(output)] if _arguments is None else ["rlhf", *_arguments]
    words = [word for word in words if word != "--resume" and not word.startswith("--resume=")]
    return shlex.join([*words, f"--resume={checkpoint}"])


def strip_local_rank(arguments: Sequence[str]) -> list[str]:
    """Remove the `--local_rank=N` that the deepspeed launcher adds to a script's command line.

    Raises:
        ConfigError: LOCAL_RANK does not say the same.
    """
    for index, argument in enumerate(arguments):
        if match := re.fullmatch(r"--local[_-]rank(?:=(.*))?", argument):
            end = index + (2 if match[1] is None else 1)
            value = "".join(arguments[index + 1 : end]) if match[1] is None else match[1]
            if value != (variable := os.environ.get("LOCAL_RANK")):
                raise ConfigError(
                    f"--local_rank {value}: launchers give it along with LOCAL_RANK, which is {variable or 'not set'}; "
                    "leave it out, --ranks N starts N processes"
                )
            return [*arguments[:index], *arguments[end:]]
    return list(arguments)


def parse_first_host(hosts: str) -> str:
    """Return the first host of a SLURM list: `node01` of `node[01-03,7],login`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else "")


def _from_torch(environ: Mapping[str, str]) -> ProcessInfo | None:
    """Read the variables of torchrun, the deepspeed launcher, our launcher, and scripts that set the same."""
    if "RANK" not in environ:
        return None
    launcher = next((name for mark, name in _MARKS.items() if mark in environ), _UNKNOWN_LAUNCHER)
    return _build_process(environ, launcher, _TORCH, {}, *_meeting(environ))


def _from_mpirun(environ: Mapping[str, str]) -> ProcessInfo | None:
    """Read the variables of Open MPI, or of similar launchers (MPICH, Intel, PMIx)."""
    numbers = _numbers(environ, _MPIRUN)
    # srun sets PMI_RANK or PMIX_RANK too, for programs that use MPI
    if numbers["rank"] is None or numbers["size"] == 1 or (numbers["local_rank"] is None and _is_task(environ)):
        return None
    address, port = _meeting(environ)
    if numbers["size"] == numbers["local_size"]:  # one machine
        job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
        address, port = address or "127.0.0.1", port or (_port_of(job) if job else _PORT)
    return _build_process(environ, "mpirun", _MPIRUN, {}, address, port or (_PORT if address else None))


def _from_srun(environ: Mapping[str, str]) -> ProcessInfo | None:
    if not _is_task(environ):
        return None
    tasks = _count_tasks(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), _number(environ, "SLURM_NODEID") or 0)
    known: Numbers = {"local_size": tasks} if tasks else {}
    address, port = _meeting(environ)
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or ""
    address = address or parse_first_host(hosts) or environ.get("SLURM_LAUNCH_NODE_IPADDR")
    job = f"{environ.get('SLURM_JOB_ID')}.{_number(environ, 'SLURM_STEP_ID', 'SLURM_STEPID')}"
    return _build_process(environ, "srun", _SRUN, known, address, port or _port_of(job))


def _count_tasks(on_nodes: str, node: int) -> int | None:
    """Return the number of tasks on a node by SLURM's list, such as `2(x3),1`; None if the list does not say it."""
    for number, times in re.findall(r"(\d{1,9})(?:\(x(\d{1,9})\))?", on_nodes):
        node -= int(times or 1)
        if node < 0:
            return int(number)
    return None


def _is_task(environ: Mapping[str, str]) -> bool:
    """Return whether `srun` started this process as one of several.

    The shell of a job (sbatch, salloc) is not such a task, although SLURM_NTASKS may be 8 and SLURM_PROCID 0 there: it
    has no step, or a step with one of SLURM's reserved numbers. A step with one task is a shell (`srun --pty`), or this
    process alone.
    """
    step = _number(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    of_srun = step is not None and 0 <= step < _NO_STEP
    return of_srun and "SLURM_PROCID" in environ and _number(environ, *_SRUN["size"]) != 1


def _build_process(
    environ: Mapping[str, str],
    launcher: str,
    table: Mapping[str, tuple[str, ...]],
    known: Numbers,
    address: str | None,
    port: int | None,
) -> ProcessInfo:
    numbers = _numbers(environ, table) | known
    rank, size, local_rank = (numbers[name] for name in ("rank", "size", "local_rank"))
    if rank is None or size is None or local_rank is None:
        missing = next(names for name, names in table.items() if numbers[name] is None)
        values = [f"{name}={environ[name]}" for names in table.values() for name in names if name in environ]
        raise ConfigError(f"{' or '.join(missing)} is not set, but {' and '.join(values)}: set all of them, or none")
    return ProcessInfo(rank, size, local_rank, numbers.get("local_size"), numbers.get("node"), address, port, launcher)


def _numbers(environ: Mapping[str, str], table: Mapping[str, tuple[str, ...]]) -> Numbers:
    return {name: _number(environ, *names) for name, names in table.items()}


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the first of the variables that is set, as a number."""
    name = next((name for name in names if name in environ), None)
    if name is None:
        return None
    try:
        return int(environ[name])
    except ValueError:
        if name == "SLURM_NTASKS_PER_NODE":  # a limit, which SLURM may write in another notation
            return None
        raise ConfigError(f"{name} is {environ[name]!r}, not a whole number; fix or unset it") from None


def _meeting(environ: Mapping[str, str]) -> tuple[str | None, int | None]:
    """Return the rendezvous address and port that users can set for any launcher."""
    port = _number(environ, "MASTER_PORT")
    if port is not None and not 0 < port < 2**16:
        raise ConfigError(f"MASTER_PORT is {port}, not a port; set it to a number from 1024 to 65535")
    return environ.get("MASTER_ADDR"), port


def _port_of(job: str) -> int:
    """Return a port below the ephemeral range, the same in all processes of a job."""
    return 10_000 + zlib.crc32(job.encode()) % 20_000
