"""Runs on a backend with one fault: one line names the plugin and what it did. Runs beside it go on."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers import llama

# What the line says of "accelerator faulty of rlhf-faulty 1.2.3: ...; report it to the plugin's authors".
RUNS = {
    "bind raises": "bind() failed (OSError: no card)",
    "bind gives 0": "bind() gave 0 instead of torch.device",
    "bind without local_rank": "bind takes other arguments than the interface gives it, (local_rank): too",
    "device gives a str": "device() gave 'cpu' instead of torch.device",
    "to_device raises": "to_device() failed (OSError: no card)",
    "to_device gives None": "to_device() gave None instead of what it was given",
    "info gives a dict": "info() gave {'model': 'Faulty'} instead of DeviceInfo",
    "synchronize raises": "synchronize() failed (OSError: no card)",
    "synchronize exits": "synchronize() failed (SystemExit: 3)",
    "step_boundary raises": "step_boundary() failed (OSError: no card)",
    "step_boundary without tag": "step_boundary takes other arguments than the interface gives it, (tag): too many",
    "step_boundery": "defines step_boundery, which no trainer calls; name it step_boundary, or _step_boundery if it is",
    "compilations gives a str": "compilations() gave '3' instead of int or None",
    "precision raises": "precision() failed (KeyError: 'fp32')",
    "precision gives a dtype": "precision() gave torch.float32 instead of Precision",
    "autocast raises": "autocast() of its precision failed (OSError: no card)",
    "deepspeed_config gives a str": "deepspeed_config() of its precision gave 'fp32' instead of dict",
    "precision without wish": "precision takes other arguments than the interface gives it, (wish): too many",
    "kernels raises midway": "kernels() failed (OSError: no card)",
    "kernels gives dicts": "kernels() failed (TypeError: a dict instead of KernelImpl)",
    "shape_policy gives a str": "shape_policy() gave 'static' instead of ShapePolicy",
    "memory gives a tuple": "memory() gave (1, 2, 3) instead of Memory",
    "memory is no method": "memory is 7, expected a method",
    "reset_peak raises": "reset_peak() failed (OSError: no card)",
    "empty_cache raises": "empty_cache() failed (OSError: no card)",
    "seed raises": "seed() failed (OSError: no card)",
    "rng_state gives None": "rng_state() gave None instead of dict",
    "dist_backend gives hccl": "dist_backend() gave 'hccl' instead of a backend that torch.distributed knows",
    "dist_backend gives None": "dist_backend() gave None instead of a backend that torch.distributed knows",
    "deepspeed_accelerator gives a str": "deepspeed_accelerator() gave 'cpu' instead of a DeepSpeedAccelerator or None",
    "prepare_deepspeed gives None": "prepare_deepspeed() gave None instead of DeepSpeedView",
    "deepspeed_name is None": "has the deepspeed_name None, expected a str",
    "absent is a str": "has 'none' as absent, expected a mapping of operations to reasons",
    "absent names no operation": "has {'graph_captur': 'none here'} as absent, expected reasons for some of adamw, ",
    "adamw raises": "adamw kernel 'fast' of rlhf-faulty 1.2.3 failed (OSError: no card)",
    "adamw gives a str": "adamw kernel 'fast' of rlhf-faulty 1.2.3 gave 'adamw' instead of torch.optim.Optimizer",
    "adamw does not step": "adamw kernel 'fast' of rlhf-faulty 1.2.3: step() failed (OSError: no card)",
    "adamw takes no eps": "adamw kernel 'fast' of rlhf-faulty 1.2.3 failed (TypeError: ",
    "clip_grad_norm gives a float": "clip_grad_norm kernel 'fast' of rlhf-faulty 1.2.3 gave 1.0 instead of a scalar",
    "clip_grad_norm raises": "clip_grad_norm kernel 'fast' of rlhf-faulty 1.2.3 failed (OSError: no card)",
    "contributed clip_grad_norm gives None": "clip_grad_norm kernel 'fast' of rlhf-faulty 1.2.3 (faulty) gave None",
    "hook rlhf_kernels gives a str": "its hook rlhf_kernels failed (TypeError: rlhf_kernels returned a str",
    "hook rlhf_kernels raises midway": "its hook rlhf_kernels failed (OSError: no library)",
    "unknown operation": "ValueError: KernelImpl: no operation is named 'adamW'; did you mean 'adamw'? known: adamw, ",
}
LEAVE_OUT = ", or leave it out with RLHF_PLUGINS"
HOOKS = {
    "hook rlhf_check_run gives True": "the check of plugin rlhf-faulty 1.2.3 (faulty) failed (TypeError: 'bool'",
    "hook rlhf_check_run raises midway": "the check of plugin rlhf-faulty 1.2.3 (faulty) failed (OSError: no library)",
}
CAPTURES = {
    "capture gives None": "capture() gave None instead of a function",
    "a recording raises": "capture(): its recording of 'decode 4 x 24 up to 40' failed (OSError: no card)",
    "graph_capture gives None": "graph_capture kernel 'fast' of rlhf-faulty 1.2.3 gave None instead of a function",
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
        *("--set", "sft.max_steps=1", "--set", "engine.zero_stage=0"),
    )
    return run


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The line with which a run ended."""
    assert done.returncode == 2, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("rlhf: error: ")]
    assert errors == done.stderr.splitlines()[-1:]
    assert "Traceback" not in done.stderr
    return errors[0].removeprefix("rlhf: error: ")


@pytest.mark.parametrize("fault", RUNS)
def test_what_a_plugin_gets_wrong_in_a_run_is_said_of_the_plugin(faulty, fault):
    line = refusal(faulty(fault, *faulty.sft, "--accelerator", "faulty"))
    assert "rlhf-faulty 1.2.3" in line
    assert RUNS[fault] in line
    assert line.endswith(f"; report it to the plugin's authors{LEAVE_OUT * fault.startswith('contributed')}")


