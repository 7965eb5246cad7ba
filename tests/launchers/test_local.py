"""Several processes on this machine: they end together, and the cause is reported, not its consequences."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf.errors import ConfigError
from rlhf.launchers import local
from rlhf.launchers.coordinator import find_free_port
from rlhf.launchers.exit_status import INTERNAL_ERROR, INTERRUPTED, USER_ERROR, ExitStatus
from rlhf.launchers.multinode import NodeSpec, join_rendezvous, serve_rendezvous
from rlhf.utils import signals

HEAD = """
import os, signal, sys, time
from rlhf.launchers.exit_status import ExitStatus
from rlhf.errors import DataError, RemoteRankError
rank = os.environ["RANK"]
def interrupt(number, frame):
    raise KeyboardInterrupt
signal.signal(signal.SIGUSR1, interrupt)
"""


@pytest.fixture(autouse=True)
def _logs_of_failed_ranks_go(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("logs")))


def start(script: str, count: int = 2) -> ExitStatus | None:
    return local.spawn_ranks(count, [sys.executable, "-c", HEAD + script])


@pytest.mark.parametrize("machine", [0, 1])
def test_every_rank_finds_its_place(tmp_path: Path, machine: int) -> None:
    """Alone on its machine, and on the second of two."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    script = f"{HEAD}open(f'{tmp_path}/{{rank}}', 'w').write(' '.join(os.environ[name] for name in {names}))"
    rendezvous = None
    if machine:
        port = find_free_port()
        nodes = [NodeSpec(number, 2, "127.0.0.1", port) for number in range(2)]
        folder = tmp_path / "run"
        with serve_rendezvous(nodes[0], folder, 30.0):
            first = threading.Thread(target=join_rendezvous, args=(nodes[0], folder, 2, 30.0))
            first.start()
            rendezvous = join_rendezvous(nodes[1], folder, 2, 30.0)
            first.join()
    assert local.spawn_ranks(2, [sys.executable, "-c", script], rendezvous=rendezvous) is None
    places = [path.read_text().rpartition(" ") for path in sorted(tmp_path.iterdir())]
    expected = (
        ["2 0 4 2 1 127.0.0.1", "3 1 4 2 1 127.0.0.1"] if machine else ["0 0 2 2 0 127.0.0.1", "1 1 2 2 0 127.0.0.1"]
    )
    assert [place for place, _, _ in places] == expected
    assert {int(port) for *_, port in places} == {rendezvous.port} if rendezvous else True


@pytest.mark.parametrize(
    ("script", "code", "line"),
    [
        (
            "sys.exit(ExitStatus.from_error(DataError('no rows')).report())",
            USER_ERROR,
            "rlhf: error: no rows",
        ),
        (  # the cause comes later than what it brought down
            "if rank == '0':\n"
            "    sys.exit(ExitStatus.from_error(RuntimeError('connection closed by peer')).report())\n"
            "time.sleep(0.2)\n"
            "sys.exit(ExitStatus.from_error(DataError('no rows')).report())",
            USER_ERROR,
            "rlhf: error: no rows",
        ),
        (  # and takes longer to end than a rank that only follows it
            "from rlhf.errors import RemoteRankError\n"
            "if rank == '1':\n"
            "    sys.exit(ExitStatus.from_error(RemoteRankError('saving failed on rank 0')).report())\n"
            "time.sleep(0.4)\n"
            "sys.exit(ExitStatus.from_error(DataError('no rows')).report())",
            USER_ERROR,
            "rlhf: error: no rows",
        ),
        (
            "rank == '1' and os.kill(os.getpid(), 9)\ntime.sleep(60 if rank == '0' else 0)",
            INTERNAL_ERROR,
            "rlhf: error: rank 1 was ended by SIGKILL, often for lack of memory, and reported no error",
        ),
    ],
    ids=["all", "late", "followed", "killed"],
)
def test_the_cause_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, script: str, code: int, line: str
) -> None:
    if request.node.callspec.id in ("followed", "killed"):
        monkeypatch.setattr(local, "_SECONDS_FOR_CAUSE", 0.1)
    status = start(script)
    assert status is not None and status.code == code and status.line.startswith(line)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("says", [True, False])
