"""The rank of a process, from the variables that each launcher sets."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from rlhf.errors import ConfigError
from rlhf.utils.process_info import ProcessInfo, current_process, parse_first_host, strip_local_rank
from tests.helpers import user_environment

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
}
DEEPSPEED = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_SIZE": "4",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "29400",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "MASTER_ADDR": "node01",
}
HYDRA = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "29400",
}
BATCH = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("environ", "launcher", "node"),
    [
        (TORCHRUN, "torchrun", 1),
        (DEEPSPEED, "deepspeed", 1),
        (SRUN, "srun", 1),
        (MPIRUN, "mpirun", None),
        (HYDRA, "mpirun", None),
    ],
)
def test_every_launcher_says_the_same_place(environ: dict[str, str], launcher: str, node: int | None) -> None:
    place = current_process(environ)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (5, 8, 1, 4)
    assert (place.launcher, place.address, place.node) == (launcher, "node01", node)
    exported = place.variables()
    assert [exported[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["5", "8", "1", "4"]
    assert exported["MASTER_ADDR"] == "node01" and 1024 <= int(exported["MASTER_PORT"]) < 32768
    assert current_process(environ | exported).rank == 5  # what was exported contradicts nothing


def test_without_a_launcher_a_process_is_alone() -> None:
    assert current_process({}) == ProcessInfo()
    assert current_process({"MASTER_ADDR": "left", "MASTER_PORT": "1"}).variables() == {}


@pytest.mark.parametrize(
    "environ",
    [
        BATCH,  # the shell of sbatch
        BATCH | {"SLURM_STEP_ID": "4294967291"},  # SLURM's own step for it
        BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "8"},  # and for that of salloc
        BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    ],
)
def test_the_shell_of_a_job_is_no_rank(environ: dict[str, str]) -> None:
    assert current_process(environ) == ProcessInfo()


def test_the_innermost_launcher_counts() -> None:
    outer = SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    assert current_process(outer | TORCHRUN).rank == 5  # srun starts torchrun on each machine
    assert current_process(outer | DEEPSPEED).rank == 5
    assert current_process(outer | MPIRUN).rank == 5  # mpirun starts its helpers with srun
    assert current_process(outer | MPIRUN | current_process(outer | MPIRUN).variables()).rank == 5
    ours = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}
    assert current_process(outer | ours | {"RLHF_OUTCOMES": "/tmp"}).launcher == "rlhf"
    assert current_process(SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"}).launcher == "srun"  # which only lends MPI a rank
    assert current_process(SRUN | {"PMIX_RANK": "5"}).launcher == "srun"


def test_script_may_repeat_the_variables_of_srun() -> None:
    variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node01", "MASTER_PORT": "29400"}
    assert current_process(SRUN | variables).rank == 5
    assert current_process(SRUN | {"MASTER_ADDR": "other", "MASTER_PORT": "5", "WORLD_SIZE": "8"}).address == "other"
    first = SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert current_process(SRUN).port == current_process(first).port
    assert current_process(SRUN).port != current_process(SRUN | {"SLURM_STEP_ID": "1"}).port


def test_mpirun_on_one_machine_meets_there() -> None:
    environ = {name: value for name, value in MPIRUN.items() if name != "MASTER_ADDR"}
    alone = current_process(environ | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "PMIX_NAMESPACE": "job-1"})
    assert alone.address == "127.0.0.1" and alone.port
    with pytest.raises(ConfigError, match="not where they meet; set MASTER_ADDR and MASTER_PORT"):
        current_process(environ)


def test_a_list_of_many_nodes_takes_no_memory_for_each() -> None:
    tracemalloc.start()
    try:
        process = current_process({**SRUN, "SLURM_STEP_TASKS_PER_NODE": f"4(x200000),7({'9' * 5000})"})
        assert process.local_size == 4 and tracemalloc.get_traced_memory()[1] < 2**17
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node[01-03,7]", "node01"),
        ("login,node[01-03]", "login"),
        ("rack[2-3]-n[08,10],x", "rack2-n08"),
        ("solo", "solo"),
        ("a-1,b", "a-1"),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert parse_first_host(hosts) == first


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, r"WORLD_SIZE is not set, but RANK=0: set all of them"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, r"LOCAL_RANK is not set, but RANK=0 and WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2"}, r"RANK is not set, but WORLD_SIZE=2"),
        ({"LOCAL_RANK": "0"}, r"RANK is not set, but LOCAL_RANK=0"),
        (BATCH | {"WORLD_SIZE": "8"}, r"RANK is not set, but WORLD_SIZE=8"),
        (TORCHRUN | {"RANK": "8"}, r"torchrun says rank 8 of 8"),
        (TORCHRUN | {"RANK": "-1"}, r"torchrun says rank -1 of 8"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, r"local rank 4 of 4, which is inconsistent"),
        (TORCHRUN | {"RANK": "one"}, r"RANK is 'one', not a whole number"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, r"MASTER_PORT is 70000, not a port"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, r"the environment says that there are 2 processes"),
        (
            SRUN | {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"},
            r"RANK and WORLD_SIZE say rank 0 of 8, srun says rank 5 of 8; unset RANK",
        ),
        (SRUN | {"WORLD_SIZE": "2"}, r"WORLD_SIZE is 2, but srun started 8 processes"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, r"OMPI_COMM_WORLD_SIZE or PMI_SIZE is not set, but OMPI_COMM_WORLD_RANK=0"),
    ],
)
def test_incomplete_or_contradictory_variables_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        current_process(environ)


def test_contradicting_variables_are_refused_at_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlhf", "--output", str(tmp_path / "run")],
        env=user_environment() | {"RANK": "0"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "WORLD_SIZE is not set, but RANK=0" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_local_rank_argument_must_agree_with_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    for given in (["--local_rank=1"], ["--local-rank=1"], ["--local_rank", "1"]):
        assert strip_local_rank([*given, "sft", "--seed", "1"]) == ["sft", "--seed", "1"]
    assert strip_local_rank(["sft"]) == ["sft"]
    with pytest.raises(ConfigError, match=r"--local_rank 0: .* LOCAL_RANK, which is 1"):
        strip_local_rank(["--local_rank=0"])
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ConfigError, match="LOCAL_RANK, which is not set; leave it out"):
        strip_local_rank(["--local_rank", "1"])