@pytest.mark.parametrize("fault", HOOKS)
def test_an_objection_that_fails_stops_runs_on_its_own_backend(faulty, fault):
    assert HOOKS[fault] in refusal(faulty(fault, *faulty.sft, "--accelerator", "faulty"))


@pytest.fixture
def ppo(faulty, finished_run):
    """The arguments of a run that captures."""
    models = [f"ppo.actor={finished_run}/sft/model", f"ppo.reward_model={finished_run}/reward/model"]
    settings = [part for model in models for part in ("--set", model)]
    return ("ppo", *faulty.sft[1:], *settings, "--accelerator", "faulty")


@pytest.mark.parametrize("fault", CAPTURES)
def test_a_capture_that_goes_wrong_is_the_plugins(faulty, ppo, fault):
    assert CAPTURES[fault] in refusal(faulty(fault, *ppo))


def test_a_defect_of_rlhf_in_a_plugins_recording_is_not_the_plugins(faulty, ppo):
    done = faulty("none, but rlhf has a defect", *ppo)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith(
        "rlhf: error: this is a defect of rlhf: KeyError: 'defect in the decoder'; its traceback is in "
    )


@pytest.mark.parametrize(
    "fault", ["", "memory gives a tuple", *[fault for fault in [*RUNS, *HOOKS] if "hook" in fault]]
)
def test_runs_beside_a_faulty_plugin_go_on(faulty, fault):
    done = faulty(fault, *faulty.sft, "--accelerator", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("rlhf-faulty 1.2.3 (faulty)") == ("hook" in fault)


def test_without_a_fault_the_plugin_trains(faulty):
    done = faulty("", *faulty.sft, "--accelerator", "faulty")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("out of memory", "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"),
        ("out of memory in a runtime's own words", "DeviceOutOfMemory: Tried to allocate 2 GiB"),
        ("out of memory as only the backend knows", "FullError: 7 tiles short"),
    ],
)
def test_a_lack_of_memory_is_nobodys_mistake(faulty, fault, said):
    line = refusal(faulty(fault, *faulty.sft, "--accelerator", "faulty"))
    assert line.startswith(f"out of memory on faulty in sft, set-up ({said}); peak ")
    assert re.search(r"; try, with --set and in this order: (precision=auto, )?lora\.rank=8; run: rlhf sft ", line)


def test_a_lack_of_memory_on_one_rank_is_the_last_line(faulty):
    arguments = (*faulty.sft, "--ranks", "2", "--set", "precision=fp32", "--set", "sft.batch_size=4")
    line = refusal(faulty("out of memory on rank 1", *arguments, "--accelerator", "faulty"))
    assert line.startswith("rank 1: out of memory on faulty in sft, set-up (OutOfMemoryError: Tried to allocate 2 GiB)")
    assert "engine.zero_stage=3, lora.rank=8" in line


def test_a_lack_of_memory_in_ppo_says_what_each_model_holds(faulty, ppo):
    line = refusal(faulty("out of memory when scored", *ppo))
    assert line.startswith("out of memory on faulty in ppo, scoring (OutOfMemoryError: Tried to allocate 2 GiB); peak ")
    held = line.partition("; weights, gradients and optimizer: ")[2].partition(";")[0]
    assert [part.split(" ")[0] for part in held.split(", ")] == ["actor", "critic", "reference", "reward"]
    assert "in this order: ppo.micro_batch_size=1, " in line


def test_a_judgement_that_fails_is_no_lack_of_memory(faulty):
    line = refusal(faulty("its judgement fails", *faulty.sft, "--accelerator", "faulty"))
    assert "step_boundary() failed (FullError: 7 tiles short); report it" in line


def test_an_allocation_that_fails_ends_with_what_would_help_here(faulty, tokenizer, tmp_path):
    llama(len(tokenizer), max_position_embeddings=1024).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    wishes = (f"model.path={tmp_path / 'model'}", "data.max_prompt_length=1000", "sft.batch_size=16")
    settings = [word for wish in wishes for word in ("--set", wish)]
    line = refusal(faulty("memory is limited", *faulty.sft, *settings, "--accelerator", "faulty"))
    assert line.startswith("out of memory on the host in sft, update (RuntimeError: [enforce fail at")
    assert re.search(r"; weights, gradients and optimizer: sft \d\.\d MiB; try, with --set and in this order: ", line)
    keys = line.partition("in this order: ")[2].partition(";")[0].replace("precision=auto, ", "").split(", ")
    assert keys == [
        *("sft.micro_batch_size=8", "model.gradient_checkpointing=true", "lora.rank=8", "data.max_prompt_length=500")
    ]
    assert f"--output {tmp_path / 'run'} " in line.partition("; run: rlhf sft ")[2]


def test_an_attention_that_transformers_does_not_know_gives_way(faulty):
    done = faulty("attention is not known", *faulty.sft, "--accelerator", "faulty")
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert "attention: fast is not used: its factory failed (it made 'flash_atention', which transformers" in line
    assert line.endswith("which is for the authors of rlhf-faulty 1.2.3")


@pytest.mark.parametrize("fault", ["memory gives a tuple", "precision raises", "step_boundery", "unknown operation"])
def test_explain_says_it_too(faulty, fault):
    line = refusal(faulty(fault, "accelerators", "explain", "faulty"))
    assert RUNS[fault] in line


def test_a_point_of_a_sweep_that_lacks_memory_is_recorded_with_its_peak(faulty, rlhf, tmp_path):
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
