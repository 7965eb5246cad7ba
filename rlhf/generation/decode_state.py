"""The tensors of a generation for one model, shape and sampling, and the step that samples one token for each row.

The step reads and writes the tensors in place, takes its random numbers from a table that was filled before the first
step, and never waits for the device, so an accelerator can capture it once and replay it. Top-p reads on the host, but
only if nothing is captured. The step works on the part of the buffers that is in use
(`rlhf.generation.kv_cache`): the number of columns grows in windows, each of which is captured separately; rows that
have ended are dropped if the device runs operators eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from accelerators import CaptureError
from rlhf.config.schema import SamplingConfig
from rlhf.generation.kv_cache import WindowedStaticCache
from rlhf.generation.rank_groups import PromptBatch, SingleRank
from rlhf.losses.log_probs import token_log_probs
from rlhf.models.forward import accepts_positions, model_inputs, position_ids
from rlhf.models.transformers_patches import GPTNeoLocalAttention, cache_argument

Capture = Callable[[Callable[[], None], str], Callable[[], None]]

WINDOW = 32
"""Minimum number of columns by which the visible part of the cache grows: half of them are empty on average."""

ALIGNED = 8
"""The number of visible columns is a multiple of this: products of odd lengths are slower on most devices."""

_MAX_CAPTURED_WINDOWS = 4
"""Maximum number of windows if each is captured: attention then covers an eighth too many columns on average."""

_MAX_ROW_COUNTS = 16
"""Maximum number of different row counts of a step: libraries prepare their products again for each of them."""

_CHUNK = 256
"""Tokens of a vocabulary that are summed first: about the square root of its size, so that both sums are short."""


_FEWEST_LARGEST, _LARGEST_GROW = 256, 16
"""Tokens that are sorted first to find the smallest set that reaches top-p, and the factor to the next try."""


Draw = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class DecodeOptions:
    """The settings of sampling, and of the device's steps.

    Attributes:
        length: maximum length of a completion in tokens.
        eager: operators run eagerly, so a new shape costs nothing.
        exact: log-probabilities are computed as training computes them.
        forced: the table of random numbers has the ids to draw instead (`Decoder.forced`).
        draw: the device's operation `sampling`, if it has one.
    """

    eos_ids: Tensor
    pad_id: int
    length: int
    sampling: SamplingConfig
    rank_group: SingleRank
    eager: bool
    exact: bool = False
    forced: bool = False
    draw: Draw | None = None


class DecodeState:
    """All tensors that a decoding step reads or writes."""

    def __init__(self, options: DecodeOptions, capture: Capture | None, model: nn.Module, prompt_ids: Tensor) -> None:
        """Create buffers for prompts of this shape.

        Args:
            options: settings of sampling and of the device's steps.
            capture: `Accelerator.capture`; None: steps run without capture.
            model: causal language model of transformers.
            prompt_ids: [B, P].

        Raises:
            CaptureError: a step cannot be replayed.
        """
        rows, prompt_length = prompt_ids.shape
        device = prompt_ids.device
        length = options.length
        max_windows = None if options.eager else _MAX_CAPTURED_WINDOWS
        widths = plan_windows(prompt_length, max(length - 1, 1), max_windows)  # the last drawn token is not read
        columns = widths[-1]
        self.options = options
        self.model: Any = model
        self.shape = prompt_ids.shape
        self.cache = WindowedStaticCache(model.config, rows, columns, grows=options.eager)
        self.local_attention = GPTNeoLocalAttention(model, columns)
        self.with_positions = accepts_positions(model)
        self.cache_argument = cache_argument(model)
        self.drops_rows = options.eager and self.cache.can_drop_rows
        # For the prompt and the completion; columns not yet written are 1: causality hides them.
        self.attention_mask = torch.ones(rows, columns, dtype=torch.long, device=device)
        # By row. After rows are dropped, the first `rows` are active, and `order` has the prompts' indices.
        self.rows = rows
        self.order = torch.arange(rows, device=device)
        self.ids = torch.empty(rows, length, dtype=torch.long, device=device)
        self.mask = torch.empty(rows, length, dtype=torch.long, device=device)
        self.log_probs = torch.empty(rows, length, device=device)
        self.token = torch.empty(rows, 1, dtype=torch.long, device=device)
        self.position = torch.empty(rows, 1, dtype=torch.long, device=device)
        self.finished = torch.empty(rows, dtype=torch.bool, device=device)
        self.uniform = torch.empty(rows, length, device=device)
        # Column of the next token in `ids`, and column of the latest token in the cache.
        self.draw_column = torch.empty(1, dtype=torch.long, device=device)
        self.cache_column = torch.empty(1, dtype=torch.long, device=device)
        self.step_count, self.copies = 0, 1
        if not self.cache.can_narrow:
            widths = widths[-1:]
        self.prompt_width = prompt_length if self.cache.can_narrow else columns
        if capture is not None and (layers := ", ".join(self.cache.uncapturable_layers())):
            raise CaptureError(
                f"{self._key(columns)} cannot be replayed: {layers} of transformers counts tokens in Python"
            )
        if options.eager and options.sampling.top_p < 1:  # which reads on the host
            capture = None
        self._steps = {width: self._captured_step(capture, width) for width in widths}

    def fits(self, model: nn.Module, prompt_ids: Tensor, sampling: SamplingConfig, forced: bool) -> bool:
        """Return True if the state serves this model, shape and sampling."""
        options = self.options
        same_sampling = options.sampling == sampling and options.forced == forced
        return self.model is model and self.shape == prompt_ids.shape and same_sampling

    def release(self) -> None:
        """Delete the steps: a captured step refers to its state, so neither would be freed while the other exists."""
        self._steps.clear()

    def start(self, prompts: PromptBatch) -> None:
        """Reset the buffers, read the prompts, each once, and draw the first token."""
        rows, prompt_length = prompts.ids.shape
        self.copies = copies = prompts.copies if self.cache.can_drop_rows else 1
        self.rows, self.step_count = rows, 0
        self.order.copy_(torch.arange(rows, device=self.order.device))
        self.attention_mask[:, :prompt_length] = prompts.mask
        self.ids.fill_(self.options.pad_id)
        self.mask.zero_()
        self.log_probs.zero_()
        self.draw_column.zero_()
        self.cache_column.fill_(prompt_length - 1)
        self.finished.zero_()
        self.uniform.copy_(prompts.uniform.T)
        self.position.copy_(position_ids(prompts.mask)[:, -1:])
        width = self.prompt_width
        self.cache.show(rows // copies, width, torch.arange(prompt_length, device=prompts.ids.device), 0)
        self.local_attention.set_prompt(prompt_length, width)
        inputs = model_inputs(self.model, prompts.ids[::copies], self.attention_mask[::copies, :width], self.cache)
        # An index instead of a count: see `completion_log_probs`.
        last = torch.full((1,), prompt_length - 1, device=prompts.ids.device)
        logits = self.model(**inputs, logits_to_keep=last).logits[:, -1]
        if copies > 1:
            self.cache.repeat(copies, prompt_length)
            logits = logits.repeat_interleave(copies, 0)
        self._draw(logits)
        self.step_count = 1

    def step(self) -> None:
        """Draw one more token for each active row."""
        columns = self.shape[1] + self.step_count
        self._steps[next(width for width in self._steps if width >= columns)]()
        self.step_count += 1

    def drop_rows(self, active: Sequence[int]) -> None:
        """Drop the rows that are not `active`, if rows can be dropped; those have ended.

        The last rows move into the places of dropped ones: each row of the cache moves at most once.
        """
        granule = -(-len(self.order) // _MAX_ROW_COUNTS)
        rows = -(-len(active) // granule) * granule
        if not self.drops_rows or rows >= self.rows:
            return
        sources = [row for row in active if row >= rows]
        targets = sorted(set(range(rows)).difference(active))[: len(sources)]
        if sources:
            source_rows, target_rows = (
                torch.tensor(indices, device=self.order.device) for indices in (sources, targets)
            )
            self.cache.move(source_rows, target_rows)
            for buffer in self._row_buffers():
                ended = buffer.index_select(0, target_rows)  # they swap places with the active ones
                buffer.index_copy_(0, target_rows, buffer.index_select(0, source_rows))
                buffer.index_copy_(0, source_rows, ended)
        self.rows = rows

    def drawn(self) -> tuple[Tensor, ...]:
        """Return tokens, their mask and their log-probabilities, [B, A] each, in the order of the prompts."""
        inverse = self.order.argsort()
        return tuple(buffer.index_select(0, inverse) for buffer in (self.ids, self.mask, self.log_probs))

    def latest(self) -> dict[int, tuple[int, float, bool]]:
        """Read the latest token of each active row from the device, in the order of the buffers.

        Returns:
            By the prompt's index: the token, its log-probability, and True if the row ends with it or has ended before.
        """
        column = self.step_count - 1
        columns = self.ids[:, column], self.log_probs[:, column], self.finished
        tokens = zip(*(values[: self.rows].tolist() for values in columns))
        return dict(zip(self.order[: self.rows].tolist(), tokens))

    def finish(self, rows: Sequence[int]) -> None:
        """Draw no more tokens for these rows, numbered as the active ones are."""
        if rows:
            self.finished.index_fill_(0, torch.tensor(rows, device=self.finished.device), True)

    def _row_buffers(self) -> tuple[Tensor, ...]:
        prompts = self.order, self.attention_mask, self.uniform
        return *prompts, self.ids, self.mask, self.log_probs, self.token, self.position, self.finished

    def _captured_step(self, capture: Capture | None, width: int) -> Callable[[], None]:
        def step() -> None:
            self._step(width)

        run = capture(step, self._key(width)) if capture else step

        def shown() -> None:
            # Outside of what is captured: torch.compile makes a second graph of a function that changes Python values.
            self.cache.show(self.rows, width, self.cache_column, self.cache_column[0])
            run()

        return shown

    def _key(self, width: int) -> str:
        rows, prompt_length = self.shape
        return f"decode {rows} x {prompt_length} up to {width}"

    def _step(self, width: int) -> None:
        """Draw one token for each row, with the visible `width` columns of the cache."""
        rows = self.rows
        self.position.add_(1)
        self.cache_column.add_(1)
        self.local_attention.set_token(self.cache_column, width)
        output = self.model(
            input_ids=self.token[:rows],
            attention_mask=self.attention_mask[:rows, :width],
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_argument: self.cache},
            **({"position_ids": self.position[:rows]} if self.with_positions else {}),
        )
        self._draw(output.logits[:, -1])

    def _draw(self, logits: Tensor) -> None:
        rows, options = self.rows, self.options
        finished = self.finished[:rows]
        # Not `index_select`, which an accelerator may record wrongly.
        uniform = self.uniform[:rows].gather(1, self.draw_column.expand(rows, 1)).squeeze(1)
        choose = score_forced if options.forced else partial(sample, eager=options.eager, draw=options.draw)
        drawn, log_probs = choose(logits, uniform, options.sampling)
        if options.exact:
            log_probs = token_log_probs(logits, drawn, options.sampling.temperature)
        drawn, log_probs = map(options.rank_group.synchronize, (drawn, log_probs))
        drawn = torch.where(finished, options.pad_id, drawn).unsqueeze(1)
        self.log_probs[:rows].index_copy_(1, self.draw_column, log_probs.unsqueeze(1))
        self.ids[:rows].index_copy_(1, self.draw_column, drawn)
        self.mask[:rows].index_copy_(1, self.draw_column, (~finished).long().unsqueeze(1))
        finished.logical_or_(torch.isin(drawn.squeeze(1), options.eos_ids))
        self.token[:rows].copy_(drawn)
        self.draw_column.add_(1)


def plan_windows(prompt_length: int, steps: int, max_windows: int | None = None) -> list[int]:
    """Return rising numbers of visible columns, used in turn while `steps` tokens follow the prompt.

    The numbers are about equally far apart, so that no window lasts only one or two steps.

    Args:
        prompt_length: columns of the prompts.
        steps: number of tokens after the prompt.
        max_windows: maximum number of windows; None: any number.
    """
    count = -(-steps // WINDOW)
    count = min(count, max_windows) if max_windows else count
    return [-(-(prompt_length + steps * (index + 1) // count) // ALIGNED) * ALIGNED for index in range(count)]


def sample(
    logits: Tensor, uniform: Tensor, config: SamplingConfig, eager: bool = False, draw: Draw | None = None
) -> tuple[Tensor, Tensor]:
    """Sample one token per row: logits [B, V], uniform [B] in [0, 1) -> token ids [B].

    The second result is each token's log-probability [B] at this temperature, among all tokens: as training scores it,
    before top-k and top-p. At temperature 0 it is 0, or NaN if a logit is.

    One uniform number per token determines it (inverse of the cumulative distribution), so all randomness of a rollout
    is drawn before its first step and a captured step contains no generator. Only if it is `eager`, the host reads how
    many tokens top-p needs; otherwise it sorts all. `draw` is the device's operation `sampling`, if it has one.
    """
    if draw and config.temperature > 0 and config.top_k == 0 and config.top_p == 1:
        return draw(logits, uniform, config.temperature)
    logits = logits.float()
    if config.temperature == 0:
        best = logits.amax(-1)
        return logits.argmax(-1), best - best
    if config.temperature != 1:
        logits = logits / config.temperature
    uniform = uniform.unsqueeze(-1)
    if config.top_k == 0 and config.top_p == 1:
        probabilities = logits.softmax(-1)
        token = _invert_in_chunks(probabilities, uniform)
        return token.squeeze(-1), probabilities.gather(-1, token).log().squeeze(-1)
    normalizer = logits.logsumexp(-1)
    if config.top_k:
        logits, order = logits.topk(min(config.top_k, logits.shape[-1]), dim=-1)  # sorted
        probabilities = logits.softmax(-1)
    else:
        logits, order, probabilities = _take_largest(logits, normalizer, config.top_p if eager else 1.0)
    before = probabilities.cumsum(-1) - probabilities
    # The smallest set that reaches top_p: tokens whose predecessors do not reach it. The first is always in the set.
    probabilities = torch.where(before < config.top_p, probabilities, 0.0)
    drawn, _ = _invert(probabilities, uniform * probabilities.sum(-1, keepdim=True))
    # As int32: not every accelerator can gather int64. Ids that a faulty top-k returns are not clamped, which would
    # hide the fault: `rlhf accelerators certify` looks for it.
    tokens = order.int().gather(-1, drawn).squeeze(-1).long()
    return tokens, logits.gather(-1, drawn).squeeze(-1) - normalizer


def _take_largest(logits: Tensor, normalizer: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest logits of each row, sorted, their tokens, and their probabilities, [B, N] each.

    N is large enough for a sum of probabilities of `share` in every row, or the size of the vocabulary. Sorting a
    whole vocabulary takes 20 times as long as finding its largest few hundred.
    """
    count = logits.shape[-1] if share == 1 else _FEWEST_LARGEST
    while True:
        values, order = logits.topk(min(count, logits.shape[-1]), dim=-1)
        probabilities = (values - normalizer.unsqueeze(-1)).exp()
        if count >= logits.shape[-1] or bool((probabilities.cumsum(-1)[:, -1] >= share).all()):
            return values, order, probabilities
        count *= _LARGEST_GROW


