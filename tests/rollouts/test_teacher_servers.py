"""Distillation from a teacher on servers: its numbers, its failures, and what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf.reporting.step_records import read_steps
from tests.helpers import assert_same_weights, llama, sets
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
    assert f"the teacher is tiny on cpu in fp32, {proxy.address}" in done.stdout


def test_student_does_not_depend_on_servers_that_fail(serve: Any, teacher: Path, distill: Any, tmp_path: Path) -> None:
    """One of two fails: the other scores its rows. Both fail: the run ends, and continues when they are back."""
    good = serve(model=teacher)
    distill(tmp_path / "whole", good.address)
    calls = Counted(broken=3)  # in the second step, after an evaluation in two calls
    proxy = Proxy(good, calls)
    done = distill(tmp_path / "replaced", proxy.address, good.address)
    assert f"distill: teacher {proxy.address}: it refuses 'score'" in done.stdout and "the others" in done.stdout
    calls.left = 3
    keys = ("distill.checkpoint_every=1",)
    done = distill(tmp_path / "resumed", proxy.address, keys=keys, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"distill.teacher_servers: no server is left ({proxy.address}: it refuses 'score'" in done.stderr
    distill(tmp_path / "resumed", good.address, keys=keys, options=("--resume",))
    proxy.close()
    for run in ("replaced", "resumed"):
        assert_same_weights(*(tmp_path / name / "distill" / "model" for name in (run, "whole")), atol=0)


@pytest.mark.slow
def test_two_ranks_take_the_steps_of_one(serve: Any, teacher: Path, distill: Any, tmp_path: Path) -> None:
    addresses = [serve(model=teacher).address for _ in range(2)]
    for ranks in ("1", "2"):
        distill(tmp_path / ranks, *addresses, options=("--ranks", ranks))
    one, two = ([step["loss"] for step in steps(tmp_path / ranks)] for ranks in ("1", "2"))
    assert two == pytest.approx(one, rel=1e-4) and len(set(one)) == len(one)


def test_servers_without_this_teacher_are_refused_before_anything_is_trained(
    serve: Any, teacher: Path, distill: Any, tokenizer: Any, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    llama(len(tokenizer) + 40).save_pretrained(other)
    tokenizer.save_pretrained(other)
    wide, server = serve(model=other), serve(model=teacher)
    renamed = Proxy(server, lambda call, body, forward: rename(*forward(body)))
    for addresses, message in [
        (
            ["http://127.0.0.1:9"],
            "http://127.0.0.1:9: ConnectionRefusedError: Connection refused; start it: rlhf serve",
        ),
        ([wide.address], f"its model tiny has {len(tokenizer) + 40} tokens, and the student has {len(tokenizer)}"),
        ([server.address, renamed.address], "serve the same teacher everywhere"),
    ]:
        done = distill(tmp_path / "run", *addresses, check=False)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    renamed.close()
    assert not (tmp_path / "run" / "distill" / "model").exists()


def rename(status: int, content: bytes) -> tuple[int, bytes]:
    return status, content.replace(b'"model":"tiny"', b'"model":"another"')


def test_scores_are_refused_once_a_trainer_has_replaced_the_weights(serve: Any, teacher: Path, tmp_path: Path) -> None:
    import io
    import tarfile
    import urllib.request

    server = serve(model=teacher)
    asked = {"receipt": "", "rows": [[2, 3]]}
    assert server.post(f"{CALLS}/score", asked)[0] == 200
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            tar.add(teacher / name, name)
    request = urllib.request.Request(f"{server.address}{CALLS}/weights", archive.getvalue(), method="PUT")
    assert server.send(request)[0] == 200
    status, answer = server.post(f"{CALLS}/score", asked)
    assert status == 409 and answer["error"]["message"] == "a trainer has replaced the weights of the start"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["distill.teacher=x"], "distill.teacher=x: has no effect with distill.teacher_servers"),
        (["distill.divergence=forward"], "distill.divergence=forward: forward is not possible"),
        (["distill.sampling.temperature=0.7"], "distill.sampling: temperature 1 and all tokens are needed"),
        (["distill.passes=2"], "distill.passes=2: must be 1 with distill.teacher_servers"),
        (["distill.teacher_servers=[]", "distill.teacher_timeout=3"], "has no effect without distill.teacher_servers"),
        (["roles.teacher.frozen=int8"], "roles.teacher.frozen: the teacher is on distill.teacher_servers"),
    ],
)
def test_settings_that_servers_cannot_follow_are_refused(
    distill: Any, tmp_path: Path, keys: list[str], message: str
) -> None:
    done = distill(tmp_path / "run", "http://a:1", keys=tuple(keys), check=False)
    assert done.returncode == 2 and message in done.stderr, done.stderr
