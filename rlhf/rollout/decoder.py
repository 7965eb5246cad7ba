"""Generation with a static KV cache: one prefill, then one token a step, every shape fixed beforehand.

The step reads and writes buffers in place, takes its randomness from a table drawn before the first step
and never waits for the device, so an accelerator can capture it once and replay it. Whether all rows have
ended is asked every few steps only. A rollout may be cut into parts of one shape, one after the other in the same
buffers; the table is that of the whole rollout, so the samples are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from accelerators import CaptureError
from rlhf.config import SamplingConfig
from rlhf.models.forward import accepts_positions, model_inputs, position_ids
from rlhf.rollout.local_attention import LocalAttention
from rlhf.rollout.sampling import sample
from rlhf.rollout.teams import Alone, Prompts

if TYPE_CHECKING:
    from transformers import StaticCache

    from accelerators import Accelerator, ShapePolicy

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
        team: Alone | None = None,
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
        self.team = team or Alone()
        self._capture: Callable[..., Callable[[], None]] = accelerator.capture if self.team.records else _as_it_is
        self._sessions: list[_Session] = []

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
            if self.accelerator.capabilities()["graph_capture"].ok:
                logger.warning(
                    "generation is slower than it could be: the code of this model cannot be recorded; other "
                    "architectures can (--debug says why)"
                )
            logger.debug("generation is not recorded: %s", refusal)
            self._capture = _as_it_is
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
        try:
            with session.local_attention.shown():
                session.start(prompts)
                done = 1
                while done < self.max_new_tokens:
                    if done % _STEPS_BETWEEN_STOP_CHECKS == 0 and self.team.ended(session.finished):
                        break
                    session.step()
                    self.accelerator.step_boundary("rollout/decode")
                    done += 1
        finally:
            session.cache.reset()
        length = self.shapes.length(done, self.max_new_tokens)
        drawn = (self.team.own(tensor[:, :length]).clone() for tensor in (session.ids, session.mask))
        return Completions(*drawn)

    def _session(self, model: nn.Module, prompt_ids: Tensor, sampling: SamplingConfig) -> _Session:
        for session in self._sessions:
            if session.fits(model, prompt_ids, sampling):
                return session
        if self.shapes.kind == "dynamic":  # this shape may never come again
            self._forget()
        session = _Session(self, self._capture, model, prompt_ids, sampling)
        self._sessions.append(session)
        return session

    def _forget(self) -> None:
        for session in self._sessions:
            session.step = _stop  # a recording refers to its session: cut the circle, so that both are freed now
        self._sessions.clear()


def static_cache(model: Any, length: int) -> StaticCache:
    """transformers' static cache for rows of `length` tokens, made of layers that a recording can repeat.

    Layers with a sliding window hold the whole row too, and the attention mask alone keeps the window: transformers'
    own (5.x: StaticSlidingWindowLayer) counts tokens in a Python integer, and a replay would repeat the mask and the
    place of the recorded step. Rollouts are rarely longer than the window, so it costs little.
    """
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

    cache = StaticCache(config=model.config, max_cache_len=length)
    cache.layers = [
        StaticLayer(max_cache_len=length) if type(layer) is StaticSlidingWindowLayer else layer
        for layer in cache.layers
    ]
    return cache


def _as_it_is(fn: Callable[[], None], key: str) -> Callable[[], None]:
    return fn


def _stop() -> None:
    raise RuntimeError("this session was released")


class _Session:
    """The buffers of one model, shape and way of sampling: everything a decoding step touches."""

    def __init__(
        self,
        decoder: Decoder,
        capture: Callable[..., Callable[[], None]],
        model: nn.Module,
        prompt_ids: Tensor,
        sampling: SamplingConfig,
    ) -> None:
        rows, prompt_length = prompt_ids.shape
        device = prompt_ids.device
        self.decoder = decoder
        self.model = model
        self.sampling = sampling
        self.shape = prompt_ids.shape
        length = decoder.max_new_tokens
        self.cache = static_cache(model, prompt_length + length)
        self.local_attention = LocalAttention(model, prompt_length + length)
        self.with_positions = accepts_positions(model)
        self.attention_mask = torch.ones(rows, prompt_length + length, dtype=torch.long, device=device)
        self.ids = torch.empty(rows, length, dtype=torch.long, device=device)
        self.mask = torch.empty(rows, length, dtype=torch.long, device=device)
        self.token = torch.empty(rows, 1, dtype=torch.long, device=device)
        self.position = torch.empty(rows, 1, dtype=torch.long, device=device)
        self.column = torch.empty(1, dtype=torch.long, device=device)
        self.finished = torch.empty(rows, dtype=torch.bool, device=device)
        self.uniform = torch.empty(length, rows, device=device)
        key = f"decode {rows} x {prompt_length} + {length}"
        counting = sorted({type(layer).__name__ for layer in self.cache.layers if getattr(layer, "is_sliding", False)})
        if counting and capture is not _as_it_is:
            raise CaptureError(
                f"{key} cannot be repeated: {', '.join(counting)} of transformers counts tokens in Python"
            )
        self.step = capture(self._step, key=key)

    def fits(self, model: nn.Module, prompt_ids: Tensor, sampling: SamplingConfig) -> bool:
        return self.model is model and self.shape == prompt_ids.shape and self.sampling == sampling

    def size(self) -> int:
        """Bytes of the cache, beside which the other buffers are small."""
        held = [value for layer in self.cache.layers for value in vars(layer).values()]
        for states in [value for value in held if isinstance(value, dict)]:  # of layers with linear attention
            held += states.values()
        return sum(value.nbytes for value in held if isinstance(value, Tensor))

    def start(self, prompts: Prompts) -> None:
        """Reset the buffers, read the prompts and draw the first token."""
        prompt_length = prompts.ids.shape[1]
        # Columns after the prompt stay 1: causality hides those not yet written.
        self.attention_mask[:, :prompt_length] = prompts.mask
        self.ids.fill_(self.decoder.pad_id)
        self.mask.zero_()
        self.column.zero_()
        self.finished.zero_()
        self.uniform.copy_(prompts.uniform)
        self.position.copy_(position_ids(prompts.mask)[:, -1:])
        self.local_attention.prompt(prompt_length)
        inputs = model_inputs(self.model, prompts.ids, self.attention_mask, self.cache)
        # The position rather than a count: see `completion_log_probs`.
        last = torch.full((1,), prompt_length - 1, device=prompts.ids.device)
        self._draw(self.model(**inputs, logits_to_keep=last).logits[:, -1])

    def _step(self) -> None:
        """One token for each row."""
        self.position.add_(1)
        self.local_attention.token(self.column + (self.shape[1] - 1))
        output = self.model(
            input_ids=self.token,
            attention_mask=self.attention_mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
            **({"position_ids": self.position} if self.with_positions else {}),
        )
        self._draw(output.logits[:, -1])

    def _draw(self, logits: Tensor) -> None:
        drawn = sample(logits, self.uniform.index_select(0, self.column).squeeze(0), self.sampling)
        drawn = self.decoder.team.same(torch.where(self.finished, self.decoder.pad_id, drawn))
        self.ids.index_copy_(1, self.column, drawn.unsqueeze(1))
        self.mask.index_copy_(1, self.column, (~self.finished).long().unsqueeze(1))
        self.finished.logical_or_(torch.isin(drawn, self.decoder.eos_ids))
        self.token.copy_(drawn.unsqueeze(1))
        self.column.add_(1)
