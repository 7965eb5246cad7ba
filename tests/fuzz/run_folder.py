"""The folder of a run with every file that commands read, and the commands that read it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf.config.schema import EVERY_STAGE, build_config, load_config
from rlhf.diagnosis.records import read_run
from rlhf.diagnosis.verdict import examine_runs, to_document
from rlhf.reporting.recorder import Recorder
from rlhf.runs.checkpoints import list_saved, remove_checkpoints, resume_from
from rlhf.runs.description import read_evaluations, write_evaluations
from rlhf.runs.directory import RunDirectory
from rlhf.runs.resume import find_other_division
from rlhf.utils.manifest import write_manifest
from tests.diagnosis.records import write_run
from tests.export.conftest import PROMPTS
from tests.export.conftest import ROWS as REPLIES


def write_valid(folder: Path) -> None:
    pairs = {key: [0.5, 0.6] for key in ("loss", "accuracy", "margin", "heldout_accuracy")}
    of_ppo = (
        *("reward", "kl", "entropy", "response_length", "truncated_share", "explained_variance", "clip_fraction"),
        *("reward/brevity", "reward_model", "approx_kl", "draw_gap", "heldout_reward", "heldout_kl"),
        *("seconds", "generation_share", "training_share", "peak_memory", "rewards_per_second"),
    )
    numbers = {
        "sft": {key: [2.0, 1.5] for key in ("loss", "grad_norm", "learning_rate", "heldout_perplexity")},
        "reward": pairs,
        "dpo": pairs,
        "ppo": {key: [0.1, 0.2] for key in of_ppo},
    }
    heldout = {step: [{"prompt": name, **row} for name, row in zip(PROMPTS, made)] for step, made in REPLIES.items()}
    summary: dict[str, Any] = {
        "title": "SFT",
        "before": {"perplexity": 9.0},
        "after": {"perplexity": 8.0},
        "steps": 2,
        "seconds": 1.0,
        "set_up_seconds": 1.0,
        "peak_memory": 2.0**30,
        "tflops": 0.1,
        "phases": {"a": 1.0, "b": 2.0},
        "kept": {"step": 2, "metric": "perplexity", "value": 8.0},
        "warnings": ["hardly learned"],
        "samples": [{"prompt": "a", "before": "b", "after": "c"}],
    }
    summaries = {name: {"stage": name, **summary} for name in ("sft", "reward")}
    write_run(folder, numbers, heldout={"ppo": heldout}, summaries=summaries)
    run = RunDirectory(folder)
    by_token = {"value": [0.1, None], "advantage": [1.0, 2.0]}
    sample = {"prompt": "a", "pieces": ["b", "c"], "by_token": by_token, "score": 1.0, "kl": 0.5, "tokens": 2}
    with Recorder(run.stage("ppo"), resume_step=3) as recorder:
        recorder.text("heldout_warning", 3, "no gain", {"rule": "reward", "state": "look here", "remedy": "wait"})
        recorder.text("heldout_0", 0, "prompt\ncompletion")
        recorder.text("heldout_0", 3, "prompt\ncompletion")
        recorder.text("sample_0", 3, "a\nbc", {"sample": sample})
    evaluations: dict[str, Any] = {"0": {"numbers": {"reward": 0.5}, "samples": [], "judged": []}}
    write_evaluations(run.stage("ppo").path / "evaluations.json", evaluations)
    description = json.loads(run.description.read_text())
    description["stages"]["ppo"]["models"] = {"ppo.actor": {"path": "sft/model", "identity": {"weights": "0" * 64}}}
    description["data"] = {"world": {"rows": 3, "dropped": 1, "digest": "0" * 32}}
    device = {"model": "a device", "count": 1, "software": {"torch": "2.9"}}
    description["accelerator"] = {"name": "cpu", "reason": "a", "device": device, "precision": {"name": "fp32"}}
    description["accelerator"]["attention"] = {"actor": {"name": "sdpa", "refused": {}}}
    run.description.write_text(json.dumps(description))
    for place in (run.stage("ppo").checkpoints / "step-00000003", run.stage("sft").model):
        place.mkdir(parents=True)
        (place / "weights").write_bytes(b"numbers")
        write_manifest(place)
    (folder / ".rlhf.lock").write_text('{"pid": 1, "host": "elsewhere"}')
    run.ensure_recipe()


def report(run: Path) -> None:
    from rlhf.report.page import render_report
    from rlhf.report.terminal import print_verdict

    examined, _ = examine_runs([run])
    render_report(examined)
    print_verdict(examined[0], show_all=True)
    json.dumps(to_document(examined[0]), allow_nan=False)


def compare(run: Path) -> None:
    from rlhf.report.page import render_report

    render_report(examine_runs([run, run])[0])


def show(run: Path) -> None:
    from rlhf.cli.show import _describe_stage, _print_stage
    from rlhf.reporting.console import console
    from rlhf.reporting.summary import print_summary

    stages = [_describe_stage(stage) for stage in read_run(run).stages]
    for stage in stages:
        _print_stage(stage, 2)
    print_summary([stage["summary"] for stage in stages if stage["summary"]], console)


def list_runs(run: Path) -> None:
    from rlhf.cli.report import _describe_run
    from rlhf.report.card import write_cards

    _describe_run(run)
    for stage in EVERY_STAGE:
        write_cards(run, stage)


def export(run: Path) -> None:
    from rlhf.export.formats import export_run

    export_run(read_run(run), "csv")
    export_run(read_run(run), "inspect")


def resume(run: Path) -> None:
    directory = RunDirectory(run)
    directory.recover()
    config = build_config({"output": str(run), "data": {"datasets": [{"path": "world"}]}})
    find_other_division(directory._read_description(), config)
    read_evaluations(directory.stage("ppo").path / "evaluations.json")
    directory.describe_saved()
    models: Any = {"ppo": {"ppo.actor": ("sft/model", {"weights": "1" * 64})}}
    directory.check(config, stages=EVERY_STAGE, resume=True, data={"world": {"rows": 3, "digest": "0"}}, models=models)


def replace_a_stage(run: Path) -> None:
    directory = RunDirectory(run)
    directory.ensure_recipe()
    with directory.open_for(load_config(directory.recipe, [f"output='{run}'"]), stages=["ppo"], overwrite=True):
        with Recorder(directory.stage("ppo"), resume_step=1) as recorder:
            recorder.log(2, {"loss": 1.0})
        directory.commit(directory.stage("ppo"))


def manage_checkpoints(run: Path) -> None:
    list_saved(RunDirectory(run), verify=True)
    with resume_from(RunDirectory(run), "step-00000003", EVERY_STAGE, print):
        pass
    remove_checkpoints(RunDirectory(run), ["step-00000003"], last=True)


READERS: tuple[Callable[[Path], None], ...] = (
    *(report, compare, show, list_runs, export, resume, replace_a_stage, manage_checkpoints),
)
