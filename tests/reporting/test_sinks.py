"""Sinks: found by name, given each record of a stage, and never able to end a run."""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accelerators import Accelerator
from rlhf.config.schema import load_config
from rlhf.errors import ConfigError
from rlhf.reporting import hookspecs, sinks
from rlhf.reporting.console import console
from rlhf.reporting.hookspecs import SinkStage
from rlhf.reporting.recorder import Recorder
from rlhf.reporting.sinks import SinkGroup, check_sinks, describe_stage, find_sink
from rlhf.runs.directory import RunDirectory
from rlhf.trainers import pipeline, preflight

OFFER = """
from rlhf.reporting.hookspecs import hookimpl

@hookimpl
def rlhf_sinks():
    return {"lines": "%s:Lines", "gone": "%s:Gone"}

made = []

class Lines:
    fails_in, error = "", ValueError("no space\\non the server")

    def __init__(self, stage):
        self.stage, self.records, self.closed = stage, [], 0
        made.append(self)
        self.do("init")

    def do(self, what):
        if what == self.fails_in:
            raise self.error

    def write(self, record):
        self.do("write")
        self.records.append(record)

    def close(self):
        self.closed += 1
        self.do("close")
"""


def install(folder: Path, name: str, module: str) -> None:
    """A distribution as pip leaves it, in a folder on Python's path."""
    (folder / f"{name}.py").write_text(module)
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[rlhf.sinks]\n{name} = {name}\n")


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of an installed plugin."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "site").mkdir()
    install(tmp_path / "site", "one_sink", OFFER.replace("%s", "one_sink"))
    import one_sink  # type: ignore[import-not-found]

    yield one_sink
    for name in ("one_sink", "two_sink", "broken_sink"):
        sys.modules.pop(name, None)


@pytest.fixture
def stage(tmp_path: Path) -> SinkStage:
    return SinkStage("runs", "mine", "sft", {"seed": 0}, tmp_path)


def test_sink_receives_each_record_as_it_is_on_disk(plugin: Any, stage: SinkStage, tmp_path: Path) -> None:
    place = RunDirectory(tmp_path / "run").stage("sft")
    with Recorder(place, sink=SinkGroup(["lines"], stage)) as recorder:
        recorder.log(1, {"loss": 0.5, "kl": float("nan")})
        recorder.text("sample_0", 2, "moo", {"sample": {"kl": 0.25}})
        [sink] = plugin.made
        assert sink.stage is stage and sink.closed == 0
    assert sink.records == [json.loads(line) for line in place.metrics.read_text().splitlines()]
    assert [record["step"] for record in sink.records] == [1, 2] and sink.closed == 1


def test_only_the_rank_that_records_makes_sinks(plugin: Any, stage: SinkStage, tmp_path: Path) -> None:
    place = RunDirectory(tmp_path / "run").stage("sft")
    with Recorder(place, enabled=False, sink=SinkGroup(["lines"], stage)) as recorder:
        recorder.log(1, {"loss": 0.5})
    assert plugin.made == []


@pytest.mark.parametrize("error", [ValueError("no space\non the server"), SystemExit(3)])
@pytest.mark.parametrize("fails_in", ["init", "write", "close"])
def test_failing_sink_is_switched_off_with_one_note(
    plugin: Any,
    stage: SinkStage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fails_in: str,
    error: BaseException,
) -> None:
    class Other(plugin.Lines):
        pass

    plugin.Gone = Other
    monkeypatch.setattr(plugin.Lines, "fails_in", fails_in)
    monkeypatch.setattr(plugin.Lines, "error", error)
    Other.fails_in = ""
    monkeypatch.setattr(console, "stderr", False)
    place = RunDirectory(tmp_path / "run").stage("sft")
    with Recorder(place, sink=SinkGroup(["lines", "gone"], stage)) as recorder:
        for step in (1, 2, 3):
            recorder.log(step, {"loss": 0.5})
    assert len(place.metrics.read_text().splitlines()) == 3
    other = next(sink for sink in plugin.made if isinstance(sink, Other))
    assert len(other.records) == 3 and other.closed == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if "note" in line]
    assert line.startswith("sft: note: the sink lines has failed (")


@pytest.mark.parametrize("hangs_in", ["init", "write", "close"])
def test_sink_that_never_returns_is_switched_off(
    plugin: Any,
    stage: SinkStage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    hangs_in: str,
) -> None:
    released = threading.Event()
    monkeypatch.setattr(plugin.Lines, "do", lambda self, what: what == hangs_in and released.wait())
    monkeypatch.setattr(console, "stderr", False)
    place = RunDirectory(tmp_path / "run").stage("sft")
    with Recorder(place, sink=SinkGroup(["lines"], stage, timeout=0.2)) as recorder:
        for step in (1, 2, 3):
            recorder.log(step, {"loss": 0.5})
    released.set()
    assert len(place.metrics.read_text().splitlines()) == 3
    [line] = [line for line in capsys.readouterr().out.splitlines() if "note" in line]
    assert line.startswith(
        "sft: note: the sink lines has failed (it did not return within 0.2 s, sinks_timeout) and is"
    )


