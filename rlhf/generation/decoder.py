"""Generate with a static KV cache: one prefill, then one token per step, with all shapes known in advance.

Every few steps the decoder reads which rows have ended; if the decode state can drop rows, it removes them. A rollout
may be split into batches of one shape, one after the other in the same buffers (`rlhf.generation.decode_state`).

The host draws the random numbers of the rollouts of all ranks, and each rank takes those of its rows. So neither the
split into batches, nor the number of ranks, nor the device changes the samples, but for rounding: a backend may compute
small and large batches by other routines (in bf16 the CPU's do, from 512 positions on).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from accelerators import Accelerator, CaptureError
from rlhf.config.schema import SamplingConfig
from rlhf.engine import distributed
from rlhf.generation.decode_state import Capture, DecodeOptions, DecodeState
from rlhf.generation.rank_groups import PromptBatch, SingleRank

if TYPE_CHECKING:
    from accelerators import ShapePolicy

_STEPS_BETWEEN_STOP_CHECKS = 4
_LARGE = 20  # buffers of more than 1/20 of the device's memory are released before training

logger = logging.getLogger(__name__)


class Completions(NamedTuple):
    """Drawn tokens and their log-probabilities.

    ids: [B, A], padded right; mask: [B, A], 1 on the drawn tokens, the end-of-sequence token included; log_probs:
    [B, A] float32, of each drawn token by the distribution that `sample` describes, as generation computed it.
    """

    ids: Tensor
    mask: Tensor
    log_probs: Tensor | None = None


class DrawnToken(NamedTuple):
    """One token of a completion, on the host; log_prob as `Completions` has it; ended: it is an end token."""

    id: int
    log_prob: float
    ended: bool


class DecodingInterrupted(Exception):
    """`Decoder.is_interrupted` was set."""


class Decoder:
    """Samples completions. The buffers, the cache and the captured steps of each shape are reused by later calls.

    Attributes:
        random: the generator of random numbers, on the host; all ranks must seed it alike.
        forced: the ids to draw in the next calls, [B, A] on the host, instead of sampled ones; None: ids are sampled.
        steps: the decoding steps of the latest call, in all of its batches; each adds a token to every row.
        copies: completions for which the latest call read a prompt once.
        is_interrupted: another thread may set it; `generate` and `complete` then end with `DecodingInterrupted`, and
            `stream` does not.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        eos_ids: Sequence[int],
        pad_id: int,
        max_new_tokens: int,
        shapes: ShapePolicy | None = None,
        batch_size: int | None = None,
        rank_group: SingleRank | None = None,
        exact: bool = False,
    ) -> None:
        """Set the sizes of the buffers, and the ranks that generate together.

        Args:
            accelerator: device of the model.
            eos_ids: tokens that end a completion.
            pad_id: token of the padding.
            max_new_tokens: maximum length of a completion in tokens.
            shapes: rounds lengths; None: the accelerator's policy.
            batch_size: maximum number of this rank's rows that are generated at a time; None: all of a call.
            rank_group: None: this rank generates alone.
            exact: compute log-probabilities as training does; see `rlhf.trainers.ppo.exact`.
        """
        self.accelerator = accelerator
        self.eos_ids = torch.tensor(list(eos_ids), device=accelerator.device())
        self.pad_id = pad_id
        self.max_new_tokens = max_new_tokens
        self.shapes = shapes or accelerator.shape_policy()
        self.batch_size = batch_size
        self.rank_group = rank_group or SingleRank()
        self.exact = exact
        self.random = torch.Generator(accelerator.host_device())
        self.forced: Tensor | None = None
        self._capture: Capture | None = accelerator.capture if self.rank_group.can_capture else None
        self.steps, self.copies = 0, 1
        self.is_interrupted = False
        self._states: list[DecodeState] = []
        self._seen_shapes: set[torch.Size] = set()

    @torch.no_grad()
    def generate(
        self,
        model: nn.Module,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        sampling: SamplingConfig,
        copies: int = 1,
    ) -> Completions:
        """Complete each prompt until it ends or has `max_new_tokens` tokens; every rank calls it with as many rows.

        Args:
            model: causal language model of transformers with the rank group's weights, in evaluation mode.
            prompt_ids: [B, P], padded left.
            prompt_mask: [B, P].
            sampling: temperature, top-k and top-p.
            copies: so many rows after each other have one prompt, which is read once.

        Returns:
            A columns: `max_new_tokens` under a static shape policy, fewer under the others if all rows end early.
        """
        numbers = self.draw_numbers(len(prompt_ids))
        return self.complete(model, PromptBatch(prompt_ids, prompt_mask, numbers, copies), sampling)

    @torch.no_grad()
    def complete(self, model: nn.Module, prompts: PromptBatch, sampling: SamplingConfig) -> Completions:
        """Do what `generate` does, with random numbers that the caller gives: one for each of `max_new_tokens`."""
        try:
            return self._generate(model, prompts, sampling)
        except CaptureError as refusal:
            self._stop_capturing(refusal)
            return self._generate(model, prompts, sampling)

    @torch.no_grad()
    def stream(
        self, model: nn.Module, prompts: PromptBatch, sampling: SamplingConfig
    ) -> Generator[dict[int, DrawnToken], Collection[int] | None, None]:
        """Complete prompts as `generate` does, and yield the tokens of each step; this rank generates alone.

        Args:
            model: as for `generate`.
            prompts: with a random number for each of `max_new_tokens` tokens.
            sampling: temperature, top-k and top-p.

        Yields:
            The tokens of a step by row; rows that have ended are left out. The caller may send rows to end now.
        """
        sent: list[Collection[int]] = []  # so far, so that steps can be repeated without capture
        try:
            yield from self._stream(model, prompts, sampling, sent)
        except CaptureError as refusal:
            self._stop_capturing(refusal)
            yield from self._stream(model, prompts, sampling, sent)

    def _stream(
        self, model: nn.Module, prompts: PromptBatch, sampling: SamplingConfig, sent: list[Collection[int]]
    ) -> Generator[dict[int, DrawnToken], Collection[int] | None, None]:
        state = self._find_state(model, prompts.ids, sampling)
        running = set(range(len(prompts.ids)))
        try:
            with state.local_attention.replace_tables():
                state.start(prompts)
                for step in range(self.max_new_tokens):
                    if step:
                        state.step()
                        self.accelerator.step_boundary("serve/decode")
                    latest = state.latest()
                    drawn = {row: DrawnToken(*token) for row, token in latest.items() if row in running}
                    if step == len(sent):
                        sent.append((yield drawn) or ())
                    running.difference_update(sent[step], [row for row, token in drawn.items() if token.ended])
                    if not running:
                        return
                    positions = {row: position for position, row in enumerate(latest)}
                    state.finish([positions[row] for row in positions.keys() - running])
                    state.drop_rows(sorted(positions[row] for row in running))
        finally:
            state.cache.reset()

    def _stop_capturing(self, refusal: CaptureError) -> None:
        """Generate without captured steps from now on."""
        # A backend without capture loses nothing. The cause is for authors of backends, not for users.
        if self.accelerator.kernels.capabilities()["graph_capture"].ok:
            self.accelerator.report_fallback(
                "generation",
                "generation is slower than possible: its steps are not captured (--debug shows the reason)",
            )
        logger.debug("generation is not captured: %s", refusal)
        self._capture = None
        self.release()

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Sample with random numbers from `seed` in this block, and afterwards as if it had not been."""
        state = self.random.get_state()
        self.random.manual_seed(seed)
        try:
            yield
        finally:
            self.random.set_state(state)

    def skip(self, rows: int) -> None:
        """Advance the generator as `generate` does for this many prompts of each rank."""
        self.draw_numbers(rows)

    def draw_numbers(self, rows: int) -> Tensor:
        """Return numbers from [0, 1) for this rank's rows of a rollout, [A, B], or the ids that are `forced`."""
        rank, size = distributed.world().rank, distributed.world().size
        numbers = torch.rand(
            self.max_new_tokens, rows * size, generator=self.random, device=self.accelerator.host_device()
        )
        own = numbers[:, rank * rows : (rank + 1) * rows]
        if self.forced is not None:  # float32 is exact up to 2 ** 24, above every vocabulary
            own = pad(self.forced, (0, self.max_new_tokens - self.forced.shape[1]), value=self.pad_id).T.float()
        return self.accelerator.to_device(own.contiguous())

    def release(self) -> None:
        """Free the caches, buffers and captured steps; the next call makes new ones."""
        if self._states:
            self._release_states()
            self.accelerator.empty_cache()

    def release_if_large(self) -> None:
        """Release the buffers before training if they are large for the device's memory.

        Capturing a step again costs about two of the hundreds of steps of a rollout; small buffers are worth keeping.
        """
        # The other buffers are small in comparison to the cache.
        if sum(state.cache.nbytes() for state in self._states) > self.accelerator.memory().total / _LARGE:
            self.release()

    def _generate(self, model: nn.Module, prompts: PromptBatch, sampling: SamplingConfig) -> Completions:
        self.steps = 0
        parts = [self._generate_batch(model, batch, sampling) for batch in prompts.split(self.batch_size)]
        rows, length = len(prompts.ids), max(ids.shape[1] for ids, *_ in parts)
        joined = (
            torch.cat([pad(tensor, (0, length - tensor.shape[1]), value=padding) for tensor in tensors])[:rows]
            for tensors, padding in zip(zip(*parts), (self.pad_id, 0, 0), strict=True)
        )
        return Completions(*joined)

    def _generate_batch(
        self, model: nn.Module, own_prompts: PromptBatch, sampling: SamplingConfig
    ) -> tuple[Tensor, ...]:
        prompts = self.rank_group.gather_prompts(own_prompts)
        state = self._find_state(model, prompts.ids, sampling)
        takes_all_steps = self._takes_all_steps(state)
        try:
            with state.local_attention.replace_tables():
                state.start(prompts)
                while state.step_count < self.max_new_tokens:
                    if state.step_count % _STEPS_BETWEEN_STOP_CHECKS == 0:
                        if self.is_interrupted:
                            raise DecodingInterrupted
                        finished = state.finished[: state.rows]
                        active = self.rank_group.active_rows(
                            torch.zeros_like(finished) if takes_all_steps else finished
                        )
                        if not active:
                            break
                        state.drop_rows(active)
                    state.step()
                    self.accelerator.step_boundary("rollout/decode")
        finally:
            state.cache.reset()
        self.steps += state.step_count
        self.copies = state.copies
        length = self.shapes.length(state.step_count, self.max_new_tokens)
        return tuple(self.rank_group.select_own(tensor)[:, :length].clone() for tensor in state.drawn())

    def _takes_all_steps(self, state: DecodeState) -> bool:
        """Return True if a rollout takes all of its steps even if all rows have ended.

        The first rollout of a shape does if shapes are few: a device that captures or compiles its steps then meets
        all of them at once.
        """
        if state.options.eager or self.shapes.kind == "dynamic" or state.shape in self._seen_shapes:
            return False
        self._seen_shapes.add(state.shape)
        return True

    def _is_eager(self) -> bool:
        """Return True if new shapes cost nothing: no policy fixes them, and nothing is captured or compiled."""
        overrides_capture = getattr(self.accelerator.capture, "__func__", None) is not Accelerator.capture
        can_capture = overrides_capture or self.accelerator.kernels.capabilities()["graph_capture"].ok
        captures = self._capture is not None and can_capture
        return not (captures or self.accelerator.is_lazy() or self.shapes.kind == "static")

    def _find_state(self, model: nn.Module, prompt_ids: Tensor, sampling: SamplingConfig) -> DecodeState:
        for state in self._states:
            if state.fits(model, prompt_ids, sampling, self.forced is not None):
                return state
        if self.shapes.kind == "dynamic":  # a shape may never be repeated
            self._release_states()
        options = DecodeOptions(
            self.eos_ids,
            self.pad_id,
            self.max_new_tokens,
            sampling,
            self.rank_group,
            self._is_eager(),
            exact=self.exact,
            forced=self.forced is not None,
            draw=self.accelerator.kernels.get("sampling"),
        )
        state = DecodeState(options, self._capture, model, prompt_ids)
        self._states.append(state)
        return state

    def _release_states(self) -> None:
        for state in self._states:
            state.release()
        self._states.clear()
