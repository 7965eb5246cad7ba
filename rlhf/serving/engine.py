"""Draw the completions of concurrent requests with one model, on the thread that owns the device.

Requests submit jobs, one for each completion, from any thread. The engine draws those that wait together, as long as
their sampling is the same; what arrives meanwhile waits for the next batch. Each token is passed on when it is drawn.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from accelerators import ShapePolicy
from rlhf.config.schema import SamplingConfig
from rlhf.data.batches import pad_left
from rlhf.evaluation.models import LanguageModel
from rlhf.generation.decoder import Decoder, DrawnToken
from rlhf.generation.rank_groups import PromptBatch

T = TypeVar("T")

Event = DrawnToken | Exception | None
"""What a job receives: a token, the error that ends its completion, or None after the last token."""


@dataclass(eq=False)
class CompletionJob:
    """A completion to draw.

    Attributes:
        seed: determines the random numbers, whatever else is drawn at the same time.
        receive: called by the engine's thread with each token, and with the end.
        cancelled: set by any thread if nobody needs more tokens.
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    sampling: SamplingConfig
    seed: int
    receive: Callable[[Event], None]
    cancelled: bool = False
    drawn: int = field(default=0, init=False)

    @property
    def is_done(self) -> bool:
        """Return whether no more tokens are needed."""
        return self.cancelled or self.drawn >= self.max_tokens


class QueueFull(Exception):
    """Too many completions wait already."""


