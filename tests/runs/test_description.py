"""run.json, stage.json and metrics.jsonl that a person, or a disk, changed: one line, or the line is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import build_config
from rlhf.diagnosis.records import read_run
from rlhf.errors import RunError
from rlhf.runs.description import read_evaluations, write_evaluations
from rlhf.runs.directory import RunDirectory
from tests.diagnosis.records import write_run

DEEP = "[" * 100_000 + "]" * 100_000
SUMMARY: dict[str, Any] = {"stage": "sft", "title": "SFT", "steps": 2, "seconds": 1.0, "before": {}, "after": {}}

EDITS: dict[str, tuple[str, Any, str]] = {
    "settings that are a number": ("run.json", {"config": 0}, "config: Input should"),
    "a section that is a number": (
        "run.json",
        {"config": {"ppo": 5}},
        "config.ppo: Input should",
    ),
    "stages that are null": ("run.json", {"config": {}, "stages": None}, "stages: Input should"),
    "a stage that is a number": ("run.json", {"config": {}, "stages": {"sft": 5}}, r"stages\.sft: Input should"),
    "models without a content": (
        *("run.json", {"config": {}, "stages": {"sft": {"models": {"sft": {"path": "m"}}}}}),
        r"stages\.sft\.models\.sft\.identity: Field required",
    ),
    "data that are a number": ("run.json", {"config": {}, "data": 3}, "data: Input should"),
    "left out rows that are a text": (
        *("run.json", {"config": {}, "data": {"a": {"rows": 1, "digest": "b", "dropped": "c"}}}),
        r"data\.a\.dropped: Input should",
    ),
    "attention without a name": (
        *("run.json", {"config": {}, "accelerator": {"attention": {"actor": {}}}}),
        r"accelerator\.attention\.actor\.name: Field required",
    ),
    "an accelerator that is a text": ("run.json", {"config": {}, "accelerator": "x"}, "accelerator: Input should"),
    "commands without a time": ("run.json", {"config": {}, "invocations": [{}]}, r"invocations\.0\.command: Field"),
    "a list": ("run.json", [], "expected an object, got a list"),
    "a list in lists without end": ("run.json", None, "is not readable as JSON"),
    "a summary without its stage": ("sft/stage.json", {}, "stage: Field required"),
    "results that are a number": (
        "sft/stage.json",
        SUMMARY | {"after": 5},
        "after: Input should",
    ),
    "a time that is a text": ("sft/stage.json", SUMMARY | {"seconds": "x"}, "seconds: Input should"),
    "steps that are null": ("sft/stage.json", SUMMARY | {"steps": None}, "steps: Input should"),
    "warnings that are a number": (
        "sft/stage.json",
        SUMMARY | {"warnings": 5},
        "warnings: Input should",
    ),
    "a summary in lists without end": ("sft/stage.json", None, "is not readable as JSON"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_file_is_named_in_one_line(tmp_path: Path, edit: str) -> None:
    name, content, message = EDITS[edit]
    run = write_run(tmp_path / "run", {"sft": {"loss": [2.0, 1.0]}}, summaries={"sft": SUMMARY})
    directory, config = run.directory, build_config(run.description["config"])
    directory.check(config, stages=("sft", "reward"), resume=True)
    (tmp_path / "run" / name).write_text(DEEP if content is None else json.dumps(content))
    for read in (lambda: directory.check(config, stages=("sft", "reward"), resume=True), lambda: read_run(run.path)):
        with pytest.raises(RunError, match=message) as caught:
            read()
        assert "\n" not in str(caught.value) and str(tmp_path / "run" / name) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": {}}, "x.*: Input should"),
        ({"5": {"numbers": 5, "samples": [], "judged": []}}, r"5\.numbers: Input should"),
        ({"5": {"numbers": {}, "samples": []}}, r"5\.judged: Field required"),
        ({"0": {"numbers": {"kl": 2}, "samples": [{"prompt": "p"}], "judged": [1.5]}}, "was changed after rlhf had "),
    ],
)
def test_edited_evaluations_are_named_in_one_line(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "evaluations.json"
    write_evaluations(path, {"0": {"numbers": {"kl": 1}, "samples": [{"prompt": "p"}], "judged": [1.5]}})
    assert read_evaluations(path)["0"]["judged"] == [1.5]
    path.write_text(json.dumps({**json.loads(path.read_text()), "evaluations": content}))
    with pytest.raises(RunError, match=message):
        read_evaluations(path)


@pytest.mark.parametrize(
    "line", ["5", "null", "[]", '{"a": 1}', '{"step": null}', '{"step": "3"}', DEEP, "\x00", '{"st']
)
def test_line_that_is_no_record_is_left_out(tmp_path: Path, line: str) -> None:
    run = write_run(tmp_path / "run", {"sft": {"loss": [2.0, 1.0]}})
    records = run.directory.stage("sft").metrics
    records.write_text(f"{line}\n{records.read_text()}{line}\n")
    assert RunDirectory(run.path).stage("sft").started
    assert read_run(run.path).stages[0].curve("loss").values == [2.0, 1.0]
    records.write_text(f"{line}\n")
    assert not RunDirectory(run.path).stage("sft").started