def test_only_the_log_that_the_error_names_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, says: bool
) -> None:
    """Rank 0 has no log: its output was shown. Nothing stays of a rank that has said nothing."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(local, "_SECONDS_FOR_CAUSE", 0.1)
    speaks = f"print('a word', flush=True) if {says} else None\n"
    status = start(f"{speaks}rank == '{rank}' and os.kill(os.getpid(), 9)\ntime.sleep(60 if rank != '{rank}' else 0)")
    assert status is not None
    named = re.search(r"; its output is in (\S+)$", status.line)
    assert bool(named) == (rank == 1 and says)
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert left == ([Path(named[1])] if named else []) and (named or not list(tmp_path.iterdir()))
    assert not named or "a word" in left[0].read_text()


def signal_ranks(folder: Path, *numbers: int) -> None:
    """Signal this process once both ranks have left their file in `folder`."""

    def send() -> None:
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.01)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.2)

    threading.Thread(target=send, daemon=True).start()


def until_signalled(folder: Path, then: str) -> str:
    """Return the script of a rank that works until a signal."""
    return f"""
try:
    open(f'{folder}/{{rank}}', 'w'); time.sleep(60)
except KeyboardInterrupt as error:
    {then}
"""


def test_after_a_signal_ranks_have_the_time_that_saving_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hurried = SimpleNamespace(monotonic=lambda: 1000 * time.monotonic(), sleep=time.sleep, time=time.time)
    monkeypatch.setattr(local, "time", hurried)  # half a second of the ranks is eight minutes to their launcher
    monkeypatch.setattr(local, "_SECONDS_AFTER_SIGNAL", 60_000)
    then = f"time.sleep(0.5); open(f'{tmp_path}/saved-{{rank}}', 'w'); "
    signal_ranks(tmp_path, signal.SIGTERM)
    status = start(until_signalled(tmp_path, then + "sys.exit(ExitStatus.from_error(error).report())"))
    assert status is not None and status.code == INTERRUPTED
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "saved-0", "saved-1"]


def test_ranks_that_a_second_signal_ends_are_interrupted_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have ended when their launcher looks again."""
    slow = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: time.sleep(1), time=time.time)
    monkeypatch.setattr(local, "time", slow)
    signal_ranks(tmp_path, signal.SIGINT, signal.SIGTERM)
    status = start(until_signalled(tmp_path, "time.sleep(60)"))
    assert status is not None and status.code == INTERRUPTED and "interrupted at once" in status.line


def test_rank_that_notices_the_end_of_another_after_a_second_signal_is_not_its_cause(tmp_path: Path) -> None:
    signal_ranks(tmp_path, signal.SIGINT, signal.SIGTERM)
    report = "ExitStatus.from_error(RemoteRankError('rank 0 exited and reported no error')).report()"
    status = start(until_signalled(tmp_path, f"rank == '1' and {report}; time.sleep(60)"))
    assert status is not None and status.code == INTERRUPTED and "interrupted at once" in status.line


def test_signal_before_the_start_starts_no_rank() -> None:
    with signals.interrupt_on_signals():
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            start("")
    assert not list(Path(tempfile.gettempdir()).iterdir())


