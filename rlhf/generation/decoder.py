"""Generation with a static KV cache: one prefill, then one token a step, every shape known beforehand.

Which rows have ended is asked every few steps only; they leave then, where the session can do without them. A rollout
may be cut into parts of one shape, one after the other in the same buffers (`rlhf.generation.decode_state`); the
random numbers
are those of the whole rollout, so the samples are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from accelerators import Accelerator, CaptureError
from rlhf.config.schema import SamplingConfig
from rlhf.generation.decode_state import Capture, DecodeOptions, DecodeState
from rlhf.generation.rank_groups import Prompts, SingleRank

if TYPE_CHECKING:
    from accelerators import ShapePolicy

_STEPS_BETWEEN_STOP_CHECKS = 4
_ROOM = 20  # buffers above this part of the device's memory are not kept while the model trains

logger = logging.getLogger(__name__)


class Completions(NamedTuple):
    """ids: [B, A], padded right; mask: [B, A], 1 on the tokens drawn, the end-of-sequence token included."""

    ids: Tensor
    mask: Tensor


class Decoder:
    """Draws completions. Buffers, the cache and the recorded step of each shape are kept for the next call of it."""

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        eos_ids: Sequence[int],
        pad_id: int,
        max_new_tokens: int,
        shapes: ShapePolicy | None = None,
        batch_size: int | None = None,
        team: SingleRank | None = None,
    ) -> None:
        """Sizes of the buffers, and the ranks that generate together.

        Args:
            batch_size: rows of this rank that are generated at a time, at most; None: all of a call.
            team: None: this rank generates alone.
        """
        self.accelerator = accelerator
        self.eos_ids = torch.tensor(list(eos_ids), device=accelerator.device())
        self.pad_id = pad_id
        self.max_new_tokens = max_new_tokens
        self.shapes = shapes or accelerator.shape_policy()
        self.batch_size = batch_size
        self.team = team or SingleRank()
        self._capture: Capture | None = accelerator.capture if self.team.records else None
        self._sessions: list[DecodeState] = []
        self._known: set[torch.Size] = set()

    @torch.no_grad()
    def generate(
        self,
        model: nn.Module,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        sampling: SamplingConfig,
    ) -> Completions:
        """Complete each prompt until it ends or has `max_new_tokens` tokens.

        Args:
            model: a causal language model of transformers as the team holds it, in evaluation mode.
            prompt_ids, prompt_mask: [B, P], padded left.

        Returns:
            A columns: `max_new_tokens` under a static shape policy, fewer under the others if all rows end early.
        """
        uniform = torch.rand(self.max_new_tokens, len(prompt_ids), device=prompt_ids.device)
        prompts = Prompts(prompt_ids, prompt_mask, uniform)
        try:
            return self._generate(model, prompts, sampling)
        except CaptureError as refusal:
            # Where nothing is recorded, nothing is lost; and the line to blame is for authors, not for users.
            if self.accelerator.kernels.capabilities()["graph_capture"].ok:
                logger.warning(
                    "generation is slower than it could be: the code of this model cannot be recorded; other "
                    "architectures can (--debug says why)"
                )
            logger.debug("generation is not recorded: %s", refusal)
            self._capture = None
            self.release()
            return self._generate(model, prompts, sampling)

    def release(self) -> None:
        """Give back caches, buffers and what was recorded over them; the next call makes them anew."""
        if self._sessions:
            self._forget()
            self.accelerator.empty_cache()

    def make_room(self) -> None:
        """Release what is large beside the device's memory, for training that follows.

        Recording a step anew costs about two steps of a rollout of hundreds; small buffers are worth keeping.
        """
        if sum(session.size() for session in self._sessions) > self.accelerator.memory().total / _ROOM:
            self.release()

    def _generate(self, model: nn.Module, prompts: Prompts, sampling: SamplingConfig) -> Completions:
        parts = [self._part(model, part, sampling) for part in prompts.parts(self.batch_size)]
        rows, length = len(prompts.ids), max(part.ids.shape[1] for part in parts)
        ids = [pad(part.ids, (0, length - part.ids.shape[1]), value=self.pad_id) for part in parts]
        masks = [pad(part.mask, (0, length - part.mask.shape[1])) for part in parts]
        return Completions(torch.cat(ids)[:rows], torch.cat(masks)[:rows])

    def _part(self, model: nn.Module, own: Prompts, sampling: SamplingConfig) -> Completions:
        prompts = self.team.gathered(own)
        session = self._session(model, prompts.ids, sampling)
        whole = self._goes_on(session)
        try:
            with session.local_attention.replace_tables():
                session.start(prompts)
                while session.done < self.max_new_tokens:
                    if session.done % _STEPS_BETWEEN_STOP_CHECKS == 0:
                        finished = session.finished[: session.rows]
                        alive = self.team.alive(torch.zeros_like(finished) if whole else finished)
                        if not alive:
                            break
                        session.keep(alive)
                    session.step()
                    self.accelerator.step_boundary("rollout/decode")
        finally:
            session.cache.reset()
        length = self.shapes.length(session.done, self.max_new_tokens)
        drawn = (self.team.own(tensor)[:, :length].clone() for tensor in session.drawn())
        return Completions(*drawn)

    def _goes_on(self, session: DecodeState) -> bool:
        """Whether a rollout takes all of its steps although all rows have ended.

        The first of a shape does, where shapes are few: a device that records or compiles its steps then meets all of
        them, and none is new later on.
        """
        if session.drawing.eager or self.shapes.kind == "dynamic" or session.shape in self._known:
            return False
        self._known.add(session.shape)
        return True

    def _eager(self) -> bool:
        """Whether shapes are free: no policy fixes them, and nothing is recorded or compiled that could be repeated."""
        own = getattr(self.accelerator.capture, "__func__", None) is not Accelerator.capture  # who knows what it does
        recorded = self._capture is not None and (own or self.accelerator.kernels.capabilities()["graph_capture"].ok)
        return not (recorded or self.accelerator.is_lazy() or self.shapes.kind == "static")

    def _session(self, model: nn.Module, prompt_ids: Tensor, sampling: SamplingConfig) -> DecodeState:
        for session in self._sessions:
            if session.fits(model, prompt_ids, sampling):
                return session
        if self.shapes.kind == "dynamic":  # this shape may never come again
            self._forget()
        drawing = DecodeOptions(self.eos_ids, self.pad_id, self.max_new_tokens, sampling, self.team, self._eager())
        session = DecodeState(drawing, self._capture, model, prompt_ids)
        self._sessions.append(session)
        return session

    def _forget(self) -> None:
        for session in self._sessions:
            session.release()
        self._sessions.clear()
