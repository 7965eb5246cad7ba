"""A hub is asked once for a name; its answer, or the lack of one, is one line."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ANSWERS = {
    "good": (200, {}),
    "renamed": (307, {"Location": "/good/elsewhere"}),
    "without-that-file": (404, {"X-Error-Code": "EntryNotFound"}),
    "absent": (404, {"X-Error-Code": "RepoNotFound"}),
    "private": (401, {}),
    "closed": (401, {"X-Error-Code": "GatedRepo"}),
    "token": (401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
    "broken": (503, {}),
}


class Hub(ThreadingHTTPServer):
    """Answers for the names in `ANSWERS`, never for `slow`; remembers its requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[str] = []
        self.closing = threading.Event()
        self.address = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        assert isinstance(self.server, Hub)
        self.server.requests.append(self.path)
        name = next((name for name in (*ANSWERS, "slow") if name in self.path), "absent")
        if name == "slow":
            self.server.closing.wait(30)
            return
        status, headers = ANSWERS[name]
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.closing.set()
    server.shutdown()


def environment(home: Path, endpoint: str, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return inherited | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint} | more


def run_script(home: Path, endpoint: str, script: str, *arguments: str, **variables: str) -> Any:
    """Return what a script prints as JSON, in a new process that must write nothing to its standard error."""
    preamble = "import json, sys\nfrom rlhf.errors import RLHFError\nfrom rlhf.models import hub\n"
    process = subprocess.run(
        [sys.executable, "-c", preamble + script, *arguments],
        capture_output=True,
        text=True,
        env=environment(home, endpoint, **variables),
        cwd=home,
        timeout=60,
    )
    assert (process.returncode, process.stderr) == (0, "")
    return json.loads(process.stdout)


def check(home: Path, endpoint: str, *names: str, **variables: str) -> list[str | None]:
    """Return what `describe_availability` returns or raises for each name; those of data sets begin with `data:`."""
    script = """
results = []
for name in sys.argv[1:]:
    hub._TIMEOUT = 0.2 if "slow" in name else 10.0
    try:
        results.append(hub.describe_availability(name.removeprefix("data:"), "dataset" if "data:" in name else "model"))
    except RLHFError as error:
        results.append(f"{type(error).__name__}: {error}")
assert "torch" not in sys.modules
print(json.dumps(results))
"""
    results: list[str | None] = run_script(home, endpoint, script, *names, **variables)
    return results


def save_copy(home: Path, *names: str, source: Path | None = None) -> None:
    """Leave copies of models or data sets where the libraries store what they have loaded."""
    for name in names:
        if name.startswith("data:"):
            (home / "datasets" / name.removeprefix("data:").replace("/", "___") / "default").mkdir(parents=True)
            continue
        folder = home / "hub" / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("abc")
        if source:
            shutil.copytree(source, folder / "snapshots" / "abc")
        else:
            (folder / "snapshots" / "abc").mkdir(parents=True)
            (folder / "snapshots" / "abc" / "config.json").write_text("{}")


def closed_address() -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


def test_answers_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    """Of those without a copy, a line announces the download, since the libraries' bars are off."""
    available = ("good", "me/good", "renamed", "without-that-file", "data:me/good")
    save_copy(tmp_path, *available)
    expected = dict.fromkeys(available, "") | {
        "you/good": "you/good: not on this machine yet; downloading it from the hub",
        "data:you/good": "you/good: not on this machine yet; downloading it from the hub",
        "me/absent": "ModelError: me/absent: no folder here, and the hub has no model of this name; check the name",
        "data:me/absent": "DataError: me/absent: no file or folder here, and the hub has no data set of this name;",
        "private": "ModelError: private: no folder here, and the hub has no model of this name; check the name",
        "closed": "ModelError: closed: gated: accept its terms on its page, and log in (hf auth login)",
        "token": "ModelError: token: the hub does not accept your token; log in again",
    }
    hub.requests.clear()
    for answer, start in zip(check(tmp_path, hub.address, *expected), expected.values(), strict=True):
        assert (answer or "").startswith(start) and bool(answer) == bool(start)
    requests = [path for path in hub.requests if "absent" in path]
    assert requests == ["/me/absent/resolve/main/config.json", "/datasets/me/absent/resolve/main/.gitattributes"]


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("refused", "Connection refused"),
        ("unresolved", "N"),  # Name or service not known, in the words of the C library
        ("slow", "no answer within 0.2 s"),
        ("broken", "it answers 503 Service Unavailable"),
    ],
)
def test_unreachable_hub_uses_the_copy_with_a_note(hub: Hub, tmp_path: Path, way: str, reason: str) -> None:
    endpoint = {"refused": closed_address(), "unresolved": "http://hub.invalid"}.get(way, hub.address)
    names = [f"{kind}{owner}/{way}" for kind in ("", "data:") for owner in ("me", "other")]
    save_copy(tmp_path, names[0], names[2])
    answers = check(tmp_path, endpoint, *names)
    for note, error, place in ((*answers[:2], "folder"), (*answers[2:], "file or folder")):
        assert note and note.startswith(f"me/{way}: the hub cannot be reached ({reason}")
        assert note.endswith("; the copy on this machine is used")
        assert error and f"other/{way}: no {place} here, and the hub cannot be reached ({reason}" in error
        assert error.endswith(f"); check the network, or name a local {place}")


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_offline_variable_prevents_requests(hub: Hub, tmp_path: Path, variable: str) -> None:
    kind, place = ("data:", "file or folder") if "DATASETS" in variable else ("", "folder")
    hub.requests.clear()
    save_copy(tmp_path, f"{kind}me/good")
    names = [f"{kind}me/good", f"{kind}you/good", *(["you/good"] if kind else [])]
    known, unknown, *notes = check(tmp_path, hub.address, *names, **{variable: "1"})
    assert known is None and unknown
    assert unknown.endswith(
        f"Error: you/good: no {place} here, and there is no copy of it on this machine, and {variable} is set; "
        f"unset {variable}, or name a local {place}"
    )
    for note in notes:  # models are still asked for
        assert note and note.endswith("downloading it from the hub")
    assert hub.requests == ["/you/good/resolve/main/config.json"] * len(notes)


