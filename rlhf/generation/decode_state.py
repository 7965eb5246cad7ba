"""The buffers of one model, shape and way of sampling, and the step that draws one token for each row in them.

The step reads and writes the buffers in place, takes its randomness from a table drawn before the first one and never
waits for the device, so an accelerator can capture it once and replay it. It works on the part of the buffers that is
in use (`rlhf.generation.kv_cache`): columns come in windows, each of which is captured by itself; rows that have
ended leave,
where the device runs operators as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelerators import CaptureError
from rlhf.config.schema import SamplingConfig
from rlhf.generation.kv_cache import WindowedStaticCache
from rlhf.generation.rank_groups import Prompts, SingleRank
from rlhf.generation.sampling import sample
from rlhf.models.forward import accepts_positions, model_inputs, position_ids
from rlhf.models.transformers_patches import GPTNeoLocalAttention

Capture = Callable[[Callable[[], None], str], Callable[[], None]]

WINDOW = 32
"""Columns by which the part of the cache that is attended to grows, at least: half of them are empty on average."""

ALIGNED = 8
"""Columns in sight are a multiple of this: products of odd lengths are slower on most devices."""

_RECORDED_WINDOWS = 4
"""At most, where each is a recording of its own: the columns attended to are an eighth too many on average."""

_ROW_COUNTS = 16
"""Numbers of rows, at most, that a step is taken with: libraries prepare their products for each one anew."""


@dataclass(frozen=True)
class DecodeOptions:
    """How tokens are drawn, and how the device wants its steps.

    Args:
        length: tokens of a completion, at most.
        eager: operators run as they come: another shape costs nothing.
    """

    eos_ids: Tensor
    pad_id: int
    length: int
    sampling: SamplingConfig
    team: SingleRank
    eager: bool


class DecodeState:
    """Everything a decoding step touches."""

    def __init__(self, drawing: DecodeOptions, capture: Capture | None, model: nn.Module, prompt_ids: Tensor) -> None:
        """Buffers for prompts of this shape.

        Args:
            capture: `Accelerator.capture`; None: steps run as they are.

        Raises:
            CaptureError: a step cannot be repeated.
        """
        rows, prompt_length = prompt_ids.shape
        device = prompt_ids.device
        length = drawing.length
        most = None if drawing.eager else _RECORDED_WINDOWS
        widths = plan_windows(prompt_length, max(length - 1, 1), most)  # the last token drawn is not read
        columns = widths[-1]
        self.drawing = drawing
        self.model: Any = model
        self.shape = prompt_ids.shape
        self.cache = WindowedStaticCache(model.config, columns, grows=drawing.eager)
        self.local_attention = GPTNeoLocalAttention(model, columns)
        self.with_positions = accepts_positions(model)
        self.compacts = drawing.eager and self.cache.drops_rows
        # Of the prompt and what follows; columns not yet written are 1: causality hides them.
        self.attention_mask = torch.ones(rows, columns, dtype=torch.long, device=device)
        # By row. While rows leave, the first `rows` are those that go on, and `order` says which prompts they are of.
        self.rows = rows
        self.order = torch.arange(rows, device=device)
        self.ids = torch.empty(rows, length, dtype=torch.long, device=device)
        self.mask = torch.empty(rows, length, dtype=torch.long, device=device)
        self.token = torch.empty(rows, 1, dtype=torch.long, device=device)
        self.position = torch.empty(rows, 1, dtype=torch.long, device=device)
        self.finished = torch.empty(rows, dtype=torch.bool, device=device)
        self.uniform = torch.empty(rows, length, device=device)
        # The place of the next token among those drawn, and that of the latest one in the cache.
        self.column = torch.empty(1, dtype=torch.long, device=device)
        self.place = torch.empty(1, dtype=torch.long, device=device)
        self.done = 0
        if not self.cache.narrows:
            widths = widths[-1:]
        self.width_of_prompt = prompt_length if self.cache.narrows else columns
        if capture is not None and (counting := ", ".join(self.cache.counting())):
            raise CaptureError(
                f"{self._key(columns)} cannot be repeated: {counting} of transformers counts tokens in Python"
            )
        self._steps = {width: self._captured(capture, width) for width in widths}

    def fits(self, model: nn.Module, prompt_ids: Tensor, sampling: SamplingConfig) -> bool:
        return self.model is model and self.shape == prompt_ids.shape and self.drawing.sampling == sampling

    def size(self) -> int:
        """Bytes of the cache, beside which the other buffers are small."""
        return self.cache.nbytes()

    def release(self) -> None:
        """Forget the steps: a recording refers to its session, so neither would be freed while the other lives."""
        self._steps.clear()

    def start(self, prompts: Prompts) -> None:
        """Reset the buffers, read the prompts and draw the first token."""
        rows, prompt_length = prompts.ids.shape
        self.rows, self.done = rows, 0
        self.order.copy_(torch.arange(rows, device=self.order.device))
        self.attention_mask[:, :prompt_length] = prompts.mask
        self.ids.fill_(self.drawing.pad_id)
        self.mask.zero_()
        self.column.zero_()
        self.place.fill_(prompt_length - 1)
        self.finished.zero_()
        self.uniform.copy_(prompts.uniform.T)
        self.position.copy_(position_ids(prompts.mask)[:, -1:])
        width = self.width_of_prompt
        self.cache.show(rows, width, torch.arange(prompt_length, device=prompts.ids.device), 0)
        self.local_attention.set_prompt(prompt_length, width)
        inputs = model_inputs(self.model, prompts.ids, self.attention_mask[:, :width], self.cache)
        # The position rather than a count: see `completion_log_probs`.
        last = torch.full((1,), prompt_length - 1, device=prompts.ids.device)
        self._draw(self.model(**inputs, logits_to_keep=last).logits[:, -1])
        self.done = 1

    def step(self) -> None:
        """One token more for each row that goes on."""
        seen = self.shape[1] + self.done
        self._steps[next(width for width in self._steps if width >= seen)]()
        self.done += 1

    def keep(self, alive: Sequence[int]) -> None:
        """Go on without the rows that are not `alive`, where rows can leave; those have ended.

        The last rows move into the places of those that leave: each row of the cache moves once at most.
        """
        granule = -(-len(self.order) // _ROW_COUNTS)
        rows = -(-len(alive) // granule) * granule
        if not self.compacts or rows >= self.rows:
            return
        sources = [row for row in alive if row >= rows]
        targets = sorted(set(range(rows)).difference(alive))[: len(sources)]
        if sources:
            of, to = (torch.tensor(each, device=self.order.device) for each in (sources, targets))
            self.cache.move(of, to)
            for buffer in self._of_rows():
                ended = buffer.index_select(0, to)  # they change places with the others
                buffer.index_copy_(0, to, buffer.index_select(0, of)).index_copy_(0, of, ended)
        self.rows = rows

    def drawn(self) -> tuple[Tensor, Tensor]:
        """Tokens and their mask, [B, A], in the order of the prompts."""
        back = self.order.argsort()
        return self.ids.index_select(0, back), self.mask.index_select(0, back)

    def _of_rows(self) -> tuple[Tensor, ...]:
        prompts = self.order, self.attention_mask, self.uniform
        return *prompts, self.ids, self.mask, self.token, self.position, self.finished

    def _captured(self, capture: Capture | None, width: int) -> Callable[[], None]:
        def step() -> None:
            self._step(width)

        return capture(step, self._key(width)) if capture else step

    def _key(self, width: int) -> str:
        rows, prompt_length = self.shape
        return f"decode {rows} x {prompt_length} up to {width}"

    def _step(self, width: int) -> None:
        """One token for each row, with `width` columns of the cache in sight."""
        rows = self.rows
        self.position.add_(1)
        self.place.add_(1)
        self.cache.show(rows, width, self.place, self.place[0])
        self.local_attention.set_token(self.place, width)
        output = self.model(
            input_ids=self.token[:rows],
            attention_mask=self.attention_mask[:rows, :width],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
            **({"position_ids": self.position[:rows]} if self.with_positions else {}),
        )
        self._draw(output.logits[:, -1])

    def _draw(self, logits: Tensor) -> None:
        rows, drawing = self.rows, self.drawing
        finished = self.finished[:rows]
        uniform = self.uniform[:rows].index_select(1, self.column).squeeze(1)
        drawn = torch.where(finished, drawing.pad_id, sample(logits, uniform, drawing.sampling))
        drawn = drawing.team.same(drawn).unsqueeze(1)
        self.ids[:rows].index_copy_(1, self.column, drawn)
        self.mask[:rows].index_copy_(1, self.column, (~finished).long().unsqueeze(1))
        finished.logical_or_(torch.isin(drawn.squeeze(1), drawing.eos_ids))
        self.token[:rows].copy_(drawn)
        self.column.add_(1)


def plan_windows(prompt_length: int, steps: int, most: int | None = None) -> list[int]:
    """Numbers of columns, rising, that are attended to in turn while `steps` tokens follow the prompt.

    They are about equally far apart, so that none lasts for a step or two only.

    Args:
        most: how many there may be.
    """
    count = -(-steps // WINDOW)
    count = min(count, most) if most else count
    return [-(-(prompt_length + steps * (index + 1) // count) // ALIGNED) * ALIGNED for index in range(count)]
