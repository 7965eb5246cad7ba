"""Every key of a run's records and summaries is defined in docs/metrics.md, and every key there is one of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlhf
from rlhf.reporting.recorder import metric_group, read_heldout

KEYS = Path(rlhf.__file__).parents[1] / "docs" / "metrics.md"
STAGES = ("sft", "reward", "dpo", "ppo", "distill")


def table(*headings: str) -> Iterator[tuple[str, str, str]]:
    """(stage, key, definition) of the rows under these headings."""
    for section in KEYS.read_text(encoding="utf-8").split("\n## ")[1:]:
        if section.startswith(headings):
            for key, stage, definition in re.findall(r"^\| `([\w/<>]+)` \| (\w+) \| (.+) \| [^|]+ \|$", section, re.M):
                yield from ((name, key, definition) for name in (STAGES if stage == "all" else (stage,)))


def keys_of_records(folder: Path, stage: str) -> set[str]:
    lines = (folder / stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {key for line in lines for key in json.loads(line)}


RECORDS = ("Every record", "Numbers of a training step", "Held-out numbers")


def test_every_row_of_the_metrics_page_is_read():
    rows = [line for line in KEYS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    sections = ("heldout.jsonl", "stage.json", "`rlhf evaluate`", "`rlhf compare`")
    defined = [*table(*RECORDS), *(row for section in sections for row in table(section))]
    assert len(defined) == sum(len(STAGES) if "| all |" in line else 1 for line in rows) > 50
    assert len({row[:2] for row in table(*RECORDS)}) == len([*table(*RECORDS)]), "a key is defined twice"


@pytest.fixture
def folder_of(finished_run, finished_dpo, finished_distill):
    """Stage -> the run that has it."""
    return lambda stage: {"dpo": finished_dpo, "distill": finished_distill}.get(stage, finished_run)


@pytest.mark.parametrize("stage", STAGES)
def test_run_records_exactly_the_documented_keys(folder_of, stage):
    always = {key for name, key, definition in table(*RECORDS) if name == stage and not definition.startswith("Only ")}
    assert keys_of_records(folder_of(stage), stage) == always


@pytest.mark.parametrize("stage", ["reward", "ppo", "distill"])
def test_heldout_rows_have_exactly_the_documented_keys(folder_of, stage):
    evaluations = read_heldout(folder_of(stage) / stage / "heldout.jsonl", 3)
    assert set(evaluations) == {0, 3}, "before and after"
    rows = [set(row) for rows in evaluations.values() for row in rows]
    documented = {key: text for name, key, text in table("heldout.jsonl") if name == stage}
    assert len(rows) > 2 and rows == [{key for key, text in documented.items() if not text.startswith("Only ")}] * len(
        rows
    )


@pytest.mark.parametrize("stage", STAGES)
def test_stage_summary_has_exactly_the_documented_keys(folder_of, stage):
    summary = json.loads((folder_of(stage) / stage / "stage.json").read_text())
    rows = [row for row in table("stage.json") if row[0] == stage]
    assert summary.keys() == {key for _, key, definition in rows if not definition.startswith("Only with")}
    heldout = {key.removeprefix("heldout_") for key in keys_of_records(folder_of(stage), stage) if "heldout_" in key}
    assert summary["before"].keys() == summary["after"].keys() == heldout


def test_tensorboard_events_have_the_names_of_the_records(folder_of):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for stage in STAGES:
        events = EventAccumulator(str(folder_of(stage) / stage / "tensorboard"))
        events.Reload()
        bookkeeping = {"stage", "step", "time", "tag", "text", "rule", "state", "remedy", "sample"}
        keys = keys_of_records(folder_of(stage), stage) - bookkeeping
        assert set(events.Tags()["scalars"]) == {f"{stage}{metric_group(key)}/{key}" for key in keys}
        assert [event.step for event in events.Scalars(f"{stage}_optim/learning_rate")] == [1, 2, 3]


GROUPS = {
    "": {
        *("loss", "accuracy", "margin", "drift", "entropy", "explained_variance", "kl", "returns"),
        *(f"{reply}_{number}" for reply in ("chosen", "rejected") for number in ("score", "reward", "log_prob")),
        *("reward", "reward_model", "reward/<name>", "reward_ema", "reward_std", "score_clip_fraction"),
        *("response_length", "truncated_share", "equal_group_share"),
    },
    "_optim": {
        *("learning_rate", "lora_learning_rate", "grad_norm", "critic_grad_norm", "skipped_steps", "updates"),
        *("model_loss_scale", "actor_loss_scale", "critic_loss_scale", "kl_coef", "approx_kl"),
        *("draw_gap", "draw_gap_max", "draw_kl", "update_gap", "score_gap", "direction", "wrong_targets"),
        *("repeated_rows", "handover_gap", "handover_slope", "rollout_servers"),
        *("correction_weight", "correction_share"),
        *("changed_frozen_weights", "unchanged_weights", "unequal_weights"),
        *("policy_loss", "value_loss", "kl_loss", "ptx_loss", "clip_fraction", "value_clip_fraction"),
    },
    "_speed": {
        *("seconds", "tflops", "peak_share", "peak_memory", "padding_share", "compilations", "fallbacks"),
        "host_operators",
        *("tokens", "pairs", "tokens_per_second", "pairs_per_second", "other_seconds", "other_share"),
        *(
            f"{phase}_{number}"
            for phase in ("generation", "scoring", "training")
            for number in ("seconds", "share", "tflops", "tokens_per_second")
        ),
        *("generation_step_seconds", "generation_bytes_per_second"),
    },
}
"""The TensorBoard group of each metric of a training step; a new metric needs a place here."""


def test_every_metric_is_in_its_tensorboard_group():
    metrics = {key for _, key, _ in table("Numbers of a training step")}
    grouped = [key for keys in GROUPS.values() for key in keys]
    assert metrics == set(grouped) and len(grouped) == len(set(grouped))
    assert {group: {key for key in metrics if metric_group(key) == group} for group in GROUPS} == GROUPS
    assert {metric_group(key) for _, key, _ in table("Held-out numbers")} == {"_heldout"}