SWITCHES = """
import logging
from huggingface_hub import constants
logging.disable(logging.WARNING)
states = []

def note():
    config = sys.modules.get("datasets.config")
    states.append([constants.HF_HUB_OFFLINE, config and config.HF_HUB_OFFLINE])

def check(name, kind):
    try:
        return hub.describe_availability(name, kind)
    except RLHFError as error:
        return str(error)
"""


def run_switches(home: Path, endpoint: str, code: str, **variables: str) -> Any:
    """Return the offline flags of huggingface_hub and datasets at each `note()` of a program."""
    return run_script(home, endpoint, f"{SWITCHES}\n{code}\nprint(json.dumps(states))", **variables)


def test_program_switch_prevents_requests_and_stays(hub: Hub, tmp_path: Path) -> None:
    save_copy(tmp_path, "me/good")
    hub.requests.clear()
    code = """
constants.HF_HUB_OFFLINE = True
with hub.restore_offline_flags():
    assert check("me/good", "model") is None
    assert "huggingface_hub.constants.HF_HUB_OFFLINE is set" in check("you/good", "model")
    assert "huggingface_hub.constants.HF_HUB_OFFLINE is set" in check("you/good", "dataset")
    note()
note()
constants.HF_HUB_OFFLINE = False
import datasets
datasets.config.HF_HUB_OFFLINE = True
with hub.restore_offline_flags():
    assert "datasets.config.HF_HUB_OFFLINE is set" in check("you/absent", "dataset")
    note()
note()
"""
    assert run_switches(tmp_path, hub.address, code) == [[True, None]] * 2 + [[False, True]] * 2
    assert not hub.requests


@pytest.mark.parametrize(("variables", "own"), [({}, False), ({"HF_DATASETS_OFFLINE": "1"}, True)])
def test_unreachable_hub_is_switched_off_for_one_run(tmp_path: Path, variables: dict[str, str], own: bool) -> None:
    save_copy(tmp_path, "me/good", "data:me/good")
    code = """
with hub.restore_offline_flags():
    hub.check_available("me/good", "model")
    note()
    import datasets
    note()
    assert "HF_HUB_OFFLINE" not in str(check("me/good", "dataset")), "the switch is ours"
    note()
    check("you/good", "dataset")
note()
assert hub.check_available.cache_info().currsize == 0, "the next run asks again"
"""
    states = run_switches(tmp_path, closed_address(), code, **variables)
    assert states == [[True, None], [True, True], [True, True], [False, own]]


def test_reachable_hub_is_switched_on_again(hub: Hub, tmp_path: Path) -> None:
    save_copy(tmp_path, "me/broken", "me/good")
    code = 'import datasets\ncheck("me/broken", "model")\nnote()\ncheck("me/good", "model")\nnote()'
    assert run_switches(tmp_path, hub.address, code) == [[True, True], [False, False]]


def test_paths_and_the_world_are_not_asked_for(hub: Hub, tmp_path: Path) -> None:
    hub.requests.clear()
    (tmp_path / "good").mkdir()
    assert check(tmp_path, hub.address, "good", "./absent", "a/b/c", "~/absent", "world") == [None] * 5
    assert not hub.requests


def test_copy_of_a_data_set_in_the_hubs_spelling(tmp_path: Path) -> None:
    (tmp_path / "datasets" / "me___hello_world-v1.0").mkdir(parents=True)
    (note,) = check(tmp_path, closed_address(), "data:me/HelloWorld-v1.0")
    assert note and note.endswith("the copy on this machine is used")


@pytest.mark.slow
def test_libraries_use_the_copy_at_once_and_silently(tmp_path: Path, model_folder: Path) -> None:
    """They would try five times, with a line and a longer pause each."""
    save_copy(tmp_path, "me/tiny", source=model_folder)
    script = """
from rlhf.reporting import verbosity
verbosity.configure_logging(debug=False)
hub.describe_availability("me/tiny", "model")
import time
from transformers import AutoModelForCausalLM
from rlhf.models.tokenizers import load_tokenizer
start = time.monotonic()
load_tokenizer("me/tiny")
AutoModelForCausalLM.from_pretrained("me/tiny")
print(time.monotonic() - start)
"""
    assert run_script(tmp_path, closed_address(), script) < 8
