"""Distillation's teacher behind rollout servers (`rlhf serve TEACHER --rollouts`): it scores what the student draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlhf.data.batches import Batch
from rlhf.engine import distributed
from rlhf.errors import ConfigError, RunError
from rlhf.rollouts.client import RolloutServer, ServerError
from rlhf.rollouts.protocol import ScoreRequest

if TYPE_CHECKING:
    from rlhf.trainers.context import StageContext

_KEY = "distill.teacher_servers"


class TeacherServers:
    """The servers of `distill.teacher_servers`. Ranks share them out; if one fails, the others take its rows."""

    def __init__(self, context: StageContext, vocabulary: int) -> None:
        """Meet the servers, on rank 0.

        Args:
            context: of the stage.
            vocabulary: number of the student's logits.

        Raises:
            ConfigError: a server cannot be reached, has another vocabulary, or its context is too short.
        """
        self._context = context
        urls = context.config.distill.teacher_servers
        servers = [RolloutServer(url, context.config.distill.teacher_timeout) for url in urls]
        for server in servers:
            context.exits.callback(server.close)  # a call must not hold up the end of the process
        with distributed.on_main("meeting the teacher's servers", takes_long=True) as main:
            if main:
                models = {self._meet(server, vocabulary): server.url for server in servers}
                if len(models) > 1:
                    serve = " and ".join(f"{url} has {model}" for model, url in models.items())
                    raise ConfigError(f"{_KEY}: {serve}; serve the same teacher everywhere")
        first = context.world.rank % len(servers)
        self._usable = servers[first:] + servers[:first]

    def _meet(self, server: RolloutServer, vocabulary: int) -> str:
        """Return the name of a server's model."""
        try:
            has = server.capabilities()
        except ServerError as error:
            raise ConfigError(f"{_KEY}: {server.url}: {error}; start it: rlhf serve TEACHER --rollouts") from error
        if has.vocabulary != vocabulary:
            raise ConfigError(
                f"{_KEY}: {server.url}: its model {has.model} has {has.vocabulary} tokens, and the student has "
                f"{vocabulary}; serve a teacher with the student's tokenizer"
            )
        lengths = self._context.config.data
        if has.max_length < lengths.max_length:
            raise ConfigError(
                f"{_KEY}: {server.url}: its context has {has.max_length} tokens, and rows have up to "
                f"{lengths.max_length}; lower data.max_prompt_length or data.max_completion_length"
            )
        self._context.say(f"distill: the teacher is {has.model} on {has.accelerator} in {has.precision}, {server.url}")
        return has.model

    def log_probs(self, part: Batch) -> Tensor:
        """Return the teacher's log-probabilities of a micro-batch's completions, [n, a], at temperature 1.

        Args:
            part: `input_ids` and `attention_mask` [n, t]; `action_mask` [n, a] of the last a columns.

        Raises:
            RunError: no server is left.
        """
        mask = torch.tensor(part["attention_mask"].tolist(), dtype=torch.bool)
        rows = [[token for token, here in zip(*row) if here] for row in zip(part["input_ids"].tolist(), mask.tolist())]
        numbers = torch.zeros(mask.shape)
        numbers[mask & (mask.cumsum(1) > 1)] = torch.from_numpy(self._score(rows))  # all but the first of each row
        moved: Batch = self._context.accelerator.to_device({"teacher": numbers[:, -part["action_mask"].shape[1] :]})
        return moved["teacher"]

    def _score(self, rows: list[list[int]]) -> np.ndarray:
        """Return the log-probabilities of the rows' tokens, see `rlhf.rollouts.protocol.Scored`."""
        failed = []
        while self._usable:
            server = self._usable[0]
            try:
                return server.score(ScoreRequest(receipt="", rows=rows))
            except ServerError as error:
                failed.append(f"{server.url}: {error}")
                self._context.say(f"distill: teacher {failed[-1]}; the others replace it")
                self._usable.remove(server)
        raise RunError(
            f"{_KEY}: no server is left ({'; '.join(failed)}); the run ends with its last good state: start them "
            "again, and continue with --resume"
        )
