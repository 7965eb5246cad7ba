"""Several processes on this machine: they end together, and the cause is reported, not its consequences."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf.errors import ConfigError
from rlhf.launchers import local
from rlhf.launchers.coordinator import find_free_port
from rlhf.launchers.exit_status import INTERNAL_ERROR, INTERRUPTED, USER_ERROR, ExitStatus
from rlhf.launchers.multinode import NodeSpec, join_rendezvous, serve_rendezvous

HEAD = """
import os, signal, sys, time
from rlhf.launchers.exit_status import ExitStatus
from rlhf.errors import DataError
rank = os.environ["RANK"]
def interrupt(number, frame):
    raise KeyboardInterrupt
signal.signal(signal.SIGTERM, interrupt)
"""


@pytest.fixture(autouse=True)
def _logs_of_failed_ranks_go(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("logs")))


def start(script: str, count: int = 2) -> ExitStatus | None:
    return local.spawn_ranks(count, [sys.executable, "-c", HEAD + script])


def test_every_rank_finds_its_place(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    script = f"open(f'{tmp_path}/{{rank}}', 'w').write(' '.join(os.environ[name] for name in {names}))"
    assert start(script) is None
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["0 0 2 2 127.0.0.1", "1 1 2 2 127.0.0.1"]


def test_every_rank_of_the_second_machine_finds_its_place(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    script = f"{HEAD}open(f'{tmp_path}/{{rank}}', 'w').write(' '.join(os.environ[name] for name in {names}))"
    port = find_free_port()
    serve_rendezvous(NodeSpec(0, 2, "127.0.0.1", port), 30.0)
    other = threading.Thread(target=join_rendezvous, args=(NodeSpec(0, 2, "127.0.0.1", port), 2, 30.0))
    other.start()
    machine = NodeSpec(1, 2, "127.0.0.1", port)
    meeting = join_rendezvous(machine, 2, 30.0)
    assert local.spawn_ranks(2, [sys.executable, "-c", script], rendezvous=meeting) is None
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == [
        f"2 0 4 2 1 127.0.0.1 {meeting.port}",
        f"3 1 4 2 1 127.0.0.1 {meeting.port}",
    ]
    other.join()


def test_an_error_of_all_ranks_is_reported_once() -> None:
    outcome = start("sys.exit(ExitStatus.from_error(DataError('no rows')).report())")
    assert outcome is not None
    assert (outcome.code, outcome.line) == (USER_ERROR, "rlhf: error: no rows")


def test_the_cause_is_reported_and_not_what_it_brought_down() -> None:
    script = """
if rank == '0':
    sys.exit(ExitStatus.from_error(RuntimeError('connection closed by peer')).report())
time.sleep(0.5)
sys.exit(ExitStatus.from_error(DataError('no rows')).report())
"""
    outcome = start(script)
    assert outcome is not None
    assert outcome.line == "rlhf: error: no rows"


def test_a_rank_that_is_killed_ends_the_others() -> None:
    outcome = start("rank == '1' and os.kill(os.getpid(), 9)\ntime.sleep(60 if rank == '0' else 0)")
    assert outcome is not None
    assert outcome.code == INTERNAL_ERROR
    assert "rank 1 was ended by SIGKILL, often for lack of memory, and reported no error" in outcome.line


def test_a_signal_is_passed_on_and_the_run_counts_as_interrupted(tmp_path: Path) -> None:
    script = f"""
try:
    open(f'{tmp_path}/{{rank}}', 'w'); time.sleep(60)
except KeyboardInterrupt as error:
    sys.exit(ExitStatus.from_error(error).report())
"""

    signals(tmp_path, signal.SIGTERM)
    outcome = start(script)
    assert outcome is not None
    assert outcome.code == INTERRUPTED


def signals(folder: Path, *numbers: int) -> None:
    """Signal this process once both ranks have left their file in `folder`."""

    def send() -> None:
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.01)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.2)

    threading.Thread(target=send, daemon=True).start()


def test_after_a_signal_ranks_have_all_the_time_that_saving_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurried = SimpleNamespace(monotonic=lambda: 1000 * time.monotonic(), sleep=time.sleep, time=time.time)
    monkeypatch.setattr(local, "time", hurried)  # half a second of the ranks is eight minutes to their launcher
    monkeypatch.setattr(local, "_SECONDS_AFTER_SIGNAL", 60_000)
    script = f"""
try:
    open(f'{tmp_path}/{{rank}}', 'w'); time.sleep(60)
except KeyboardInterrupt as error:
    time.sleep(0.5)
    open(f'{tmp_path}/saved-{{rank}}', 'w')
    sys.exit(ExitStatus.from_error(error).report())
"""
    signals(tmp_path, signal.SIGINT)
    outcome = start(script)
    assert outcome is not None and outcome.code == INTERRUPTED
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "saved-0", "saved-1"]


def test_a_second_signal_ends_the_ranks_at_once(tmp_path: Path) -> None:
    script = f"""
try:
    open(f'{tmp_path}/{{rank}}', 'w'); time.sleep(60)
except KeyboardInterrupt:
    time.sleep(60)
"""
    signals(tmp_path, signal.SIGINT, signal.SIGTERM)
    begun = time.monotonic()
    outcome = start(script)
    assert outcome is not None and outcome.code == INTERRUPTED
    assert time.monotonic() - begun < 30


def test_a_rank_that_dies_after_a_signal_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_SECONDS_FOR_CAUSE", 0.2)
    script = f"""
try:
    open(f'{tmp_path}/{{rank}}', 'w'); time.sleep(60)
except KeyboardInterrupt:
    rank == '1' and os.kill(os.getpid(), 9)
    time.sleep(60)
"""
    signals(tmp_path, signal.SIGINT)
    begun = time.monotonic()
    outcome = start(script)
    assert outcome is not None and "rank 1 was ended by SIGKILL" in outcome.line
    assert time.monotonic() - begun < 30


def test_a_rank_that_had_to_be_killed_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_SECONDS_AFTER_SIGNAL", 0.2)
    script = f"""
try:
    open(f'{tmp_path}/{{rank}}', 'w'); time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0 if rank == '0' else 60)
"""
    signals(tmp_path, signal.SIGINT)
    outcome = start(script)
    assert outcome is not None and outcome.code == INTERRUPTED
    assert list(Path(tempfile.gettempdir()).iterdir()) == []


def test_a_rank_that_follows_another_leaves_it_the_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_SECONDS_FOR_CAUSE", 0.1)
    script = """
from rlhf.errors import RemoteRankError
if rank == '1':
    sys.exit(ExitStatus.from_error(RemoteRankError('saving failed on rank 0')).report())
time.sleep(1)
sys.exit(ExitStatus.from_error(DataError('no rows')).report())
"""
    outcome = start(script)
    assert outcome is not None and outcome.line == "rlhf: error: no rows"


def test_a_job_in_the_background_is_heard_and_what_it_ignores_stays_ignored(tmp_path: Path) -> None:
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


def test_modules_of_the_working_directory_are_not_taken_for_those_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