def test_interruption_in_a_sink_ends_the_run(
    plugin: Any, stage: SinkStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin.Lines, "fails_in", "write")
    monkeypatch.setattr(plugin.Lines, "error", KeyboardInterrupt())
    recorder = Recorder(RunDirectory(tmp_path / "run").stage("sft"), sink=SinkGroup(["lines"], stage))
    with pytest.raises(KeyboardInterrupt), recorder:
        recorder.log(1, {"loss": 0.5})


def test_unknown_sink_is_an_error_with_the_known_names(plugin: Any) -> None:
    with pytest.raises(ConfigError, match=r"^sinks: no sink 'line'; use one of gone, lines, trackio, wandb$"):
        check_sinks(load_config(None, ["sinks=[line]"]))


def test_sink_of_several_plugins_or_of_a_broken_one_is_an_error(plugin: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^sinks: gone: cannot import one_sink:Gone \(AttributeError: .*; repair"):
        find_sink("gone", "sinks")
    install(tmp_path / "site", "two_sink", OFFER.replace("%s", "two_sink"))
    with pytest.raises(ConfigError, match=r"lines is offered by several plugins, (one|two)_sink and (one|two)_sink"):
        find_sink("lines", "sinks")
    install(tmp_path / "site", "broken_sink", "import absent_library")
    with pytest.raises(ConfigError, match=r"the plugin broken_sink cannot be imported \(ModuleNotFoundError"):
        find_sink("trackio", "sinks")


@pytest.mark.parametrize("answer", ["None", "['lines']", "1 / 0"])
def test_plugin_that_does_not_say_its_sinks_is_an_error(plugin: Any, tmp_path: Path, answer: str) -> None:
    offer = f"from rlhf.reporting.hookspecs import hookimpl\n@hookimpl\ndef rlhf_sinks():\n    return {answer}\n"
    install(tmp_path / "site", "two_sink", offer)
    with pytest.raises(ConfigError, match=r"^sinks: the plugin two_sink does not say which sinks it offers \("):
        find_sink("lines", "sinks")


def test_damaged_metadata_of_a_package_is_an_error_of_sinks(plugin: Any, tmp_path: Path) -> None:
    about = tmp_path / "site" / "damaged-1.0.dist-info"
    about.mkdir()
    (about / "entry_points.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"^sinks: metadata of an installed package cannot be read \("):
        find_sink("lines", "sinks")


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_missing_package_is_reported_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda package: None)
    config = load_config(None, [f"output='{tmp_path / 'run'}'", f"sinks=[{name}]"])
    with pytest.raises(ConfigError, match=f"^sinks: {name} is not installed; run: pip install {name}$"):
        preflight.check(config, ("sft",), 1)
    assert not (tmp_path / "run").exists()


def test_plugin_in_the_hooks_docstring_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (inspect.getdoc(hookspecs.rlhf_sinks) or "").partition("\n\n")[2]
    (tmp_path / "site").mkdir()
    install(tmp_path / "site", "my_sink", textwrap.dedent(lines))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    place = RunDirectory(tmp_path / "run").stage("ppo")
    config = load_config(None, ["sinks=[rewards]"])
    check_sinks(config)
    with Recorder(place, sink=SinkGroup(config.sinks, describe_stage(place, config))) as recorder:
        recorder.log(1, {"reward": 0.5})
        recorder.log(1, {"heldout_reward": 0.75})
        recorder.log(2, {"reward": 1.5})
    assert (place.path / "rewards.txt").read_text() == "1 0.5\n2 1.5\n"
    sys.modules.pop("my_sink")


def test_stage_of_a_run_is_described_by_its_folders(tmp_path: Path) -> None:
    config = load_config(None, ["seed=5"])
    described = describe_stage(RunDirectory(tmp_path / "runs/mine").stage("ppo"), config)
    assert (described.project, described.run, described.stage) == ("runs", "mine", "ppo")
    assert described.config["seed"] == 5 and described.folder == tmp_path / "runs/mine/ppo"


def test_stage_passes_its_records_to_the_sinks_of_the_recipe(
    accelerator: Accelerator, plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "record_models", lambda context: None)
    config = load_config(None, [f"output='{tmp_path / 'run'}'", "sinks=[lines]", "precision=fp32"])
    with pipeline.stage_context("sft", config, accelerator, RunDirectory(config.output)) as context:
        context.recorder.log(1, {"loss": 0.5})
    [sink] = plugin.made
    assert [record["loss"] for record in sink.records] == [0.5] and sink.closed == 1
    assert (sink.stage.run, sink.stage.stage) == ("run", "sft")
