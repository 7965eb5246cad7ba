"""Samples of a rollout for a person to read while PPO trains: prompt, completion, score and KL.

The latest `Experience` becomes lines above the progress bar and texts among the records. Whole tensors are read on
the host, which adds no shapes to the device.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rlhf.reporting.console import console
from rlhf.trainers.context import StageContext
from rlhf.trainers.ppo.experience import Experience
from rlhf.utils.units import format_number

_PROMPT, _COMPLETION = 400, 800  # characters that are shown
# Control characters, and those that turn the direction of text or end lines; joiners make one letter of several.
_HIDDEN, _HARMLESS = {"Cc", "Cf", "Cs", "Zl", "Zp"}, "\n\t\u200c\u200d"


class RolloutSample(NamedTuple):
    """One sequence of a rollout: its texts, its score, and the sum of log(policy / reference) over its `tokens`."""

    prompt: str
    completion: str
    score: float
    kl: float  # in nats
    tokens: int

    @property
    def numbers(self) -> str:
        """The score, the KL and the length as text."""
        return f"score {format_number(self.score)}, KL {format_number(self.kl)}, {self.tokens:,} tokens"


def show_samples(context: StageContext, tokenizer: Any, experience: Experience, step: int) -> None:
    """Print and record `ppo.samples` sequences of the rollout of `step`; only rank 0 does."""
    if not context.world.is_main:
        return
    host = context.accelerator.host_device()
    for number, sample in enumerate(select_samples(experience, tokenizer, context.config.ppo.samples, host)):
        context.recorder.text(f"sample_{number}", step, f"{sample.prompt}\n{sample.completion}\n{sample.numbers}")
        console.print(render_sample(sample, f"ppo: step {step:,}"))
        console.print()


def select_samples(experience: Experience, tokenizer: Any, count: int, host: Any) -> list[RolloutSample]:
    """Return `count` sequences of this rank, as far apart as possible: neighbours may share a prompt."""
    ids, attention, mask = (
        tensor.to(host) for tensor in (experience.input_ids, experience.attention_mask, experience.action_mask)
    )
    kls = (experience.log_probs.to(host) - experience.ref_log_probs.to(host)).sum(-1).tolist()
    scores = experience.reward.to(host).tolist()
    start = ids.shape[1] - experience.completion_length
    samples = []
    for row in sorted({place * len(ids) // count for place in range(count)}):
        completion = ids[row, start:][mask[row].bool()]
        prompt = ids[row, :start][attention[row, :start].bool()]
        prompt_text, text = (
            tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in (prompt, completion)
        )
        samples.append(RolloutSample(prompt_text, text, scores[row], kls[row], len(completion)))
    return samples


def render_sample(sample: RolloutSample, title: str) -> RenderableType:
    """Return a sample as the terminal shows it, with nothing in its texts interpreted."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    grid.add_row("prompt", Text(escape_text(sample.prompt, _PROMPT), style="italic"))
    grid.add_row("completion", Text(escape_text(sample.completion, _COMPLETION) or "(empty)", style="green"))
    grid.add_row(title, Text(sample.numbers))
    return grid


def escape_text(text: str, most: int) -> str:
    """Escape what a terminal would obey in `text`, and leave its middle out if it has more than `most` characters."""
    text = re.sub(r"\n{3,}", "\n\n", text)
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
    return "".join(_escape_character(character) for character in text)


def _escape_character(character: str) -> str:
    if character in _HARMLESS or unicodedata.category(character) not in _HIDDEN:
        return character
    return ascii(character)[1:-1]
