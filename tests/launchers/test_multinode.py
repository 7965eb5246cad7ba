"""Options for several machines, and what launchers learn of each other."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import ConfigError, RemoteRankError, RunError
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
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RLHF_SECRET"):
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


def meeting(folder: Path, *machines: dict[str, object]) -> list[object]:
    """Return the rendezvous or the error of each launcher; all share `folder`, unless one has another."""
    port = find_free_port()
    results: dict[int, object] = {}

    def go(number: int) -> None:
        machine = NodeSpec(number, 2, "127.0.0.1", port)
        options: Any = {"folder": folder, "ranks": 1} | machines[number]
        try:
            with serve_rendezvous(machine, folder, 1.0) if number == 0 else nullcontext():
                results[number] = join_rendezvous(machine, timeout=1.0, **options)
        except (ConfigError, RemoteRankError) as error:
            results[number] = error

    threads = [threading.Thread(target=go, args=(number,)) for number in range(len(machines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(machines))]


def test_launchers_meet_and_learn_where_the_ranks_do(tmp_path: Path) -> None:
    first, other = meeting(tmp_path, {}, {})
    assert isinstance(first, multinode.Rendezvous) and isinstance(other, multinode.Rendezvous)
    assert first.port == other.port and other.is_pending


def test_launchers_with_other_options_refuse(tmp_path: Path) -> None:
    for error in meeting(tmp_path, {"ranks": 1}, {"ranks": 2}):
        assert isinstance(error, ConfigError)
        assert "machines were started with different --ranks: 1 on machine 0" in str(error)


def test_refusal_of_the_first_machine_reaches_all(tmp_path: Path) -> None:
    _, other = meeting(tmp_path, {"refusal": ExitStatus(2, "rlhf: error: no such model folder", 0.0)}, {})
    assert isinstance(other, RemoteRankError)
    assert (str(other), other.exit_code) == ("no such model folder", 2)


def test_missing_machine_is_named(tmp_path: Path) -> None:
    (alone,) = meeting(tmp_path, {})
    assert isinstance(alone, RemoteRankError) and alone.exit_code == 2
    assert str(alone).startswith("machine 1 of 2 did not connect within 1 s; start all")


def test_secret_is_a_private_file_until_all_have_met(tmp_path: Path) -> None:
    """One that a killed process has left is replaced; a link is not followed."""
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    other.write_text("not a secret")
    (folder / ".rlhf.secret").symlink_to(other)
    with serve_rendezvous(NodeSpec(0, 2, "127.0.0.1", find_free_port()), folder, 1.0):
        file = folder / ".rlhf.secret"
        assert not file.is_symlink() and file.stat().st_mode & 0o777 == 0o600
        assert len(file.read_text()) == 64
    assert list(folder.iterdir()) == [] and other.read_text() == "not a secret"


def test_secret_is_not_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It appears after the old file was removed."""
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    other.write_text("mine")
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok: path.symlink_to(other))
    message = r"\.rlhf\.secret: cannot be written \(File exists\)"
    with (
        pytest.raises(RunError, match=message),
        serve_rendezvous(NodeSpec(0, 2, "127.0.0.1", find_free_port()), folder, 1.0),
    ):
        pass
    assert other.read_text() == "mine"


def test_machine_that_cannot_read_the_secret_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multinode, "_SECONDS_TO_APPEAR", 0.1)
    _, other = meeting(tmp_path / "run", {}, {"folder": tmp_path / "elsewhere"})
    assert isinstance(other, ConfigError)
    assert str(other) == (
        f"{tmp_path}/elsewhere/.rlhf.secret: the secret of machine 0 cannot be read (No such file or directory); "
        "choose an --output that all machines share, or set RLHF_SECRET to the same random text on all of them"
    )
    assert list(tmp_path.iterdir()) == []


def test_secret_of_the_user_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_SECRET", "a text")
    _, other = meeting(tmp_path / "run", {}, {"folder": tmp_path / "elsewhere"})
    assert isinstance(other, multinode.Rendezvous)
    assert list(tmp_path.iterdir()) == []


def test_machine_without_the_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / ".rlhf.secret").write_text("guessed")
    _, other = meeting(tmp_path / "run", {}, {"folder": tmp_path / "elsewhere"})
    assert isinstance(other, RemoteRankError) and str(other).startswith("RLHF_SECRET is not the one of machine 0")


def test_port_in_use_is_an_error(tmp_path: Path) -> None:
    node = NodeSpec(0, 2, "127.0.0.1", find_free_port())
    message = r": cannot bind: Address already in use; choose another port"
    with (
        serve_rendezvous(node, tmp_path / "a", 5.0),
        pytest.raises(ConfigError, match=message),
        serve_rendezvous(node, tmp_path / "b", 5.0),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_a_machine_waits_is_reported(tmp_path: Path) -> None:
    machine = NodeSpec(0, 2, "127.0.0.1", find_free_port())
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with (
            serve_rendezvous(machine, tmp_path / "run", 2.0),
            pytest.raises(Interrupted, match=r"^nothing was started$"),
        ):
            join_rendezvous(machine, tmp_path / "run", 1, timeout=2.0)
    except KeyboardInterrupt:  # which would end pytest
        pytest.fail("Ctrl-C was not turned into an error")
    timer.join()