class Engine:
    """One model, its decoder, and the jobs that wait.

    Attributes:
        shapes: the lengths to which rows are padded.
        rows: number of completions that are being drawn.
        waiting: number of completions that wait.
    """

    def __init__(
        self, model: LanguageModel, *, max_tokens: int, batch_size: int, max_waiting: int, host: Engine | None = None
    ) -> None:
        """Prepare a decoder.

        Args:
            model: the model to serve.
            max_tokens: maximum length of a completion in tokens.
            batch_size: maximum number of completions that are drawn at the same time.
            max_waiting: maximum number of completions that wait.
            host: the engine whose thread draws for this one too; None: this engine has its thread, in `run`.
        """
        self.model, self.max_tokens, self.max_waiting = model, max_tokens, max_waiting
        self.rows = 0
        self._batch_size = batch_size
        device = model.device
        # Prompts of any length may come, so a single shape would be as long as the model's context.
        self.shapes = ShapePolicy("bucketed") if device.shapes.kind == "static" else device.shapes
        self._pad_id: Any = model.tokenizer.pad_token_id
        self._decoder = self.make_decoder(max_tokens, model.end_ids)
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._restore_weights: Callable[[], None] | None = None
        self._convert_weights()
        self._jobs: deque[CompletionJob] = deque()
        self._changed = threading.Condition()
        self._host = host
        self._closed = host is not None  # then `run` returns when no job waits
        self._ended = False

    def make_decoder(self, tokens: int, end_ids: Sequence[int]) -> Decoder:
        """Return a decoder for completions of up to `tokens` tokens, which the `end_ids` end."""
        return Decoder(
            self.model.device.accelerator,
            eos_ids=end_ids,
            pad_id=self._pad_id,
            max_new_tokens=tokens,
            shapes=self.shapes,
            batch_size=self._batch_size,
        )

    @contextmanager
    def changing_weights(self) -> Iterator[None]:
        """Let the engine's thread change weights in this block, or replace `model`."""
        self._decoder.release()
        if self._restore_weights:
            self._restore_weights()
            self._restore_weights = None
        try:
            yield
        finally:
            self._convert_weights()

    def _convert_weights(self) -> None:
        """Convert weights to the layout that the device reads fastest."""
        if prepare := self.model.device.accelerator.kernels.get("inference_weights"):
            self._restore_weights = prepare(self.model.module, keep=False)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the engine's thread, after the batch that is being drawn.

        Once the engine has ended, the result is cancelled.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._ended:
                future.cancel()
            else:
                self._calls.append((future, function))
                self._changed.notify()
        return future

    @property
    def waiting(self) -> int:
        """Return the number of completions that wait."""
        return len(self._jobs)

    def submit(self, jobs: Sequence[CompletionJob]) -> None:
        """Add jobs to the queue: all or none.

        Raises:
            QueueFull: too many wait.
        """
        with self._changed:
            if len(self._jobs) + len(jobs) > self.max_waiting:
                raise QueueFull(f"{len(self._jobs)} completions wait already; try again later")
            self._jobs.extend(jobs)
            self._changed.notify()
        if self._host:
            self._host.call(self.run)

    def close(self) -> None:
        """Let `run` return when no job waits."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def run(self) -> None:
        """Draw completions until the engine is closed; the thread must be the one that bound the device."""
        try:
            while (jobs := self._next_batch()) is not None:
                if not jobs:
                    _run_call(*self._calls.popleft())
                    continue
                self.rows = len(jobs)
                try:
                    self._draw(jobs)
                except Exception as error:  # a fault in one batch must not end the server; the requests report it
                    self._decoder.release()
                    for job in jobs:
                        job.receive(error)
                self.rows = 0
        finally:
            with self._changed:
                self._ended = self._host is None  # that one's thread may call `run` again
                for future, _ in self._calls:  # after an interrupt
                    future.cancel()
        self._decoder.release()

    def _next_batch(self) -> list[CompletionJob] | None:
        """Wait for jobs and return the next batch of them: an empty one before a call, None if the engine is closed."""
        with self._changed:
            while True:
                while self._jobs and self._jobs[0].cancelled:
                    self._jobs.popleft()
                if self._jobs or self._calls or self._closed:
                    break
                self._changed.wait()
            if self._calls:
                return []
            if not self._jobs:
                return None
            sampling = self._jobs[0].sampling
            alike = (job for job in self._jobs if job.sampling == sampling and not job.cancelled)
            jobs = list(islice(alike, self._batch_size))
            chosen = set(map(id, jobs))
            self._jobs = deque(job for job in self._jobs if id(job) not in chosen)
            return jobs

    def _draw(self, jobs: Sequence[CompletionJob]) -> None:
        device = self.model.device
        rows = len(jobs)
        if self.shapes.kind != "dynamic":  # the number of rows is part of a shape
            rows = min(1 << (rows - 1).bit_length(), self._batch_size)
        prompts = self._prompts([*jobs, *[jobs[-1]] * (rows - len(jobs))])
        with (
            device.forward_context(f"{rows} completions"),
            # Closed here, on this thread: the buffers are used again by the next batch.
            closing(self._decoder.stream(self.model.module, prompts, jobs[0].sampling)) as steps,
        ):
            tokens = next(steps)
            while True:
                if any(math.isnan(token.log_prob) for token in tokens.values()):
                    raise self.model.invalid_number("a log-probability is nan")
                for row, token in tokens.items():
                    if row < len(jobs) and not jobs[row].is_done:
                        jobs[row].drawn += 1
                        jobs[row].receive(token)
                done = [row for row in range(rows) if row >= len(jobs) or jobs[row].is_done]
                try:
                    tokens = steps.send(done)
                except StopIteration:
                    break
        for job in jobs:
            job.receive(None)
        self._decoder.release_if_large()

    def _prompts(self, jobs: Sequence[CompletionJob]) -> PromptBatch:
        device = self.model.device
        longest = self.model.max_length
        ids, mask = pad_left([job.prompt_ids for job in jobs], self.shapes, longest, self._pad_id)
        uniform = torch.stack([self._random_numbers(job.seed) for job in jobs], dim=1)
        return PromptBatch(*device.accelerator.to_device((ids, mask, uniform)))

    def _random_numbers(self, seed: int) -> Tensor:
        """Return a number in [0, 1) for each token, [A]."""
        generator = torch.Generator(self.model.device.accelerator.host_device())
        return torch.rand(self.max_tokens, generator=generator.manual_seed(seed))


def _run_call(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
