"""Rollouts one step ahead: servers draw the next one while this one trains (`ppo.rollout.staleness: 1`).

Of steps counted from 1, step k trains on completions that the weights after k - 2 steps have drawn, and steps 1 and 2
both on those of the first weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf.data.batches import Batch
from rlhf.engine import distributed
from rlhf.errors import RunError
from rlhf.generation.decoder import Decoder
from rlhf.rollouts.protocol import DrawnRow
from rlhf.trainers.ppo.rollout_servers import RolloutServers, Version


@dataclass(frozen=True)
class _Request:
    """A rollout that servers draw, or have drawn: `wait` returns this rank's rows."""

    index: int
    generator_state: Tensor  # before its random numbers
    wait: Callable[[], Sequence[DrawnRow]]


class RolloutsAhead:
    """The rollout of the next step.

    Attributes:
        servers: draw it.
    """

    def __init__(
        self, servers: RolloutServers, decoder: Decoder, prompts: Callable[[int], Batch], total_steps: int
    ) -> None:
        """Prepare to draw.

        Args:
            servers: draw the completions.
            decoder: draws the random numbers.
            prompts: returns this rank's prompts of a step, by its index.
            total_steps: of the stage: nothing is drawn after them.
        """
        self.servers, self._decoder, self._prompts, self._total_steps = servers, decoder, prompts, total_steps
        self._next: _Request | None = None

    def generator_state(self, index: int) -> Tensor:
        """Return the state of the decoder's generator before the random numbers of step `index`."""
        request = self._find(index)
        return request.generator_state if request else self._decoder.random.get_state()

    def take(self, index: int, version: Version | None) -> Sequence[DrawnRow]:
        """Return this rank's completions of step `index`, and have those of the next step drawn from `version`.

        Without a version nothing is drawn, and only the generator moves on as if it were.

        Raises:
            RunError: every server has failed.
        """
        # There is none for the first step, and for the one after a step that was left out.
        request = self._find(index) or self._request(index, version)
        rows = request.wait()
        self._next = self._request(index + 1, version) if index + 1 < self._total_steps else None
        return rows

    def _find(self, index: int) -> _Request | None:
        return self._next if self._next and self._next.index == index else None

    def _request(self, index: int, version: Version | None) -> _Request:
        state, prompts = self._decoder.random.get_state(), self._prompts(index)
        numbers = self._decoder.draw_numbers(len(prompts["prompt_ids"]))
        if version is None:
            return _Request(index, state, lambda: ())
        self.servers.hand_over(version)
        return _Request(index, state, self.servers.request(prompts, numbers))

    def state_dict(self) -> dict[str, Any]:
        """Return the next step's rollout, once it is drawn, of all ranks; empty if there is none.

        If no server is left, the state has only the generator: the next step fails, and a resumed run draws again.
        """
        if self._next is None:
            return {}
        state = {"index": self._next.index, "generator": self._next.generator_state}
        try:
            own = list(self._next.wait())
        except RunError:
            own = None
        parts = distributed.all_gather_objects(own)
        rows = [row for part in parts for row in part or ()]
        if None not in parts:
            state["ids"] = [torch.tensor(row.ids) for row in rows]
            state["log_probs"] = [torch.from_numpy(row.log_probs) for row in rows]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; the generator is set to where a rollout that has to be drawn again starts."""
        self._next = None
        if not state:
            return
        if "ids" not in state:
            self._decoder.random.set_state(state["generator"])
            return
        rank, size = distributed.world().rank, distributed.world().size
        count = len(state["ids"]) // size
        own = slice(rank * count, (rank + 1) * count)
        rows = [
            DrawnRow(ids=ids.tolist(), log_probs=np.array(log_probs.tolist(), np.float32))
            for ids, log_probs in zip(state["ids"][own], state["log_probs"][own])
        ]
        self._next = _Request(state["index"], state["generator"], lambda: rows)
