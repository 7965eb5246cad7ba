"""Concurrent completions are those of plain transformers, whatever else is drawn at the same time."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch

from accelerators import ShapePolicy
from rlhf.config.schema import SamplingConfig, build_config
from rlhf.errors import ModelError
from rlhf.evaluation.models import EvaluationDevice, LanguageModel, load_language_model
from rlhf.serving.engine import CompletionJob, Engine, QueueFull

GREEDY = SamplingConfig(temperature=0)
PROMPTS = ([5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [20], [11, 12, 13, 14])


@pytest.fixture(params=["dynamic", "bucketed", "static"])
def model(request: Any, accelerator: Any, folder: Path) -> LanguageModel:
    device = EvaluationDevice(accelerator, accelerator.precision("fp32"), ShapePolicy(request.param))
    return load_language_model(folder, build_config({}), device)


class Running:
    """An engine whose main loop runs in a thread, and the completions that it has drawn."""

    def __init__(self, model: LanguageModel, **sizes: int) -> None:
        self.engine = Engine(model, **{"max_tokens": 24, "batch_size": 3, "max_waiting": 50} | sizes)
        self._thread = threading.Thread(target=self.engine.run)

    def job(self, prompt: list[int], sampling: SamplingConfig = GREEDY, seed: int = 0, tokens: int = 24) -> Any:
        queue: Queue[Any] = Queue()
        job: Any = CompletionJob(prompt, tokens, sampling, seed, queue.put)
        job.queue = queue
        return job

    def draw(self, *jobs: Any) -> list[list[Any]]:
        """Submit jobs together and return the tokens of each."""
        self.engine.submit(jobs)
        if not self._thread.is_alive():
            self._thread.start()
        return [self.tokens(job) for job in jobs]

    def tokens(self, job: Any) -> list[Any]:
        tokens = []
        while (item := job.queue.get(timeout=60)) is not None:
            if isinstance(item, Exception):
                raise item
            tokens.append(item)
        return tokens

    def end(self) -> None:
        self.engine.close()
        if self._thread.is_alive():
            self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture
def running(model: LanguageModel) -> Iterator[Running]:
    engine = Running(model)
    yield engine
    engine.end()


def expected(model: LanguageModel, prompt: list[int], length: int) -> list[int]:
    """The greedy completion by transformers."""
    ids = torch.tensor([prompt])
    output = model.module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=length,
        do_sample=False,
        eos_token_id=model.end_ids,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def test_greedy_completions_are_those_of_transformers(running: Running, model: LanguageModel) -> None:
    lengths = [3, 24, 1, 17]
    drawn = running.draw(*[running.job(prompt, tokens=length) for prompt, length in zip(PROMPTS, lengths)])
    for prompt, length, tokens in zip(PROMPTS, lengths, drawn):
        assert [token.id for token in tokens] == expected(model, prompt, length)


def test_end_token_ends_a_completion(running: Running, model: LanguageModel) -> None:
    whole = expected(model, PROMPTS[0], 24)
    model.end_ids[:] = [whole[5]]
    running.end()
    again = Running(model)
    (tokens,) = again.draw(again.job(PROMPTS[0]))
    again.end()
    assert [token.id for token in tokens] == whole[: whole.index(whole[5]) + 1]
    assert [token.ended for token in tokens] == [False] * (len(tokens) - 1) + [True]


def test_log_probs_are_those_of_the_distribution_drawn_from(running: Running, model: LanguageModel) -> None:
    exact = copy.deepcopy(model.module).double()
    sampling = SamplingConfig(temperature=0.7)
    for prompt, tokens in zip(PROMPTS, running.draw(*[running.job(prompt, sampling) for prompt in PROMPTS])):
        ids = [token.id for token in tokens]
        with torch.no_grad():
            logits = exact(torch.tensor([prompt + ids])).logits[0]
        truth = (logits[len(prompt) - 1 : -1] / 0.7).log_softmax(-1)[range(len(ids)), ids]
        assert torch.tensor([token.log_prob for token in tokens]).double() == pytest.approx(truth, abs=2e-5)


def test_a_seed_decides_a_completion_whatever_else_is_drawn(running: Running) -> None:
    sampling = SamplingConfig()
    jobs = [running.job(PROMPTS[1], sampling, seed=7)]
    (alone,) = running.draw(*jobs)
    others = [running.job(PROMPTS[0], sampling, seed=seed) for seed in range(6)]
    first, again, *rest = running.draw(others[0], running.job(PROMPTS[1], sampling, seed=7), *others[1:])
    assert [token.id for token in again] == [token.id for token in alone]
    assert len({tuple(token.id for token in tokens) for tokens in (first, *rest)}) == 6, "each seed another"


def test_completions_of_another_sampling_wait_for_their_turn(running: Running, model: LanguageModel) -> None:
    mixed = [
        running.job(PROMPTS[0], SamplingConfig(temperature=temperature), seed=1) for temperature in (0, 1, 0, 1, 0.5, 0)
    ]
    drawn = [[token.id for token in tokens] for tokens in running.draw(*mixed)]
    assert drawn[0] == drawn[2] == drawn[5] == expected(model, PROMPTS[0], 24)
    assert drawn[1] == drawn[3] != drawn[0]


def test_cancelled_completion_makes_room(running: Running) -> None:
    waiting = running.job(PROMPTS[0])
    drawn = running.job(PROMPTS[1])
    waiting.cancelled = True
    received: list[Any] = []

    def receive_two(item: Any) -> None:
        received.append(item)
        drawn.cancelled = len(received) >= 2
        drawn.queue.put(item)

    drawn.receive = receive_two
    running.engine.submit([waiting])
    (tokens,) = running.draw(drawn)
    assert len(tokens) == 2 and waiting.queue.empty(), "one is never drawn, the other no further"
    assert len(running.draw(running.job(PROMPTS[0]))[0]) == 24


def test_full_queue_refuses_all_completions_of_a_request(model: LanguageModel) -> None:
    engine = Engine(model, max_tokens=4, batch_size=2, max_waiting=5)
    jobs = [Running.job(None, PROMPTS[0]) for _ in range(6)]  # type: ignore[arg-type]
    engine.submit(jobs[:4])
    with pytest.raises(QueueFull, match="4 completions wait already"):
        engine.submit(jobs[4:])
    assert engine.waiting == 4


@pytest.mark.parametrize("temperature", [0, 1])
def test_wrong_numbers_end_a_request_and_not_the_engine(
    running: Running, model: LanguageModel, temperature: float
) -> None:
    weight = model.module.model.norm.weight
    healthy = weight.clone()
    weight.data.fill_(float("nan"))
    with pytest.raises(ModelError, match="a log-probability is nan in fp32"):
        running.draw(running.job(PROMPTS[0], SamplingConfig(temperature=temperature)))
    weight.data.copy_(healthy)
    held: list[Any] = []  # as a client holds the error while the next batch is drawn
    for _ in range(3):
        weight.data.fill_(float("nan"))
        with pytest.raises(ModelError) as failed:
            running.draw(running.job(PROMPTS[0], SamplingConfig(temperature=temperature)))
        held.append(failed.value)
        weight.data.copy_(healthy)
        job = running.job(PROMPTS[0])
        received = job.receive
        job.receive = lambda item, receive=received: (held.clear(), receive(item))
        (tokens,) = running.draw(job)
        assert [token.id for token in tokens] == expected(model, PROMPTS[0], 24)


def test_closed_engine_draws_what_waits(model: LanguageModel) -> None:
    running = Running(model)
    jobs = [running.job(prompt) for prompt in PROMPTS]
    running.engine.submit(jobs)
    running.engine.close()
    running.engine.run()
    drawn = [[token.id for token in running.tokens(job)] for job in jobs]
    assert drawn == [expected(model, prompt, 24) for prompt in PROMPTS]
