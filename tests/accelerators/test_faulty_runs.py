"""Runs on a backend with one fault end with one line that names the plugin and the method."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers import llama

FAULTS = {
    "synchronize exits": "synchronize() failed (SystemExit: 3)",
    "memory gives a tuple": "memory() failed (TypeError: ",
    "adamw does not step": "adamw kernel 'fast' of rlhf-faulty 1.2.3: step() failed (OSError: no card)",
    "hook rlhf_kernels raises midway": "its hook rlhf_kernels failed (OSError: no library)",
}


@pytest.fixture
def faulty(install, forks, rlhf, tmp_path: Path):
    """Run a command with the plugin and one of its faults."""
    site = str(install("faulty"))

    def run(fault: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {"PYTHONPATH": site, "RLHF_PLUGINS": "", "FAULT": fault}
        return forks.run(*arguments, environment=environment, timeout=120)

    run.sft = (  # type: ignore[attr-defined]
        *("sft", "--config", str(rlhf.recipe), "--output", str(tmp_path / "run")),
        *("--set", "sft.max_steps=1", "--set", "sft.eval_rows=1", "--set", "engine.zero_stage=0"),
    )
    return run


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The line with which a run ended."""
    assert done.returncode == 2, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("rlhf: error: ")]
    assert errors == done.stderr.splitlines()[-1:]
    assert "Traceback" not in done.stderr
    return errors[0].removeprefix("rlhf: error: ")


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_plugin_ends_run_with_one_line(faulty, fault):
    line = refusal(faulty(fault, *faulty.sft, "--accelerator", "faulty"))
    assert "rlhf-faulty 1.2.3" in line and FAULTS[fault] in line
    assert line.endswith("; report it to the plugin's authors")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("attention fails", "in attend: RuntimeError: TPU_STATUS_17: bad tile); report it to the plugin's authors"),
        ("attention fails in its backward pass", "in fails: OSError: no card); report it to the plugin's authors"),
        ("attention fills its memory", "HBM is full); report it to the plugin's authors; if it means a lack of memory"),
    ],
)
def test_failing_attention_names_plugin(faulty, fault, message):
    line = refusal(faulty(fault, *faulty.sft, "--accelerator", "faulty"))
    assert line.startswith("rlhf-faulty 1.2.3 failed (rlhf_faulty_backend.py, line ")
    assert message in line


def test_debug_shows_traceback_of_plugin(faulty):
    done = faulty("adamw does not step", "--debug", *faulty.sft, "--accelerator", "faulty")
    assert done.returncode == 2
    assert "rlhf_faulty_backend.py" in done.stderr and "OSError: no card" in done.stderr


def test_failing_run_check_stops_run_on_its_backend(faulty):
    line = refusal(faulty("hook rlhf_check_run raises midway", *faulty.sft, "--accelerator", "faulty"))
    assert "the check of plugin rlhf-faulty 1.2.3 (faulty) failed (OSError: no library)" in line


@pytest.fixture
def ppo(faulty, finished_run):
    """The arguments of a run that captures."""
    models = [f"ppo.actor={finished_run}/sft/model", f"ppo.reward_model={finished_run}/reward/model"]
    settings = [part for model in models for part in ("--set", model)]
    return ("ppo", *faulty.sft[1:], *settings, "--accelerator", "faulty")


def test_failing_recording_names_plugin(faulty, ppo):
    line = refusal(faulty("a recording raises", *ppo))
    assert "capture(): its recording of 'decode 4 x 24 up to 40' failed (OSError: no card)" in line


def test_defect_of_rlhf_in_recording_is_not_the_plugins(faulty, ppo):
    done = faulty("none, but rlhf has a defect", *ppo)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith(
        "rlhf: error: this is a bug of rlhf: TypeError: 'NoneType' object is not callable; its traceback is in "
    )


