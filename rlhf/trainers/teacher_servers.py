"""Distillation's teacher on rollout servers (`rlhf serve TEACHER --rollouts`), which score what the student draws."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlhf.config.schema import Config, Stage
from rlhf.data.batches import Batch
from rlhf.engine import distributed
from rlhf.errors import ConfigError, RunError
from rlhf.models.tokenizers import digest_vocabulary
from rlhf.roles.model_identity import StartModel
from rlhf.rollouts.client import RolloutServer
from rlhf.rollouts.protocol import Capabilities, ScoreRequest
from rlhf.rollouts.server_pool import meet, real_tokens, share_rows

if TYPE_CHECKING:
    from rlhf.trainers.context import StageContext
    from rlhf.trainers.ppo.experience import Rollout

_KEY = "distill.teacher_servers"
_PAUSE = 1.0  # seconds before servers that have all failed are asked once more


def meet_teachers(config: Config) -> list[tuple[str, Capabilities]]:
    """Return the address of each server, and what it has loaded.

    Raises:
        ConfigError: one cannot be reached, its context is too short, or its model is not that of the others.
    """
    servers = []
    for url in config.distill.teacher_servers:
        server = RolloutServer(url, config.distill.teacher_timeout)
        remedy = "start it: rlhf serve TEACHER --rollouts"
        servers.append((url, meet(server, _KEY, config.data.max_length, remedy)))
        if servers[-1][1].start != servers[0][1].start:
            raise ConfigError(
                f"{_KEY}: {servers[0][0]} and {url} have different models; serve the same teacher everywhere"
            )
    return servers


def check_teachers(config: Config, tokenizer: Any) -> tuple[str, list[str]]:
    """Return the digest of the teacher's weights, and a line about each server, if it has the student's `tokenizer`.

    Raises:
        ConfigError: as `meet_teachers`, or the vocabulary is another.
    """
    servers, vocabulary = meet_teachers(config), digest_vocabulary(tokenizer)
    for url, has in servers:
        if has.tokenizer != vocabulary:
            raise ConfigError(
                f"{_KEY}: {url}: its model {has.model} has another vocabulary than the student; serve a teacher with "
                "the student's tokenizer"
            )
    return servers[0][1].start, [f"{has.model} on {has.accelerator} in {has.precision}, {url}" for url, has in servers]


def identify_teachers(config: Config, stage: Stage) -> dict[str, StartModel]:
    """Return the content of the model that servers have, by key; empty for a stage without them."""
    if stage != "distill" or not config.distill.teacher_servers:
        return {}
    identity = {"weights": meet_teachers(config)[0][1].start}
    return {_KEY: StartModel(", ".join(config.distill.teacher_servers), identity)}


class TeacherServers:
    """The servers of `distill.teacher_servers`; every rank asks all of them."""

    def __init__(self, context: StageContext, tokenizer: Any, rows: int) -> None:
        """Prepare to ask; servers are met at the first call.

        Args:
            context: of the stage.
            tokenizer: the student's.
            rows: maximum number of rows that a server scores at a time.
        """
        self._context, self._tokenizer, self._rows = context, tokenizer, rows
        settings = context.config.distill
        self._servers = [RolloutServer(url, settings.teacher_timeout) for url in settings.teacher_servers]
        self._teacher = ""  # digest of its weights, which servers repeat
        for server in self._servers:
            context.exits.callback(server.close)  # a call in a thread must not hold up the end of the process

    def score(self, rollout: Rollout) -> Tensor:
        """Return the teacher's log-probabilities of a rollout's completions at temperature 1, [B, A].

        They are 0 in rows that only fill up the batch. All ranks call it.

        Raises:
            ConfigError: at the first call, as `check_teachers`.
            RunError: no server is left.
        """
        if not self._teacher:
            with distributed.on_main("meeting the teacher's servers", takes_long=True) as main:
                if main:
                    self._teacher, lines = check_teachers(self._context.config, self._tokenizer)
                    for line in lines:
                        self._context.say(f"distill: the teacher is {line}")
            self._teacher = distributed.all_gather_objects(self._teacher)[0]
        mask = rollout.attention_mask * rollout.row_mask.unsqueeze(1)
        rows = real_tokens(rollout.input_ids, mask)
        asked = [number for number, row in enumerate(rows) if row]
        scores, failed = self._ask([rows[number] for number in asked])
        for lines in distributed.all_gather_objects(failed):
            for line in lines:
                self._context.say(f"distill: teacher's server {line}; its rows were asked for again")
        here = torch.tensor(mask.tolist(), dtype=torch.bool)
        numbers = torch.zeros(here.shape)
        numbers[here & (here.cumsum(1) > 1)] = torch.from_numpy(np.concatenate([np.empty(0, np.float32), *scores]))
        moved: Batch = self._context.accelerator.to_device({"scores": numbers[:, -rollout.completion_length :]})
        return moved["scores"]

    def _ask(self, rows: list[list[int]]) -> tuple[list[np.ndarray], list[str]]:
        """Return the log-probabilities of each row's tokens but its first, and which servers have failed."""

        def score(server: RolloutServer, share: Sequence[int]) -> list[np.ndarray]:
            scores: list[np.ndarray] = []
            for start in range(0, len(share), self._rows):
                part = [rows[number] for number in share[start : start + self._rows]]
                answer = server.score(ScoreRequest(receipt=self._teacher, rows=part))
                scores += np.split(answer, np.cumsum([len(row) - 1 for row in part])[:-1])
            return scores

        lost: list[str] = []
        try:
            return share_rows(_KEY, list(self._servers), lost, len(rows), score)
        except RunError:  # all have failed
            time.sleep(_PAUSE)
            scores, failed = share_rows(_KEY, list(self._servers), [], len(rows), score)
            return scores, [*lost, *failed]
