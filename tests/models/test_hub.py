"""A hub is asked once for a name; its answer, or the lack of one, is one line."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
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
    """Answers for the names in `ANSWERS`, never for `slow`; remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.closing = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        assert isinstance(self.server, Hub)
        self.server.asked.append(self.path)
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


def check(home: Path, endpoint: str, *names: str, kind: str = "model", **more: str) -> list[str]:
    """Return what `describe_availability` returns or raises for each name, in a new process."""
    script = f"""
import json, sys
from rlhf.models import hub
from rlhf.errors import RLHFError
hub._TIMEOUT = 1.0
said = []
for name in sys.argv[1:]:
    try:
        said.append(str(hub.describe_availability(name, {kind!r})))
    except RLHFError as error:
        said.append(f"{{type(error).__name__}}: {{error}}")
assert "torch" not in sys.modules
print(json.dumps(said))
"""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script, *names],
        capture_output=True,
        text=True,
        env=environment(home, endpoint, **more),
        cwd=home,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and time.monotonic() - begun < 15
    found: list[str] = json.loads(done.stdout)
    return found


def remembered(home: Path, name: str, kind: str, source: Path | None = None) -> None:
    """Leave a copy of a model or data set where the libraries keep what they have loaded."""
    if kind == "dataset":
        (home / "datasets" / name.replace("/", "___") / "default").mkdir(parents=True)
        return
    place = home / "hub" / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("abc")
    if source:
        shutil.copytree(source, place / "snapshots" / "abc")
    else:
        (place / "snapshots" / "abc").mkdir(parents=True)
        (place / "snapshots" / "abc" / "config.json").write_text("{}")


def address(hub: Hub) -> str:
    return f"http://127.0.0.1:{hub.server_address[1]}"


def closed_address() -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


def test_available_names_pass(hub: Hub, tmp_path: Path) -> None:
    names = ("good", "me/good", "renamed", "without-that-file")
    for name in names:
        remembered(tmp_path, name, "model")
    assert check(tmp_path, address(hub), *names) == ["None"] * 4


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_missing_copy_announces_a_download(hub: Hub, tmp_path: Path, kind: str) -> None:
    """No bar of the libraries' shows it."""
    remembered(tmp_path, "me/good", kind)
    said = check(tmp_path, address(hub), "me/good", "you/good", kind=kind)
    assert said == ["None", "you/good: not on this machine yet; downloading it from the hub"]


@pytest.mark.parametrize(
    ("kind", "error", "words", "asked"),
    [
        ("model", "ModelError", "no folder here, and the hub has no model of", "/me/absent/resolve/main/config.json"),
        (
            "dataset",
            "DataError",
            "no file or folder here, and the hub has no data set of",
            "/datasets/me/absent/resolve/main/.gitattributes",
        ),
    ],
)
def test_unknown_name_is_asked_for_once(
    hub: Hub, tmp_path: Path, kind: str, error: str, words: str, asked: str
) -> None:
    hub.asked.clear()
    (said,) = check(tmp_path, address(hub), "me/absent", kind=kind)
    assert said.startswith(f"{error}: me/absent: {words} this name; check the name")
    assert hub.asked == [asked]


def test_private_and_gated_names_say_what_to_do(hub: Hub, tmp_path: Path) -> None:
    private, closed, token = check(tmp_path, address(hub), "private", "closed", "token")
    assert "no model of this name" in private and "hf auth login" in private
    assert closed == "ModelError: closed: gated: accept its terms on its page, and log in (hf auth login)"
    assert "does not accept your token" in token


@pytest.mark.parametrize("kind", ["model", "dataset"])
@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("refused", "Connection refused"),
        ("unresolved", "N"),  # Name or service not known, in the words of the C library
        ("slow", "no answer within 1 s"),
        ("broken", "it answers 503 Service Unavailable"),
    ],
)
def test_unreachable_hub_uses_the_copy_with_a_note(hub: Hub, tmp_path: Path, kind: str, way: str, why: str) -> None:
    endpoint = {"refused": closed_address(), "unresolved": "http://hub.invalid"}.get(way, address(hub))
    remembered(tmp_path, f"me/{way}", kind)
    note, error = check(tmp_path, endpoint, f"me/{way}", f"other/{way}", kind=kind)
    place = {"model": "folder", "dataset": "file or folder"}[kind]
    assert note.startswith(f"me/{way}: the hub cannot be reached ({why}")
    assert note.endswith("; the copy on this machine is used")
    assert f"other/{way}: no {place} here, and the hub cannot be reached ({why}" in error
    assert error.endswith(f"); check the network, or name a local {place}")


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_variable_prevents_requests(hub: Hub, tmp_path: Path, variable: str) -> None:
    hub.asked.clear()
    remembered(tmp_path, "me/good", "model")
    known, unknown = check(tmp_path, address(hub), "me/good", "you/good", **{variable: "1"})
    assert known == "None"
    assert unknown == (
        f"ModelError: you/good: no folder here, and there is no copy of it on this machine, and {variable} is set; "
        f"unset {variable}, or name a local folder"
    )
    assert not hub.asked