def test_other_backends_run_despite_faulty_plugin(faulty):
    done = faulty("hook rlhf_kernels raises midway", *faulty.sft, "--accelerator", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("rlhf-faulty 1.2.3 (faulty)") == 1


def test_plugin_without_fault_trains(faulty):
    done = faulty("", *faulty.sft, "--accelerator", "faulty")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("out of memory in a runtime's own words", "DeviceOutOfMemory: Tried to allocate 2 GiB"),
        ("out of memory as only the backend knows", "FullError: 7 tiles short"),
    ],
)
def test_out_of_memory_ends_with_advice(faulty, fault, message):
    line = refusal(faulty(fault, *faulty.sft, "--accelerator", "faulty"))
    assert line.startswith(f"out of memory on faulty in sft, set-up ({message}); peak ")
    assert re.search(r"; try, with --set and in this order: (precision=auto, )?lora\.rank=8; run: rlhf sft ", line)


def test_out_of_memory_on_one_rank_is_the_last_line(faulty):
    arguments = (*faulty.sft, "--ranks", "2", "--set", "precision=fp32", "--set", "sft.batch_size=4")
    line = refusal(faulty("out of memory on rank 1", *arguments, "--accelerator", "faulty"))
    assert line.startswith("rank 1: out of memory on faulty in sft, set-up (OutOfMemoryError: Tried to allocate 2 GiB)")
    assert re.search("engine.zero_stage=3, (precision=auto, )?lora.rank=8", line)


def test_out_of_memory_in_ppo_lists_the_models(faulty, ppo):
    line = refusal(faulty("out of memory when scored", *ppo))
    assert line.startswith("out of memory on faulty in ppo, scoring (OutOfMemoryError: Tried to allocate 2 GiB); peak ")
    models = line.partition("; weights, gradients and optimizer: ")[2].partition(";")[0]
    assert [part.split(" ")[0] for part in models.split(", ")] == ["actor", "critic", "reference", "reward"]
    assert "in this order: ppo.micro_batch_size=1, " in line


def test_failing_allocation_ends_with_advice(faulty, tokenizer, tmp_path):
    llama(len(tokenizer), max_position_embeddings=1024).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    wishes = (f"model.path={tmp_path / 'model'}", "data.max_prompt_length=1000", "sft.batch_size=16")
    settings = [word for wish in wishes for word in ("--set", wish)]
    line = refusal(faulty("memory is limited", *faulty.sft, *settings, "--accelerator", "faulty"))
    assert line.startswith("out of memory on the host in sft, training (RuntimeError: [enforce fail at")
    assert re.search(
        r"; weights, gradients and optimizer: sft [\d.]+ [KM]iB; try, with --set and in this order: ", line
    )
    keys = line.partition("in this order: ")[2].partition(";")[0].replace("precision=auto, ", "").split(", ")
    assert keys == [
        *("sft.micro_batch_size=8", "model.gradient_checkpointing=true", "lora.rank=8", "data.max_prompt_length=500")
    ]
    assert f"--output {tmp_path / 'run'} " in line.partition("; run: rlhf sft ")[2]


@pytest.mark.slow
def test_out_of_memory_in_sweep_is_recorded_with_peak(faulty, rlhf, tmp_path):
    (tmp_path / "grid.yaml").write_text(
        f"recipe: {rlhf.recipe}\noutput: out\nstages: [sft]\nbase: {{sft.max_steps: 1, engine.zero_stage: 0}}\n"
        "grid: {accelerator: [faulty, cpu]}\nnames: {accelerator: {faulty: small, cpu: large}}\n"
    )
    done = faulty("out of memory", "sweep", str(tmp_path / "grid.yaml"), "--json")
    assert done.returncode == 0, done.stderr
    small, large = json.loads(done.stdout)["points"]
    assert (small["status"], large["status"]) == ("out of memory", "complete")
    assert small["reason"].startswith("out of memory on faulty in sft, set-up (RuntimeError: CUDA out of memory. ")
    peak = float(re.search(r"; peak ([\d.]+) MiB of ", small["reason"])[1])
    assert small["peak_memory"] == int(peak * 2**20) > 2**20
