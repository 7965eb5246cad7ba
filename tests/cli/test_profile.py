"""`rlhf profile`: what it measures adds up, its trace has our phases, nothing else stays, errors are one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from rlhf.cli.profile import draw_replies, ensure_steps
from rlhf.config.schema import Config
from rlhf.memory.advice import apply_settings
from rlhf.memory.duration import count_steps
from rlhf.reporting.timers import profile_operators
from tests.helpers import sets

PHASES = ("generation", "scoring", "training")


def files(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def profiled(rlhf, tmp_path_factory) -> tuple[dict[str, Any], Path, str]:
    """Return the report, the folder and the notes of a profile without a run."""
    folder = tmp_path_factory.mktemp("profile")
    options = ["--config", str(rlhf.recipe), *sets("data.max_completion_length=8", "ppo.steps=1", "ppo.ppo_epochs=1")]
    options += sets("engine.kernels={inference_weights: none}")  # layers in C multiply without torch's operators
    trace = ["--trace", str(folder / "trace.json.gz"), "--output", str(folder / "run")]
    environment = {"TMPDIR": str(folder)}
    done = rlhf.forks.run("profile", "--steps", "2", "--json", *options, *trace, timeout=120, environment=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (report,) = json.loads(done.stdout)
    return report, folder, done.stderr


def test_stage_takes_all_steps_and_leaves_only_the_trace(profiled):
    _, folder, notes = profiled
    assert [*folder.iterdir()] == [folder / "trace.json.gz"]
    assert "run has no finished sft and reward: one step of each is taken first" in notes
    assert "profiling: 4/4 steps" in notes


def test_phases_sum_to_the_steps_and_operators_to_the_trace(profiled):
    report, *_ = profiled
    assert [phase["phase"] for phase in report["phases"]] == [*PHASES, "other"]
    seconds = sum(phase["seconds"] for phase in report["phases"])
    assert seconds == pytest.approx(sum(report["step_seconds"]) / 2) and len(report["step_seconds"]) == 2
    assert sum(phase["share"] for phase in report["phases"]) == pytest.approx(1)
    flops = sum(phase["tflops"] * phase["seconds"] for phase in report["phases"] if "tflops" in phase)
    assert report["tflops"] == pytest.approx(flops / seconds, rel=1e-6)
    generation = report["phases"][0]
    assert generation["step_seconds"] == pytest.approx(generation["seconds"] / 8), "of completions of 8 tokens"
    operators = report["operators"]
    assert sum(operator["seconds"] for operator in operators) + report["outside_operators"] == pytest.approx(
        report["traced_seconds"], rel=1e-3
    )
    assert operators == sorted(operators, key=lambda operator: -operator["seconds"])
    assert {operator["phase"] for operator in operators if operator["name"] == "aten::bmm"} >= set(PHASES)
    backward = {operator["phase"] for operator in operators if "backward" in operator["name"].lower()}
    assert backward == {"training"}
    rest = ("start", "first_step", "evaluation", "checkpoint", "saving", "recording")
    assert all(report[f"{name}_seconds"] > 0 for name in rest)
    assert report["set_up_seconds"] > 0 and report["peak_memory"] > 2**26


def test_trace_has_the_phases_as_ranges(profiled):
    report, folder, _ = profiled
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    ranges = {event["name"]: event for event in events if event.get("cat") == "user_annotation"}
    step = ranges["rlhf/step"]
    for phase in PHASES:
        assert step["ts"] <= ranges[f"rlhf/{phase}"]["ts"] < step["ts"] + step["dur"]
    assert sum(event["name"] == "rlhf/step" for event in events) == 1, "one step is recorded"
    assert report["traced_seconds"] == pytest.approx(step["dur"] / 1e6, rel=1e-3)


def test_run_gives_settings_and_models_and_is_only_read(rlhf, finished_run, tmp_path):
    before = {path: (finished_run / path).read_bytes() for path in files(finished_run)}
    trace = tmp_path / "trace.json"
    short = sets("data.max_completion_length=4", "ppo.ppo_epochs=1")
    done = rlhf("profile", "--output", finished_run, "--steps", "1", "--trace", trace, "--tsv", *short, recipe=None)
    assert {path: (finished_run / path).read_bytes() for path in files(finished_run)} == before
    assert f"ppo.actor: {finished_run / 'sft/model'}" in done.stderr and "one step of each" not in done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert [line[0] for line in lines if len(line) == 5][:5] == ["phase", *PHASES, "other"]
    assert ["operator", "phase", "time", "share", "calls"] in lines
    assert json.loads(trace.read_text())["traceEvents"]


def test_untrained_policy_draws_the_replies_of_the_data() -> None:
    """So that completions have their lengths; `forced` are the tokens that a decoder draws next."""
    drawn: list[torch.Tensor] = []
    decoder = SimpleNamespace(eos_ids=torch.tensor([1]), pad_id=0, max_new_tokens=4, forced=None)
    decoder.generate = lambda model, ids: drawn.append(decoder.forced)
    texts = [("ab", None), (None, "abcde"), ("a", "abc")]  # a demonstration, else the preferred reply
    examples = [SimpleNamespace(row=SimpleNamespace(response=one, chosen=other)) for one, other in texts]

    def tokenizer(texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[5] * len(text) for text in texts]}

    draw_replies(SimpleNamespace(decoder=decoder, tokenizer=tokenizer, data=SimpleNamespace(train=examples)))
    decoder.generate(None, torch.zeros(2, 3))
    decoder.generate(None, torch.zeros(2, 3))
    assert drawn[0].tolist() == [[5, 5, 1, 0], [5, 5, 5, 5]], "a longer reply is cut off, without its end"
    assert drawn[1].tolist() == [[5, 1, 0], [5, 5, 1]]


@pytest.mark.slow
def test_several_stages_are_a_list_and_have_traces(rlhf, tmp_path):
    options = ["--stage", "ppo", "--stage", "sft", "--steps", "1", "--json", "--output", tmp_path / "run"]
    done = rlhf("profile", *options, "--trace", tmp_path / "trace.json.gz")
    assert [report["stage"] for report in json.loads(done.stdout)] == ["sft", "ppo"]
    assert {path.name for path in tmp_path.iterdir()} == {"sft-trace.json.gz", "ppo-trace.json.gz"}


@pytest.mark.slow
def test_embedded_example_can_be_profiled(forks, tmp_path):
    options = [*sets("data.max_completion_length=8"), "--trace", str(tmp_path / "trace.json.gz")]
    done = forks.run("profile", "--steps", "1", "--json", *options, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    (report,) = json.loads(done.stdout)
    assert [phase["phase"] for phase in report["phases"]] == [*PHASES, "other"]
    assert (tmp_path / "trace.json.gz").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "reward", "dpo"])
def test_other_stages_can_be_profiled(rlhf, tmp_path, stage):
    trace = tmp_path / "trace.json.gz"
    options = ["--stage", stage, "--steps", "2", "--trace", trace, "--output", tmp_path / "run", "--json"]
    (report,) = json.loads(rlhf("profile", *options).stdout)
    assert [phase["phase"] for phase in report["phases"]] == ["training", "other"]
    assert report["tflops"] > 0


LAUNCHER = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--set", "ppo.stepz=3"], {}, "ppo.stepz"),
        (["--trace", "absent/trace.json.gz"], {}, "--trace absent/trace.json.gz: its folder does not exist"),
        (["--trace", "."], {}, "--trace .: is a folder; name a file in it, such as trace.json.gz"),
        ([], LAUNCHER, "rlhf profile measures one process; start it without"),
    ],
)
def test_mistake_is_one_line(forks, arguments, environment, message):
    done = forks.run("profile", *arguments, timeout=60, environment=environment)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "ppo"])
@pytest.mark.parametrize(
    "length", [{"max_steps": 1}, {"epochs": 9}, {"epochs": 1}, {"epochs": 9, "max_steps": 8}, {"steps": 1}]
)
@pytest.mark.parametrize("rows", [1, 5000])
def test_stage_has_at_least_the_measured_steps(stage, length, rows):
    before = apply_settings(Config(), {f"{stage}.{key}": value for key, value in length.items()})
    steps = count_steps(ensure_steps(before, stage, 7), stage, rows)
    planned = count_steps(before, stage, rows)
    assert steps is not None and planned is not None and steps >= 7
    assert steps >= planned or (stage == "ppo" and "epochs" in length), "passes over the prompts are counted in steps"


def event(
    name: str, start: float, end: float, *, device: bool = False, own: float = 0, annotation: bool = False
) -> Any:
    return SimpleNamespace(
        name=name,
        device_type=DeviceType.CUDA if device else DeviceType.CPU,
        time_range=SimpleNamespace(start=start, end=end),
        is_user_annotation=annotation or name.startswith("rlhf/"),
        self_cpu_time_total=own,
        self_device_time_total=own if device else 0,
    )


def test_operator_belongs_to_the_phase_that_it_starts_in():
    ranges = [event("rlhf/step", 10, 110), event("rlhf/generation", 20, 50), event("rlhf/training", 60, 100)]
    work = [
        event("mm", 25, 45, own=15e6),
        event("mm", 65, 80, own=10e6),
        event("mm", 70, 75, own=5e6),
        event("add", 105, 106, own=1e6),
        event("before", 5, 9, own=9e6),
        event("Optimizer.step", 61, 99, own=30e6, annotation=True),
    ]
    profile = profile_operators([*ranges, *work])
    rows = [(operator.name, operator.phase, operator.seconds, operator.calls) for operator in profile.operators]
    assert sorted(rows) == [("add", "other", 1, 1), ("mm", "generation", 15, 1), ("mm", "training", 15, 2)]
    assert not profile.on_device
    kernels = [event("gemm", 30, 40, device=True, own=10e6), event("rlhf/training", 62, 99, device=True, own=37e6)]
    profile = profile_operators([*ranges, *work, *kernels])
    assert [(kernel.name, kernel.phase, kernel.seconds) for kernel in profile.operators] == [("gemm", "generation", 10)]
    assert profile.on_device
