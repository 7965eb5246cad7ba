"""Distillation from a teacher on servers: its numbers, its failures, and what it cannot do."""

from __future__ import annotations

import base64
import io
import json
import math
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf.reporting.step_records import read_steps
from tests.helpers import assert_same_weights, llama, sets, user_environment
from tests.rollouts.test_runs import CALLS, Proxy


@pytest.fixture
def teacher(tokenizer: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "teacher"
    llama(len(tokenizer), seed=9, initializer_range=0.3).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def distill(rlhf: Any, begun: Path) -> Any:
    """Distill into the SFT model, from the servers at these addresses."""

    def run(
        output: Path, *addresses: str, keys: tuple[str, ...] = (), options: tuple[str, ...] = (), **how: Any
    ) -> Any:
        named = f"distill.teacher_servers={json.dumps(addresses)}", f"distill.model={begun / 'sft' / 'model'}"
        return rlhf("distill", "--output", output, *options, *sets(*named, *keys), **how)

    return run


class Counted:
    """Passes calls on and remembers the rows that were scored; from call `broken` on it fails, until `repair`."""

    def __init__(self, broken: float = float("inf")) -> None:
        self.rows: list[list[int]] = []
        self.left = broken

    def repair(self) -> None:
        self.left = float("inf")

    def __call__(self, call: str, body: bytes, forward: Any) -> tuple[int, bytes]:
        if call == "score":
            self.left -= 1
            if self.left < 0:
                return 500, b""
            self.rows += json.loads(body)["rows"]
        return forward(body)


def steps(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "distill" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "learning_rate" in line]


def plain_log_probs(folder: Path, rows: list[list[int]]) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = [model(torch.tensor([row])).logits[0, :-1].log_softmax(-1) for row in rows]
    return [of_row[range(len(row) - 1), row[1:]] for of_row, row in zip(logits, rows)]


def test_loss_is_the_mean_difference_of_the_drawn_tokens_log_probabilities(
    begun: Path, serve: Any, teacher: Path, distill: Any, tmp_path: Path
) -> None:
    """By plain transformers, one row at a time; two micro-batches, so two calls."""
    calls = Counted()
    proxy = Proxy(serve(model=teacher), calls)
    done = distill(tmp_path / "run", proxy.address, keys=("distill.max_steps=1", "distill.micro_batch_size=2"))
    proxy.close()
    (frame,) = read_steps(tmp_path / "run" / "distill" / "steps.bin")
    lengths, tokens = (frame.ranks[0].arrays[name].tolist() for name in ("lengths", "ids"))
    ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
    drawn = [tokens[end - length : end] for end, length in zip(ends, lengths)]
    places = range(len(calls.rows) - len(drawn) + 1)  # the evaluations are scored too
    groups = [calls.rows[place : place + len(drawn)] for place in places]
    (rows,) = [group for group in groups if all(row[-len(own) :] == own for row, own in zip(group, drawn))]
    student, of_teacher = (plain_log_probs(folder, rows) for folder in (begun / "sft" / "model", teacher))
    differences = [(p - q)[-length:] for p, q, length in zip(student, of_teacher, lengths)]
    (step,) = steps(tmp_path / "run")
    assert len(drawn) == 4 and step["loss"] == pytest.approx(torch.cat(differences).mean().item(), rel=1e-4)
    assert f"distill: the teacher is tiny on cpu in fp32, {proxy.address}" in done.stdout


def test_student_does_not_depend_on_servers_that_fail(
    serve: Any, teacher: Path, distill: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """One of two fails: the other scores its rows. Both fail: the run ends, and continues with others."""
    good = serve(model=teacher)
    distill(tmp_path / "whole", good.address)
    calls = Counted(broken=3)  # in the second step, after an evaluation in two calls
    proxy = Proxy(good, calls)
    done = distill(tmp_path / "replaced", proxy.address, good.address)
    assert (
        f"distill: teacher's server {proxy.address}: it refuses 'score': without a reason (status 500)" in done.stdout
    )
    assert calls.rows, "the first has scored nothing"
    calls.left = 3
    keys = ("distill.checkpoint_every=1",)
    done = distill(tmp_path / "resumed", proxy.address, keys=keys, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"distill.teacher_servers: no server is left ({proxy.address}: it refuses 'score'" in done.stderr
    proxy.close()
    other = tmp_path / "other"
    llama(len(tokenizer) + 40, seed=9).save_pretrained(other)
    tokenizer.save_pretrained(other)
    another = serve(model=other).address
    done = distill(tmp_path / "resumed", another, keys=keys, options=("--resume",), check=False)
    assert done.returncode == 2 and "(other weights)" in done.stderr, done.stderr
    distill(tmp_path / "resumed", good.address, keys=keys, options=("--resume",))
    for run in ("replaced", "resumed"):
        assert_same_weights(*(tmp_path / name / "distill" / "model" for name in (run, "whole")), atol=0)
    good.end()
    command = [sys.executable, "-m", "rlhf", "replay", str(tmp_path / "resumed"), "--stage", "distill", "--step", "3"]
    done = subprocess.run(
        command, env=user_environment() | {"RLHF_ACCELERATOR": "cpu"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, (done.stdout, done.stderr)


def test_server_that_fails_once_is_asked_again(serve: Any, teacher: Path, distill: Any, tmp_path: Path) -> None:
    failing = iter([True])

    def fail_once(call: str, body: bytes, forward: Any) -> tuple[int, bytes]:
        return (500, b"") if call == "score" and next(failing, False) else forward(body)

    proxy = Proxy(serve(model=teacher), fail_once)
    done = distill(tmp_path / "run", proxy.address, keys=("distill.max_steps=1",))
    proxy.close()
    assert f"teacher's server {proxy.address}: it refuses 'score'" in done.stdout


@pytest.mark.slow
def test_two_ranks_take_the_steps_of_one(serve: Any, teacher: Path, distill: Any, tmp_path: Path) -> None:
    addresses = [serve(model=teacher).address for _ in range(2)]
    for ranks in ("1", "2"):
        distill(tmp_path / ranks, *addresses, options=("--ranks", ranks))
    one, two = ([step["loss"] for step in steps(tmp_path / ranks)] for ranks in ("1", "2"))
    assert two == pytest.approx(one, rel=1e-4) and len(set(one)) == len(one)


@pytest.mark.parametrize("number", [math.nan, 3.0])
def test_scores_that_are_no_log_probabilities_are_refused(
    serve: Any, teacher: Path, distill: Any, tmp_path: Path, number: float
) -> None:
    def change(call: str, body: bytes, forward: Any) -> tuple[int, bytes]:
        status, content = forward(body)
        if call != "score":
            return status, content
        answer = json.loads(content)
        size = len(base64.b64decode(answer["log_probs"])) // 4
        answer["log_probs"] = base64.b64encode(np.full(size, number, "<f4")).decode()
        return status, json.dumps(answer).encode()

    proxy = Proxy(serve(model=teacher), change)
    done = distill(tmp_path / "run", proxy.address, check=False)
    proxy.close()
    assert (
        done.returncode == 2 and f"{proxy.address}: it has returned log-probabilities above 0, or that" in done.stderr
    )


def test_servers_without_this_teacher_are_refused_before_anything_is_trained(
    serve: Any, teacher: Path, distill: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """The tokens count, not the number of logits: sizes of a family have the same tokens, and other numbers."""
    permuted, wide = tmp_path / "permuted", tmp_path / "wide"
    shutil.copytree(teacher, permuted)
    content = json.loads((permuted / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[20:22]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (permuted / "tokenizer.json").write_text(json.dumps(content))
    llama(len(tokenizer) + 40, seed=9).save_pretrained(wide)
    tokenizer.save_pretrained(wide)
    server = serve(model=teacher)
    for addresses, message in [
        (["http://127.0.0.1:9"], "http://127.0.0.1:9: ConnectionRefusedError: Connection refused; start it: rlhf"),
        ([serve(model=permuted).address], "its model tiny has another vocabulary than the student"),
        ([server.address, serve(model=wide).address], "have different models; serve the same teacher everywhere"),
    ]:
        for options in ((), ("--dry-run",)):
            done = distill(tmp_path / "run", *addresses, options=options, check=False)
            assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
    done = distill(tmp_path / "run", serve(model=wide).address, options=("--dry-run",))
    assert "distill.teacher_servers  tiny on cpu in fp32" in done.stdout


def test_scores_are_refused_once_a_trainer_has_replaced_the_weights(serve: Any, teacher: Path, tmp_path: Path) -> None:
    server = serve(model=teacher)
    asked = {"receipt": json.loads(server.get(f"{CALLS}/capabilities")[1])["start"], "rows": [[2, 3]]}
    assert server.post(f"{CALLS}/score", asked)[0] == 200
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            tar.add(teacher / name, name)
    request = urllib.request.Request(f"{server.address}{CALLS}/weights", archive.getvalue(), method="PUT")
    assert server.send(request)[0] == 200
    status, answer = server.post(f"{CALLS}/score", asked)
    assert status == 409 and "other weights are loaded than those of this receipt" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["distill.teacher=x"], "distill.teacher=x: has no effect with distill.teacher_servers"),
        (["distill.divergence=forward"], "distill.divergence=forward: forward is not possible"),
        (["distill.sampling.temperature=0.7"], "distill.sampling: temperature 1 and all tokens are needed"),
        (["distill.updates=2"], "distill.updates=2: must be 1 with distill.teacher_servers"),
        (["distill.teacher_servers=[]", "distill.teacher_timeout=3"], "has no effect without distill.teacher_servers"),
        (["roles.teacher.frozen=int8"], "roles.teacher.frozen: the teacher is on distill.teacher_servers"),
    ],
)
def test_settings_that_servers_cannot_follow_are_refused(
    distill: Any, tmp_path: Path, keys: list[str], message: str
) -> None:
    done = distill(tmp_path / "run", "http://a:1", keys=tuple(keys), check=False)
    assert done.returncode == 2 and message in done.stderr, done.stderr
