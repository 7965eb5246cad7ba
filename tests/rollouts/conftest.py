"""A run that is about to start PPO, and servers for its rollouts."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.processes import Server


@pytest.fixture(scope="module")
def begun(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose SFT and reward model are finished."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    shutil.copytree(finished_run, folder, ignore=lambda path, names: ["ppo"] if "sft" in names else [])
    return folder


@pytest.fixture
def serve(forks: Any, begun: Path) -> Iterator[Callable[..., Server]]:
    """Start rollout servers, and end them after the test."""
    started: list[Server] = []

    def start_server(*options: str, model: Path | None = None, **settings: Any) -> Server:
        started.append(Server(forks, model or begun / "sft" / "model", "--rollouts", *options, **settings))
        return started[-1]

    yield start_server
    for server in started:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.communicate()
