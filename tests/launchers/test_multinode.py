"""Options for several machines, and what launchers learn of each other."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from rlhf.errors import ConfigError, RemoteRankError
from rlhf.launchers import multinode
from rlhf.launchers.coordinator import find_free_port
from rlhf.launchers.exit_status import ExitStatus, Interrupted
from rlhf.launchers.multinode import NodeSpec, join_rendezvous, serve_rendezvous

SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "node[01-02]",
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_a_machine_among_others() -> None:
    assert multinode.resolve_node(2, 1, "node01:29400") == NodeSpec(1, 2, "node01", 29400)
    assert multinode.resolve_node(2, 0, "[fd00::1]:29400") == NodeSpec(0, 2, "fd00::1", 29400)
    assert multinode.resolve_node(None, None, None) is None
    assert multinode.resolve_node(1, None, None) is None
    assert multinode.resolve_node(1, 0, "a:1") is None  # a script's options, where it has one machine


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((None, 1, None), "--node-rank: is for several machines"),
        ((None, None, "a:1"), "--rendezvous: is for several machines"),
        ((2, None, "a:1"), "--nodes 2: also needs --node-rank"),
        ((2, 0, None), "--nodes 2: also needs --rendezvous"),
        ((2, 2, "a:1"), "--node-rank 2: must be from 0 to 1"),
        ((1, 5, "a:1"), "--node-rank 5: must be from 0 to 0"),
        ((1, 0, "junk"), "--rendezvous junk: must be HOST:PORT"),
        ((2, 0, "a"), "--rendezvous a: must be HOST:PORT"),
        ((2, 0, "a:70000"), "--rendezvous a:70000: must be HOST:PORT"),
    ],
)
def test_options_that_are_missing_or_contradict_each_other(
    options: tuple[int | None, int | None, str | None], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        multinode.resolve_node(*options)


def test_srun_with_one_task_per_machine_completes_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    node = multinode.resolve_node(2, None, None)
    assert node and (node.number, node.count, node.host) == (1, 2, "node01")
    with pytest.raises(ConfigError, match="--nodes 4: srun has started 2 processes"):
        multinode.resolve_node(4, None, None)


def meeting(*machines: dict[str, object]) -> list[object]:
    """Return the rendezvous or the error of each launcher."""
    port = find_free_port()
    results: dict[int, object] = {}

    def go(number: int) -> None:
        machine = NodeSpec(number, 2, "127.0.0.1", port)
        try:
            if number == 0:
                serve_rendezvous(machine, 1.0)
            results[number] = join_rendezvous(machine, timeout=1.0, **({"ranks": 1} | machines[number]))  # type: ignore[arg-type]
        except (ConfigError, RemoteRankError) as error:
            results[number] = error

    threads = [threading.Thread(target=go, args=(number,)) for number in range(len(machines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(machines))]


def test_launchers_meet_and_learn_where_the_ranks_do() -> None:
    first, other = meeting({}, {})
    assert isinstance(first, multinode.Rendezvous) and isinstance(other, multinode.Rendezvous)
    assert first.port == other.port and other.is_pending


def test_launchers_with_other_options_refuse() -> None:
    for error in meeting({"ranks": 1}, {"ranks": 2}):
        assert isinstance(error, ConfigError)
        assert "machines were started with different --ranks: 1 on machine 0" in str(error)


def test_refusal_of_the_first_machine_reaches_all() -> None:
    _, other = meeting({"refusal": ExitStatus(2, "rlhf: error: no such model folder", 0.0)}, {})
    assert isinstance(other, RemoteRankError)
    assert (str(other), other.exit_code) == ("no such model folder", 2)


def test_missing_machine_is_named() -> None:
    (alone,) = meeting({})
    assert isinstance(alone, RemoteRankError) and alone.exit_code == 2
    assert str(alone).startswith("machine 1 of 2 did not connect within 1 s; start all")


def test_port_in_use_is_an_error() -> None:
    port = find_free_port()
    serve_rendezvous(NodeSpec(0, 2, "127.0.0.1", port), 5.0)
    with pytest.raises(ConfigError, match=r": cannot bind: Address already in use; choose another port"):
        serve_rendezvous(NodeSpec(0, 2, "127.0.0.1", port), 5.0)


def test_ctrl_c_while_a_machine_waits_is_reported() -> None:
    machine = NodeSpec(0, 2, "127.0.0.1", find_free_port())
    serve_rendezvous(machine, 2.0)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(Interrupted, match=r"^nothing was started$"):
            join_rendezvous(machine, 1, timeout=2.0)
    except KeyboardInterrupt:  # which would end pytest
        pytest.fail("Ctrl-C was not turned into an error")
    timer.join()