def score_forced(logits: Tensor, ids: Tensor, config: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Return the result of `sample` if it draws `ids`, [B] float32."""
    token = ids.long()
    if config.temperature == 0:
        return token, torch.zeros_like(ids)
    log_probs = (logits.float() / config.temperature).log_softmax(-1)
    return token, log_probs.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def _invert_in_chunks(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return the result of `_invert`, [B, 1], for [B, V] that sum to 1: first the chunk, then the token in it.

    A single sum over the vocabulary takes twice as long as the softmax, and rounds at every token.
    """
    last = probabilities.shape[-1] - 1
    if missing := -probabilities.shape[-1] % _CHUNK:
        probabilities = pad(probabilities, (0, missing))
    chunks = probabilities.unflatten(-1, (-1, _CHUNK))
    chunk, rest = _invert(chunks.sum(-1), uniform)
    inside = chunks.gather(1, chunk.unsqueeze(-1).expand(-1, 1, _CHUNK)).squeeze(1)
    token, _ = _invert(inside, rest)
    return (chunk * _CHUNK + token).clamp_max(last)


def _invert(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index at which the running sum of `weights` exceeds `target`, and the target's excess over it.

    The index never has weight 0, however the sums are rounded; if weights are NaN it is any index.

    Args:
        weights: [B, N], not negative.
        target: [B, 1], from 0 to about their sum.

    Returns:
        Index [B, 1], and target minus the sum of the weights before the index, [B, 1].
    """
    sums = weights.cumsum(-1)
    total = sums[:, -1:]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(sums, target, right=True).clamp_max(weights.shape[-1] - 1)
    before = sums.gather(-1, index) - weights.gather(-1, index)
    return index, (target - before).clamp_min(0)
