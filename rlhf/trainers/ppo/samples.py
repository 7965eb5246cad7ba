"""Samples of a rollout, for a person to read while PPO trains: prompt, completion, score and KL.

The latest `Experience` flows in; lines above the progress bar and texts among the records flow out. Reading whole
tensors on the host adds no shapes to the device.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rlhf.reporting.console import console
from rlhf.trainers.context import StageContext
from rlhf.trainers.ppo.trainer import PPO
from rlhf.utils.units import format_number

_PROMPT, _COMPLETION = 400, 800  # characters that are shown
# Control characters, and those that turn the direction of text or end lines; joiners make one letter of several.
_HIDDEN, _HARMLESS = {"Cc", "Cf", "Cs", "Zl", "Zp"}, "\n\t\u200c\u200d"


class Sample(NamedTuple):
    """One sequence of a rollout: its texts, its score, and Σ log(policy / reference) over its `tokens`, in nats."""

    prompt: str
    completion: str
    score: float
    kl: float
    tokens: int

    @property
    def numbers(self) -> str:
        return f"score {format_number(self.score)}, KL {format_number(self.kl)}, {self.tokens:,} tokens"


def tell(context: StageContext, ppo: PPO, step: int) -> None:
    """Show `ppo.samples` sequences of the latest rollout, that of `step`, and record them; rank 0 does it."""
    if not context.world.is_main:
        return
    for number, sample in enumerate(samples(ppo, context.config.ppo.samples)):
        context.recorder.text(f"sample_{number}", step, f"{sample.prompt}\n{sample.completion}\n{sample.numbers}")
        console.print(shown(sample, f"ppo: step {step:,}"))
        console.print()


def samples(ppo: PPO, count: int) -> list[Sample]:
    """`count` sequences of this rank's latest rollout, as far apart as can be: neighbours may share a prompt."""
    experience = ppo.experience
    if experience is None:
        return []
    host = ppo.accelerator.host_device()
    ids, attention, mask = (
        tensor.to(host) for tensor in (experience.input_ids, experience.attention_mask, experience.action_mask)
    )
    kls = (experience.log_probs.to(host) - experience.ref_log_probs.to(host)).sum(-1).tolist()
    scores = experience.scores.to(host).tolist()
    start = ids.shape[1] - experience.completion_length
    found = []
    for row in sorted({place * len(ids) // count for place in range(count)}):
        drawn = ids[row, start:][mask[row].bool()]
        asked = ids[row, :start][attention[row, :start].bool()]
        prompt, completion = (ppo.tokenizer.decode(part, skip_special_tokens=True).strip() for part in (asked, drawn))
        found.append(Sample(prompt, completion, scores[row], kls[row], len(drawn)))
    return found


def shown(sample: Sample, title: str) -> RenderableType:
    """A sample as the terminal shows it, nothing in its texts interpreted."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    grid.add_row("prompt", Text(readable(sample.prompt, _PROMPT), style="italic"))
    grid.add_row("completion", Text(readable(sample.completion, _COMPLETION) or "(empty)", style="green"))
    grid.add_row(title, Text(sample.numbers))
    return grid


def readable(text: str, most: int) -> str:
    """`text` with what a terminal would obey escaped, in at most about `most` characters: its middle is left out."""
    text = re.sub(r"\n{3,}", "\n\n", text)
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
    return "".join(_escaped(character) for character in text)


def _escaped(character: str) -> str:
    if character in _HARMLESS or unicodedata.category(character) not in _HIDDEN:
        return character
    return ascii(character)[1:-1]
