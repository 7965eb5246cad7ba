"""Ranks in a session: the failure of one ends the others at once, and is what they report."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from rlhf.errors import ConfigError
from rlhf.launchers import rank_monitor
from rlhf.launchers.coordinator import find_free_port
from rlhf.launchers.exit_status import INTERNAL_ERROR, USER_ERROR
from rlhf.launchers.rank_monitor import monitor_ranks
from rlhf.utils.process_info import ProcessInfo
from tests.forks import Forks

SCRIPT = """
import os, signal, sys, time
from rlhf.launchers.exit_status import ExitStatus
from rlhf.launchers import coordinator, rank_monitor
coordinator._SECONDS_FOR_CAUSES, rank_monitor._SECONDS_TO_LEAVE = 0.2, 0.3
import torch, torch.distributed as dist
from rlhf.errors import DataError
from rlhf.utils.process_info import current_process
from rlhf.engine import distributed
rank = current_process().rank
try:
    with rank_monitor.monitor_ranks(current_process(), {timeout}) as member:
        dist.init_process_group("gloo")
        distributed._process.client = member
        dist.barrier()
        {then}
except BaseException as error:
    sys.exit(ExitStatus.from_error(error).report())
finally:
    dist.destroy_process_group()
"""


def run_ranks(forks: Forks, folder: Path, then: str) -> list[tuple[int, str]]:
    """Return the exit code and last line of two ranks of another launcher, which lets them end by themselves."""
    port = find_free_port()
    script = SCRIPT.format(then=then, timeout=60.0)
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        forks.start("-c", script, environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=folder)
        for rank in range(2)
    ]
    lines_of = [process.communicate(timeout=100)[1].splitlines()[-1:] for process in processes]
    return [(process.returncode, "".join(lines)) for process, lines in zip(processes, lines_of)]


def test_all_ranks_report_the_error_of_one(forks: Forks, tmp_path: Path) -> None:
    """The other is in a collective, which ends with a lost connection."""
    then = "if rank: raise DataError('no rows')\n        distributed.all_sum(torch.ones(1))"
    first, other = run_ranks(forks, tmp_path, then)
    assert first == other
    assert first[0] == USER_ERROR and first[1].startswith("rlhf: error: rank 1 on ") and first[1].endswith(": no rows")


def test_lost_connection_is_reported_as_the_other_ranks_end(forks: Forks, tmp_path: Path) -> None:
    other, _ = run_ranks(forks, tmp_path, "os.kill(os.getpid(), 9) if rank else distributed.all_sum(torch.ones(1))")
    assert other[0] == INTERNAL_ERROR, other[1]
    assert other[1].startswith("rlhf: error: rank 1 on ") and other[1].endswith("exited and reported no error")


def test_signal_after_a_failure_does_not_hide_it(forks: Forks, tmp_path: Path) -> None:
    """torchrun signals the other ranks of its machine when one has failed, also while they report their own end."""
    then = """if rank: raise DataError('no rows')
        summarize = ExitStatus.summarize
        ExitStatus.summarize = lambda *a, **k: (os.kill(os.getpid(), signal.SIGTERM), summarize(*a, **k))[1]
        distributed.all_sum(torch.ones(1))"""
    first, other = run_ranks(forks, tmp_path, then)
    assert first == other
    assert first[0] == USER_ERROR and first[1].startswith("rlhf: error: rank 1 on ") and first[1].endswith(": no rows")


def test_rank_that_cannot_be_interrupted_is_ended(forks: Forks, tmp_path: Path) -> None:
    start = time.monotonic()
    other, killed = run_ranks(forks, tmp_path, "os.kill(os.getpid(), 9) if rank else time.sleep(90)")
    assert killed[0] == -9 and other[0] == INTERNAL_ERROR
    assert "rank 1 on " in other[1] and other[1].endswith("exited and reported no error")
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(("host", "why"), [("no-such-host.invalid", "no-such-host.invalid"), ("127.0.0.1", "in use")])
def test_unusable_address_is_one_line_on_rank_0(host: str, why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = ProcessInfo(0, 2, 0, 2, 0, host, port, "torchrun")
        with pytest.raises(ConfigError) as caught, monitor_ranks(place, 1.0):
            pass
    message = str(caught.value)
    assert (
        message.startswith(f"{host}:{port}: the ranks cannot meet there (") and why in message and "\n" not in message
    )
    assert message.endswith("); set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there")


@pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="reads the sockets of Linux")
def test_ranks_of_one_machine_listen_on_the_loopback_only(forks: Forks, tmp_path: Path) -> None:
    """torch's store, the coordinator and gloo."""
    then = """from tests.launchers.test_rank_monitor import listening
        print(*(address for address, _ in listening()), file=sys.stderr, flush=True)"""
    lines = [line for _, line in run_ranks(forks, tmp_path, then)]
    assert len(lines[0].split()) >= 3 and set(" ".join(lines).split()) == {"0100007F"}  # 127.0.0.1


@pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="reads the sockets of Linux")
def test_ranks_of_our_launcher_open_no_port_for_their_store(forks: Forks, tmp_path: Path) -> None:
    """They meet in a file that only the user can read."""
    script = f"""
import os
from pathlib import Path
from rlhf.launchers.rank_monitor import get_store, monitor_ranks
from rlhf.utils.process_info import current_process
from tests.launchers.test_rank_monitor import listening
process = current_process()
with monitor_ranks(process, 60.0):
    store = get_store(process, 60.0)
    store.set(str(process.rank), "here")
    assert store.get(str(1 - process.rank)) == b"here"
    assert Path(os.environ["RLHF_OUTCOMES"]).stat().st_mode & 0o777 == 0o700
    Path({str(tmp_path)!r}, str(process.rank)).write_text(str(len(listening())))
"""
    forks.ranks(2, script)
    sockets = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sockets == {"0": "1", "1": "0"}, "that of the coordinator"


def listening(process: int | str = "self") -> list[tuple[str, int]]:
    """Return the address, as the kernel writes it, and the port of each listening socket of a process."""
    names = {os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir() if os.path.lexists(path)}
    tables = [Path(f"/proc/{process}/net", table).read_text() for table in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table.splitlines()]
    places = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in names]
    return [(address, int(port, 16)) for address, port in places]


def test_gloo_uses_the_loopback_for_ranks_that_meet_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    rank_monitor._choose_gloo_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
