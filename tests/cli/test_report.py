"""`rlhf report`, `rlhf doctor` and `rlhf runs`: what they print and write, and how they refuse."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf.cli.app import app
from rlhf.diagnosis.records import find_runs
from rlhf.reporting.recorder import Recorder
from tests.diagnosis.records import write_run
from tests.helpers import user_environment

GOOD = {"sft": {"learning_rate": [1e-5, 1e-5], "grad_norm": [1.0, 1.0], "heldout_perplexity": [9.0, 5.0]}}
DOUBTFUL = {"sft": GOOD["sft"] | {"heldout_perplexity": [5.0, 9.0]}}
BAD = {"ppo": {"kl": [6.0, 6.0], "response_length": [12.0, 12.0]}}
"""The policy of the last differs from its reference before the first update."""


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_every_run_ends_with_its_report(finished_run: Path) -> None:
    page = (finished_run / "report.html").read_text(encoding="utf-8")
    rewards = [
        json.loads(line)["heldout_reward"]
        for line in (finished_run / "ppo/metrics.jsonl").read_text().splitlines()
        if "heldout_reward" in line
    ]
    assert f"{rewards[-1]:.4g}" in page and "supervised fine-tuning" in page and "complete" in page


def test_report_is_written_where_output_says(finished_run: Path, tmp_path: Path) -> None:
    done = call("report", finished_run, "-o", tmp_path / "page.html")
    assert done.exit_code == 0, done.exception
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert f"wrote {tmp_path / 'page.html'}" in done.stdout and "PPO: " in done.stdout
    assert call("report", finished_run, "-o", tmp_path / "page.html").exit_code == 0, "a second time"
    assert call("report", finished_run, "-o", tmp_path / "new/folder/page.html").exit_code == 0
    refused = call("report", finished_run, "-o", tmp_path)
    assert refused.exit_code != 0 and "is a folder; name the page's file" in str(refused.exception)


def test_report_replaces_that_of_the_run(tmp_path: Path) -> None:
    write_run(tmp_path / "run", GOOD)
    for _ in range(2):
        assert call("report", tmp_path / "run").exit_code == 0
    assert "from 9 to 5" in (tmp_path / "run/report.html").read_text(encoding="utf-8")


def test_report_of_a_folder_has_all_runs_in_it(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name, GOOD)
    refused = call("report", tmp_path)
    assert refused.exit_code != 0 and "--output" in str(refused.exception)
    assert call("report", tmp_path, "--output", tmp_path / "both.html").exit_code == 0
    page = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert "2 runs: one, two" in page


@pytest.mark.parametrize(
    ("numbers", "options", "code"),
    [(GOOD, [], 0), (DOUBTFUL, [], 0), (DOUBTFUL, ["--strict"], 3), (BAD, [], 3), (BAD, ["--json"], 3)],
)
def test_doctor_ends_with_3_if_a_run_is_wrong(tmp_path: Path, numbers: Any, options: list[str], code: int) -> None:
    write_run(tmp_path / "run", numbers)
    done = call("doctor", tmp_path / "run", *options)
    assert done.exit_code == code
    if "--json" in options:
        assert json.loads(done.stdout)["state"] == "wrong"


def test_doctor_says_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    write_run(tmp_path / "run", BAD)
    lines = call("doctor", tmp_path / "run").stdout.splitlines()
    assert lines[1].strip().startswith("✕ wrong  PPO: the policy differs from its reference before the first update")
    assert lines[2].strip() == (
        "check that policy and reference are the same model, at the same temperature and in the same precision"
    )
    assert not [line for line in lines if "fine" in line.split()], "checks that are fine need --all"
    write_run(tmp_path / "good", GOOD)
    assert not any("✓" in line for line in call("doctor", tmp_path / "good").stdout.splitlines()[2:])
    assert sum("✓" in line for line in call("doctor", tmp_path / "good", "--all").stdout.splitlines()) > 3


def test_doctor_of_several_runs_prints_a_list_of_documents(tmp_path: Path) -> None:
    for name, numbers in (("one", GOOD), ("two", BAD)):
        write_run(tmp_path / name, numbers)
    done = call("doctor", tmp_path / "one", tmp_path / "two", "--json")
    assert [document["state"] for document in json.loads(done.stdout)] == ["fine", "wrong"] and done.exit_code == 3


def test_run_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/a", GOOD)
    (tmp_path / "runs/b").mkdir()
    shutil.copy(tmp_path / "runs/a/run.json", tmp_path / "runs/b")
    page = tmp_path / "page.html"
    done = call("report", tmp_path / "runs", "-o", page)
    assert done.exit_code == 0 and "b  not readable: no step has been recorded yet" in done.stdout
    assert "<dt>b</dt><dd>no step has been recorded yet" in page.read_text(encoding="utf-8")
    examined = call("doctor", tmp_path / "runs")
    assert "from 9 to 5" in examined.stdout and str(examined.exception).startswith(f"{tmp_path / 'runs/b'}: no step")
    documents = json.loads(call("doctor", tmp_path / "runs", "--json").stdout)
    assert [document["state"] for document in documents] == ["fine", "not readable"]
    write_run(tmp_path / "runs/c", BAD)
    assert call("doctor", tmp_path / "runs").exit_code == 3
    assert "no step has been recorded yet" in str(call("doctor", tmp_path / "runs/b").exception)


def test_warning_whose_text_was_lost_ends_no_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", GOOD)
    with Recorder(run.stages[0].directory, resume_step=9) as recorder:
        recorder.text("warning", 2, "", {"rule": "loss"})
    assert call("report", tmp_path / "run").exit_code == 0


@pytest.mark.parametrize("command", ["report", "doctor", "runs"])
def test_folder_without_runs_is_refused_in_one_line(tmp_path: Path, command: str) -> None:
    for folder, words in ((tmp_path, "contains no run.json"), (tmp_path / "absent", "no such folder")):
        done = subprocess.run(
            [sys.executable, "-m", "rlhf", command, str(folder)], capture_output=True, text=True, env=user_environment()
        )
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_runs_are_listed_with_state_stage_and_verdict(tmp_path: Path) -> None:
    write_run(tmp_path / "done", GOOD, summaries={"sft": {"stage": "sft", "title": "SFT"}})
    write_run(tmp_path / "stopped", BAD)
    running = write_run(tmp_path / "running", GOOD)
    (running.path / ".rlhf.lock.owner").write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    killed = write_run(tmp_path / "killed", GOOD)
    (killed.path / ".rlhf.lock.owner").write_text(f"process {2**22 + 1} on {socket.gethostname()}\n")
    far = write_run(tmp_path / "far", GOOD)
    (far.path / ".rlhf.lock.owner").write_text("process 7 on another-host\n")
    lost = write_run(tmp_path / "lost", GOOD)
    (lost.path / ".rlhf.lock.owner").write_text("process 7 on another-host\n")
    metrics = lost.stages[0].directory.metrics
    metrics.write_text(re.sub(r'"time": [\d.]+', '"time": 1000.0', metrics.read_text()))
    (tmp_path / "broken").mkdir()
    shutil.copy(running.path / "run.json", tmp_path / "broken")
    rows = {Path(row["run"]).name: row for row in json.loads(call("runs", tmp_path, "--json").stdout)}
    states = {name: row["state"] for name, row in rows.items()}
    assert states == {
        "done": "complete",
        "stopped": "not complete",
        "running": "running",
        "killed": "not complete",
        "broken": "not readable",
        "far": "running",
        "lost": "not complete",
    }
    assert (rows["stopped"]["verdict"], rows["stopped"]["stage"], rows["stopped"]["step"]) == ("wrong", "ppo", 2)
    assert "no step has been recorded" in rows["broken"]["note"]
    table = call("runs", tmp_path, "--tsv").stdout.splitlines()
    assert table[0].split("\t") == ["run", "state", "stage", "step", "verdict", "note"] and len(table) == 8


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_folder_of_another_user_hides_no_run() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        write_run(Path(name, "run"), GOOD)
        Path(name, "private").mkdir(mode=0o700)
        child = os.fork()
        if not child:
            try:
                os.setuid(12345)
                os._exit([run.name for run in find_runs(Path(name))] != ["run"])
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_note_of_a_run_is_about_the_stage_that_its_verdict_comes_from(tmp_path: Path) -> None:
    rising = {"sft": {"heldout_perplexity": [9.0, 12.0]}, "reward": {"heldout_accuracy": [0.5, 0.9]}}
    write_run(tmp_path / "run", rising)
    (row,) = json.loads(call("runs", tmp_path, "--json").stdout)
    assert (row["stage"], row["verdict"]) == ("reward", "look here") and "perplexity went from 9 to 12" in row["note"]


@pytest.fixture
def served(tmp_path: Path) -> Any:
    """A run that is served by a process, its address, and the process."""
    run = write_run(tmp_path / "run", GOOD)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "rlhf", "report", str(run.path), "--serve", "--port", str(port)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=user_environment()
    )
    assert process.stdout
    assert f"http://127.0.0.1:{port}/" in process.stdout.readline()
    yield run, f"http://127.0.0.1:{port}/", process
    process.kill()
    process.wait()


def test_served_page_follows_the_run_and_ends_with_ctrl_c(served: Any) -> None:
    run, address, process = served
    page = urllib.request.urlopen(address, timeout=30).read().decode()
    assert "held-out perplexity went from 9 to 5" in page and '"refresh":0' in page
    (run.path / ".rlhf.lock.owner").write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    with run.stages[0].directory.metrics.open("a") as file:
        file.write(json.dumps({"stage": "sft", "step": 9, "time": 0.0, "heldout_perplexity": 2.5}) + "\n")
    page = urllib.request.urlopen(address, timeout=30).read().decode()
    assert "held-out perplexity went from 9 to 2.5" in page
    assert int(re.search(r'"refresh":(\d+)', page)[1]) > 0, "a page of a running run loads itself again"  # type: ignore[index]
    (run.path / "run.json").write_text("{")
    with pytest.raises(urllib.error.HTTPError) as failed:
        urllib.request.urlopen(address, timeout=30)
    assert failed.value.code == 500 and b"http-equiv=refresh" in failed.value.read(), "it tries again"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0


def test_closed_page_prints_nothing(served: Any) -> None:
    _, address, process = served
    host, port = address.removeprefix("http://").strip("/").split(":")
    for _ in range(3):
        with socket.create_connection((host, int(port))) as browser:
            browser.sendall(f"GET / HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
            reset = struct.pack("ii", 1, 0)  # at once, as when a tab is closed while the page loads
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    assert urllib.request.urlopen(address, timeout=30).status == 200
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[1] == ""


@pytest.mark.parametrize(("host", "path", "code"), [("evil.example", "", 403), (None, "run.json", 404)])
def test_server_answers_no_other_host_and_no_other_path(served: Any, host: str | None, path: str, code: int) -> None:
    _, address, _ = served
    request = urllib.request.Request(address + path, headers={"Host": host} if host else {})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert refused.value.code == code


def test_port_in_use_is_refused_in_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", GOOD)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = call("report", run.path, "--serve", "--port", taken.getsockname()[1])
    assert done.exit_code != 0 and "is in use; choose another" in str(done.exception)