def test_datasets_variable_switches_only_data_sets_off(hub: Hub, tmp_path: Path) -> None:
    remembered(tmp_path, "me/good", "dataset")
    known, unknown = check(tmp_path, address(hub), "me/good", "you/good", kind="dataset", HF_DATASETS_OFFLINE="1")
    assert known == "None" and unknown.endswith(
        "and HF_DATASETS_OFFLINE is set; unset HF_DATASETS_OFFLINE, or name a local file or folder"
    )
    hub.asked.clear()
    (said,) = check(tmp_path, address(hub), "you/good", HF_DATASETS_OFFLINE="1")
    assert said.endswith("downloading it from the hub") and hub.asked


SWITCHES = """
import json, sys
from huggingface_hub import constants
from rlhf.models import hub
from rlhf.errors import RLHFError
hub._TIMEOUT = 1.0

def switches():
    config = sys.modules.get("datasets.config")
    return [constants.HF_HUB_OFFLINE, config and config.HF_HUB_OFFLINE]

def check(name, kind):
    try:
        return hub.describe_availability(name, kind)
    except RLHFError as error:
        return str(error)

found = []
note = lambda: found.append(switches())
"""


def switches(home: Path, endpoint: str, code: str, **variables: str) -> list[list[bool | None]]:
    """What the libraries' switches are at each `note()` of a program: of the hub's, and of `datasets`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{SWITCHES}\n{code}\nprint(json.dumps(found))"],
        capture_output=True,
        text=True,
        env=environment(home, endpoint, **variables),
        cwd=home,
    )
    assert done.returncode == 0, done.stderr
    found: list[list[bool | None]] = json.loads(done.stdout)
    return found


def test_program_switch_prevents_requests_and_stays(hub: Hub, tmp_path: Path) -> None:
    remembered(tmp_path, "me/good", "model")
    hub.asked.clear()
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
    assert switches(tmp_path, address(hub), code) == [[True, None]] * 2 + [[False, True]] * 2
    assert not hub.asked


@pytest.mark.parametrize(("variables", "own"), [({}, False), ({"HF_DATASETS_OFFLINE": "1"}, True)])
@pytest.mark.parametrize("imported", ["before", "meanwhile"])
def test_unreachable_hub_is_switched_off_for_one_run(
    tmp_path: Path, variables: dict[str, str], own: bool, imported: str
) -> None:
    remembered(tmp_path, "me/good", "model")
    remembered(tmp_path, "me/good", "dataset")
    before, meanwhile = ("import datasets" if imported == when else "" for when in ("before", "meanwhile"))
    code = f"""
{before}
with hub.restore_offline_flags():
    hub.check_available("me/good", "model")
    {meanwhile}
    note()
    assert "HF_HUB_OFFLINE" not in str(check("me/good", "dataset")), "the switch is ours"
    note()
    check("you/good", "dataset")
note()
assert hub.check_available.cache_info().currsize == 0, "the next run asks again"
"""
    found = switches(tmp_path, closed_address(), code, **variables)
    assert found == [[True, True], [True, True], [False, own]]


def test_reachable_hub_is_switched_on_again(hub: Hub, tmp_path: Path) -> None:
    remembered(tmp_path, "me/broken", "model")
    code = """
check("me/broken", "model")
note()
check("me/good", "model")
note()
"""
    assert switches(tmp_path, address(hub), code) == [[True, None], [False, None]]


def test_paths_and_the_world_are_not_asked_for(hub: Hub, tmp_path: Path) -> None:
    hub.asked.clear()
    (tmp_path / "good").mkdir()
    assert check(tmp_path, address(hub), "good", "./absent", "a/b/c", "~/absent", "world") == ["None"] * 5
    assert not hub.asked


def test_copy_of_a_data_set_in_the_hubs_spelling(tmp_path: Path) -> None:
    (tmp_path / "datasets" / "me___hello_world-v1.0").mkdir(parents=True)
    (note,) = check(tmp_path, closed_address(), "me/HelloWorld-v1.0", kind="dataset")
    assert note.endswith("the copy on this machine is used")


def test_libraries_use_the_copy_at_once_and_silently(tmp_path: Path, model_folder: Path) -> None:
    """They would try five times, with a line and a longer pause each."""
    remembered(tmp_path, "me/tiny", "model", model_folder)
    script = """
from rlhf.reporting import verbosity
from rlhf.models.hub import describe_availability
verbosity.configure_logging(debug=False)
describe_availability("me/tiny", "model")
import time
from transformers import AutoModelForCausalLM
from rlhf.models.tokenizers import load_tokenizer
begun = time.monotonic()
load_tokenizer("me/tiny")
AutoModelForCausalLM.from_pretrained("me/tiny")
assert time.monotonic() - begun < 8
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment(tmp_path, closed_address()),
        cwd=tmp_path,
        timeout=40,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
