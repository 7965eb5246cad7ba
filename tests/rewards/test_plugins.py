"""Reward functions that an installed plugin offers are named `plugin:...`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.config.schema import RewardFunctionConfig
from rlhf.errors import RewardError
from rlhf.rewards.process import RewardProcess, Sample

MODULE = """
from rlhf.rewards.hookspecs import hookimpl

@hookimpl
def rlhf_reward_functions():
    return {"brevity": "%s:brevity"}

def brevity(prompt, completion, row):
    return -len(completion)
"""


def install(folder: Path, name: str) -> None:
    """A distribution as pip leaves it, in a folder on Python's path."""
    (folder / f"{name}.py").write_text(MODULE % name)
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[rlhf.rewards]\n{name} = {name}\n")


def start(name: str) -> RewardProcess:
    return RewardProcess([RewardFunctionConfig(function=name)], 20)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "one_plugin")
    return tmp_path


@pytest.mark.usefixtures("site")
def test_plugin_function_has_its_name() -> None:
    process = start("plugin:brevity")
    assert process([Sample("p", "abc", {})]) == [[-3.0]]
    process.close()
    assert RewardFunctionConfig(function="plugin:brevity").label == "brevity"


def test_unknown_or_ambiguous_plugin_function_is_an_error(site: Path) -> None:
    with pytest.raises(RewardError, match="plugin:length: no plugin offers length; use one of brevity"):
        start("plugin:length")
    install(site, "two_plugin")
    with pytest.raises(RewardError, match=r"offered by several plugins, (one|two)_plugin and (one|two)_plugin"):
        start("plugin:brevity")