def test_scheduler_that_signals_ranks_too_ends_none_at_once(tmp_path: Path) -> None:
    """SLURM sends its warning SIGUSR1, and later SIGTERM, to every process of a step or of a batch job."""
    script = f"""
from rlhf.utils import signals
with signals.collect_signals() as received:
    for name, count, own in (("warned", 1, signal.SIGUSR1), ("asked", 3, signal.SIGTERM)):
        open(f'{tmp_path}/{{name}}-{{rank}}', 'w')
        while len(received) < count: time.sleep(0.01)
        os.kill(os.getpid(), own)
open(f'{tmp_path}/saved-{{rank}}', 'w')
sys.exit(ExitStatus.from_error(KeyboardInterrupt()).report())
"""

    def send() -> None:
        for count, number in ((2, signal.SIGUSR1), (4, signal.SIGTERM)):
            while len(list(tmp_path.iterdir())) < count:
                time.sleep(0.01)
            os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    status = start(script)
    assert status is not None and status.code == INTERRUPTED
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]


@pytest.mark.parametrize(
    ("then", "numbers", "limit", "line"),
    [
        ("time.sleep(60)", (signal.SIGINT, signal.SIGTERM), None, "interrupted at once"),
        (
            "rank == '1' and os.kill(os.getpid(), 9); time.sleep(60)",
            (signal.SIGINT,),
            "_SECONDS_FOR_CAUSE",
            "rank 1 was ended by SIGKILL",
        ),
        ("time.sleep(0 if rank == '0' else 60)", (signal.SIGINT,), "_SECONDS_AFTER_SIGNAL", "interrupted at once"),
    ],
    ids=["second signal", "rank that dies", "rank that hangs"],
)
def test_ranks_that_do_not_end_after_a_signal_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, numbers: tuple[int, ...], limit: str | None, line: str
) -> None:
    if limit:
        monkeypatch.setattr(local, limit, 0.2)
    signal_ranks(tmp_path, *numbers)
    begin = time.monotonic()
    status = start(until_signalled(tmp_path, then))
    assert status is not None and line in status.line
    assert status.code == (INTERNAL_ERROR if "SIGKILL" in line else INTERRUPTED)
    assert time.monotonic() - begin < 30
    assert "SIGKILL" in line or not list(Path(tempfile.gettempdir()).iterdir()), "only logs of failed ranks stay"


def test_job_in_the_background_ignores_what_its_shell_does(tmp_path: Path) -> None:
    """A shell starts it with SIGINT ignored, nohup with SIGHUP; ranks inherit that."""
    rank = f"{HEAD}\nopen('{tmp_path}/' + rank, 'w').close()\ntime.sleep(30)"
    script = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)"
        f"\nfrom rlhf.launchers import local\noutcome = local.spawn_ranks(2, [sys.executable, '-c', {rank!r}])"
        "\nsys.exit(outcome.code if outcome else 0)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    while len(list(tmp_path.iterdir())) < 2:
        assert launcher.poll() is None
        time.sleep(0.02)
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGINT):
        launcher.send_signal(number)
        time.sleep(0.2)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=20) == INTERRUPTED


def alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    rank = (
        "import os, sys, time; from rlhf.launchers.local import end_with_launcher; end_with_launcher(); "
        f"path = '{tmp_path}/' + os.environ['RANK']; open(path + '.partial', 'w').write(str(os.getpid())); "
        "os.rename(path + '.partial', path); time.sleep(60)"
    )
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import sys; from rlhf.launchers import local; local.spawn_ranks(2, [sys.executable, '-c', {rank!r}])",
        ]
    )
    while not all((tmp_path / str(rank)).exists() for rank in range(2)):
        assert launcher.poll() is None
        time.sleep(0.02)
    processes = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert all(map(alive, processes))
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 20
    while any(map(alive, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_rank_ignores_modules_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert local.spawn_ranks(2, local.rank_command(["--version"])) is None


def test_ranks_are_started_unless_a_launcher_has_done_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert local.should_spawn(2)
    assert not local.should_spawn(1)
    assert not local.should_spawn(None)
    monkeypatch.setenv("RANK", "0")
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert not local.should_spawn(2)
    with pytest.raises(ConfigError, match="--ranks 4: a launcher has already started 2"):
        local.should_spawn(4)
