"""Write PPO's held-out evaluations as logs of Inspect AI (EvalLog in JSON, version 2), which `inspect view` opens.

Inspect's log is one model on one set of prompts, and the weights differ at each evaluation. So each evaluation is a log
with a model name such as `mine/ppo@40`: `inspect view` lists them with their mean scores, and the same prompt has the
same sample id in each. Inspect itself is not needed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from statistics import fmean, stdev
from typing import Any

from rlhf.diagnosis.records import RunRecords, StageRecords
from rlhf.errors import RunError
from rlhf.utils.jsonl import read_records

_NUMBERS = ("reward", "kl")
"""The scores that are numbers; `approved`, of the embedded data, is Inspect's C (correct) or I (incorrect)."""


def format_inspect_logs(run: RunRecords) -> dict[str, str]:
    """Return a log for each held-out evaluation of PPO, by the names that Inspect gives to files.

    Raises:
        RunError: the run has recorded no held-out completions.
    """
    stage = run.stage("ppo")
    if not stage or not stage.heldout:
        raise RunError(
            f"{run.path}: has no held-out completions of PPO to show in Inspect (ppo/heldout.jsonl); "
            "export it --to csv instead"
        )
    times = _read_times(stage)
    logs = {}
    for step, rows in stage.heldout.items():
        created = datetime.fromtimestamp(times.get(step, 0.0), timezone.utc).isoformat(timespec="seconds")
        log = _build_log(run, stage, step, rows, created)
        task = re.sub(r"[^\w.]+|_", "-", log["eval"]["task"])  # Inspect splits names at _
        name = f"{created.replace(':', '-')}_{task}_{log['eval']['task_id']}.json"
        logs[name] = json.dumps(log, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return logs


def _read_times(stage: StageRecords) -> dict[int, float]:
    """Return when the numbers of each evaluation were recorded, in seconds since 1970."""
    records = read_records(stage.directory.metrics)
    return {
        record["step"]: record.get("time", 0.0)
        for record in records
        if "tag" not in record and any(key.startswith("heldout_") for key in record)
    }


def _build_log(
    run: RunRecords, stage: StageRecords, step: int, rows: Sequence[Mapping[str, Any]], created: str
) -> dict[str, Any]:
    model, config = f"{run.name}/{stage.name}@{step}", run.config
    sampling = config.ppo.sampling
    samples = [_build_sample(number, row, model) for number, row in enumerate(rows, 1)]
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "eval_id": _identify(run, "evaluation", step),
            "run_id": _identify(run, "run"),
            "created": created,
            "task": f"{run.name}-{stage.name}-step-{step}",
            "task_id": _identify(run, "task", step),
            "task_version": 0,
            "dataset": {
                "name": "held-out prompts",
                "samples": len(samples),
                "sample_ids": [sample["id"] for sample in samples],
                "shuffled": False,
            },
            "model": model,
            "model_generate_config": {
                "max_tokens": config.data.max_completion_length,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                **({"top_k": sampling.top_k} if sampling.top_k else {}),
            },
            "config": {"epochs": 1},
            "packages": {},
            "metadata": {"step": step, "stage": stage.name, "title": stage.title, "folder": str(run.path.resolve())},
            "scorers": [{"name": name} for name in _score_names(samples)],
        },
        "plan": {"name": "plan", "steps": [], "config": {}},
        "results": {
            "total_samples": len(samples),
            "completed_samples": len(samples),
            "scores": [_summarize(name, samples) for name in _score_names(samples)],
        },
        "stats": {"started_at": created, "completed_at": created, "model_usage": {}},
        "samples": samples,
    }


def _build_sample(number: int, row: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return a held-out row as a sample; its id is its number from 1, the same in each evaluation."""
    prompt, completion = row.get("prompt", ""), row.get("completion", "")
    message = {"role": "assistant", "content": completion, "source": "generate", "model": model}
    scores: dict[str, Any] = {
        name: {"value": row[name], "answer": completion} for name in _NUMBERS if row.get(name) is not None
    }
    if row.get("approved") is not None:
        scores["approved"] = {"value": "C" if row["approved"] else "I", "answer": completion}
    return {
        "id": number,
        "epoch": 1,
        "input": prompt,
        "target": "",
        "messages": [{"role": "user", "content": prompt, "source": "input"}, message],
        "output": {
            "model": model,
            "choices": [{"message": message, "stop_reason": "stop" if row.get("ended", 1) else "max_tokens"}],
            "completion": completion,
        },
        "scores": scores,
        "metadata": {name: row[name] for name in ("tokens", "ended") if name in row},
        "store": {},
        "events": [],
        "model_usage": {},
        "attachments": {},
    }


def _score_names(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for sample in samples for name in sample["scores"]))


def _summarize(name: str, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return Inspect's entry about a score: its mean, or the share of correct samples, and the standard error."""
    values = [sample["scores"][name]["value"] for sample in samples if name in sample["scores"]]
    numbers = [float(value == "C") if isinstance(value, str) else value for value in values]
    metrics = {"accuracy" if name == "approved" else "mean": fmean(numbers)}
    if len(numbers) > 1:
        metrics["stderr"] = stdev(numbers) / len(numbers) ** 0.5
    return {
        "name": name,
        "scorer": name,
        "scored_samples": len(values),
        "unscored_samples": len(samples) - len(values),
        "params": {},
        "metrics": {metric: {"name": metric, "value": value, "params": {}} for metric, value in metrics.items()},
    }


def _identify(run: RunRecords, *parts: object) -> str:
    """Return an identifier that is the same if the run is exported again."""
    text = json.dumps([str(run.path.resolve()), run.description.get("invocations"), *map(str, parts)])
    return hashlib.sha256(text.encode()).hexdigest()[:22]
