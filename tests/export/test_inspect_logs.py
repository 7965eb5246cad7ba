"""Inspect AI: one log for each evaluation of PPO, which Inspect itself reads if it is installed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlhf.diagnosis.records import read_run
from rlhf.errors import RunError
from rlhf.export.formats import export_run
from rlhf.export.inspect_logs import format_inspect_logs
from tests.export.conftest import PROMPTS, ROWS


def logs_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in format_inspect_logs(read_run(run)).values()]


def test_each_evaluation_is_a_log_with_its_step_and_time(run: Path) -> None:
    logs = logs_of(run)
    assert [log["version"] for log in logs] == [2, 2] and {log["status"] for log in logs} == {"success"}
    assert [log["eval"]["model"] for log in logs] == ["mine_1/ppo@0", "mine_1/ppo@3"]
    assert [log["eval"]["metadata"]["step"] for log in logs] == [0, 3]
    assert [log["eval"]["created"] for log in logs] == ["2023-11-14T22:13:20+00:00", "2023-11-14T22:13:24+00:00"]


def test_samples_have_prompt_completion_and_scores(run: Path) -> None:
    for log, rows in zip(logs_of(run), ROWS.values()):
        for number, (sample, prompt, row) in enumerate(zip(log["samples"], PROMPTS, rows, strict=True), 1):
            assert (sample["id"], sample["epoch"], sample["input"]) == (number, 1, prompt)
            [choice] = sample["output"]["choices"]
            assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == row["completion"]
            assert choice["stop_reason"] == ("stop" if row["ended"] else "max_tokens")
            assert sample["output"]["completion"] == row["completion"]
            values = {name: score["value"] for name, score in sample["scores"].items()}
            truth = {name: row[name] for name in ("reward", "kl") if row[name] is not None}
            assert values == truth | {"approved": "C" if row["approved"] else "I"}


def test_results_are_means_of_the_scores(run: Path) -> None:
    [first, last] = [
        {score["name"]: {name: metric["value"] for name, metric in score["metrics"].items()} for score in scores}
        for scores in (log["results"]["scores"] for log in logs_of(run))
    ]
    assert first["reward"] == {"mean": 0.5, "stderr": pytest.approx(0.5)}
    assert first["approved"] == {"accuracy": 0.5, "stderr": pytest.approx(0.5)}
    assert last["reward"]["mean"] == 1.25 and last["kl"] == {"mean": 0.75}
    kl = next(score for score in logs_of(run)[1]["results"]["scores"] if score["name"] == "kl")
    assert (kl["scored_samples"], kl["unscored_samples"]) == (1, 1)


def test_names_are_those_that_inspect_lists(run: Path) -> None:
    """Inspect reads time, task and id from a name, divided by _, which a run's name may contain too."""
    names = list(format_inspect_logs(read_run(run)))
    assert re.fullmatch(r"2023-11-14T22-13-20\+00-00_mine-1-ppo-step-0_[0-9a-f]{22}\.json", names[0])


def test_export_again_replaces_the_logs(run: Path) -> None:
    first = export_run(read_run(run), "inspect")
    (run / "export/inspect/old.json").write_text("{}")
    assert export_run(read_run(run), "inspect") == first
    assert sorted((run / "export/inspect").iterdir()) == sorted(first)


def test_run_without_heldout_completions_is_refused(run: Path) -> None:
    (run / "ppo/heldout.jsonl").unlink()
    with pytest.raises(RunError, match="has no held-out completions of PPO to show in Inspect"):
        export_run(read_run(run), "inspect")
    assert not (run / "export").exists()


def test_inspect_reads_the_logs(run: Path) -> None:
    inspect_log = pytest.importorskip("inspect_ai.log")
    paths = export_run(read_run(run), "inspect")
    assert len(inspect_log.list_eval_logs(str(run / "export/inspect"))) == 2
    for path, rows in zip(paths, ROWS.values()):
        log = inspect_log.read_eval_log(str(path))
        assert (log.status, log.results.total_samples) == ("success", 2)
        assert [sample.input for sample in log.samples] == PROMPTS
        assert [sample.output.completion for sample in log.samples] == [row["completion"] for row in rows]
        assert [sample.scores["reward"].value for sample in log.samples] == [row["reward"] for row in rows]
