"""example_scripts/serving/README.md: its Python is run, and its server answers its request where one is installed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from rlhf.launchers.coordinator import find_free_port
from tests.helpers import user_environment

PAGE = (Path(__file__).parents[2] / "example_scripts" / "serving" / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `runs/mine` is a finished run."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(finished_run)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_reward_model_scores_as_it_does_in_training(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from rlhf.models.forward import ScalarHead, last_token_scores

    exec(blocks("python")[0], {})
    score = float(capsys.readouterr().out)
    tokenizer = AutoTokenizer.from_pretrained("runs/mine/reward/model")
    model = ScalarHead(AutoModelForSequenceClassification.from_pretrained("runs/mine/reward/model").eval())
    text = "<user>Where is the dog at home?<eos><assistant>The dog lives in the kennel.<eos>"
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        assert score == pytest.approx(last_token_scores(model(ids, ids * 0 + 1), ids * 0 + 1).item(), abs=1e-5)


@pytest.mark.slow
def test_transformers_serves_what_was_trained(folder: Path) -> None:
    for module in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(module, reason="the extra `serving` of transformers")
    commands = [shlex.split(line) for block in blocks("bash") for line in block.splitlines() if "serve " in line]
    (serve,) = [command for command in commands if command[0] == "transformers"]
    (request,) = (shlex.split(block) for block in blocks("bash") if block.startswith("curl"))
    address, body = request[1], request[-1]
    port = find_free_port()
    with started([*serve[1:], "--device", "cpu", "--port", str(port)]):
        answer = asked(address.replace("8000", str(port)), body)
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant" and answer["usage"]["completion_tokens"] > 0


@contextmanager
def started(arguments: list[str]) -> Iterator[None]:
    """`transformers ARGUMENTS` beside this process."""
    code = "import sys; from transformers.cli.transformers import main; sys.exit(main())"
    environment = user_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def asked(address: str, body: str) -> dict[str, object]:
    """The answer of a server that is starting."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with suppress(ConnectionError, urllib.error.URLError):
            asks = urllib.request.Request(address, body.encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(asks, timeout=60) as answer:
                return json.loads(answer.read())
        time.sleep(0.5)
    raise TimeoutError(address)
