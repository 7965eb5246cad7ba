"""The metrics of a PPO step: reward, KL to the reference, lengths, arithmetic of its phases, and samples.

Samples are lines above the progress bar and texts among the records. Tensors are read on the host as a whole, which
adds no shapes on the device.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from rlhf.data.batches import Batch
from rlhf.engine import distributed
from rlhf.engine.engine import Metrics
from rlhf.losses.log_probs import masked
from rlhf.losses.ppo import kl_estimate
from rlhf.models.shape import TextLengths, generation_lengths
from rlhf.reporting.console import console
from rlhf.reporting.timers import Phase
from rlhf.trainers.context import StageContext
from rlhf.trainers.ppo.experience import Experience, Rollout, Scores
from rlhf.trainers.ppo.rewards import is_reward_part
from rlhf.utils.units import format_number


def mean_score(rollout: Rollout, scores: Scores) -> Tensor:
    """Return the mean score of a rollout's real rows, over all ranks."""
    rows = rollout.row_mask.float()
    total, count = distributed.all_sum(torch.stack([(scores.reward * rows).sum(), rows.sum()]))
    mean: Tensor = total / count.clamp_min(1)
    return mean


def rollout_sums(rollout: Rollout, scores: Scores, center: Tensor) -> Batch:
    """Return sums over real rows and tokens of a rollout, for `rollout_means` to divide.

    Args:
        rollout, scores: the rollout and its scores.
        center: a number near the mean score, the same for all sums that are added up. It is subtracted first: if scores
            lie close together, sums of their squares have no digits left.
    """
    rows, mask = rollout.row_mask.float(), rollout.action_mask
    offsets = (scores.reward - center) * rows
    log_ratio = masked(scores.log_probs - scores.ref_log_probs, mask)
    return {
        "rows": rows.sum(),
        "tokens": mask.sum(),
        "reward": (scores.reward * rows).sum(),
        "reward_offsets": offsets.sum(),
        "reward_squares": (offsets**2).sum(),
        "kl": log_ratio.sum(),
        "entropy": masked(scores.entropy, mask).sum(),
        "ended": (rollout.ended * rows).sum(),
        **length_sums(rollout, rows),
        **{name: (part * rows).sum() for name, part in scores.reward_parts.items()},
    }


def score_columns(rollout: Rollout, scores: Scores) -> dict[str, Tensor]:
    """Return the score and the KL of each row, [B] each."""
    return {
        "reward": scores.reward,
        "kl": masked(scores.log_probs - scores.ref_log_probs, rollout.action_mask).sum(1),
    }


def row_numbers(rollout: Rollout, columns: dict[str, Tensor], judged: Tensor | None = None) -> list[Metrics]:
    """Return `columns`, the number of tokens and whether it ended (1 or 0) of each row, filler rows included.

    If there is a judge, its scores are `judged`, [B]. The numbers are rounded to six digits, which is what their
    records need.
    """
    columns = columns | {"tokens": rollout.action_mask.sum(1), "ended": rollout.ended}
    columns |= {} if judged is None else {"judge": judged}
    rows = torch.stack(list(columns.values()), 1).tolist()
    return [{name: float(f"{number:.6g}") for name, number in zip(columns, row)} for row in rows]


def length_sums(rollout: Rollout, rows: Tensor) -> Batch:
    """Return sums over real rows of the lengths of prompts and of whole texts, and of their squares."""
    whole = rollout.attention_mask.sum(1) * rows
    prompts = whole - rollout.action_mask.sum(1)
    return {
        "prompt_tokens": prompts.sum(),
        "prompt_squares": (prompts**2).sum(),
        "text_tokens": whole.sum(),
        "text_squares": (whole**2).sum(),
    }


def padding_sums(rollout: Rollout) -> Batch:
    """Return the positions of the rows that one model scores, and how many hold a token of a real row."""
    present = (rollout.attention_mask * rollout.row_mask.unsqueeze(1)).sum()
    computed = sum(micro_batch.positions(len(rollout.row_mask)) for micro_batch in rollout.micro_batches)
    return {"present": present, "positions": torch.full_like(present, computed)}


def rollout_means(sums: Metrics) -> Metrics:
    """Return the means of `rollout_sums`: per sequence, but entropy per token."""
    rows = max(sums["rows"], 1)
    offset = sums["reward_offsets"] / rows
    return {
        "tokens": sums["tokens"],
        "reward": sums["reward"] / rows,
        "reward_std": max(sums["reward_squares"] / rows - offset**2, 0.0) ** 0.5,
        "kl": sums["kl"] / rows,
        "entropy": sums["entropy"] / max(sums["tokens"], 1),
        "response_length": sums["tokens"] / rows,
        "truncated_share": 1 - sums["ended"] / rows,
        **({"score_clip_fraction": sums["clipped_scores"] / rows} if "clipped_scores" in sums else {}),
        **({"equal_group_share": sums["equal_groups"] / max(sums["groups"], 1)} if "groups" in sums else {}),
        **{name: number / rows for name, number in sums.items() if is_reward_part(name)},
    }


def draw_sums(rollout: Rollout, scores: Scores) -> Batch:
    """Return sums for `draw_means`; nothing if generation did not draw the tokens.

    Of each token, generation and scoring compute the same log-probability in different ways; if their weights are the
    same, rounding is all that separates them.
    """
    if rollout.drawn_log_probs is None:
        return {}
    gap = masked(scores.log_probs - rollout.drawn_log_probs, rollout.action_mask)
    largest = distributed.all_max(gap.abs().amax())
    return {
        "draw_gap": gap.abs().sum(),
        "draw_gap_max": largest / distributed.world().size,  # the sum over ranks is the largest
        "draw_kl": masked(kl_estimate(-gap, "k3"), rollout.action_mask).sum(),
    }


def draw_means(sums: Metrics) -> Metrics:
    """Return the means per token of `draw_sums`, and the largest gap."""
    if "draw_gap" not in sums:
        return {}
    tokens = max(sums["tokens"], 1)
    return {
        "draw_gap": sums["draw_gap"] / tokens,
        "draw_gap_max": sums["draw_gap_max"],
        "draw_kl": sums["draw_kl"] / tokens,
        **{name: number / tokens for name, number in sums.items() if name.startswith("correction_")},
    }


def correction_sums(log_probs: Tensor, drawn_log_probs: Tensor, mask: Tensor, weights: Tensor) -> Batch:
    """Return sums over tokens for `draw_means`: of the weights, and of the tokens whose weight is not their ratio."""
    ratio = torch.exp(masked(log_probs - drawn_log_probs, mask))
    return {
        "correction_weight": weights.sum(),
        "correction_share": masked((weights != ratio).float(), mask).sum(),
    }


def group_sums(rollout: Rollout, scores: Scores, size: int) -> Batch:
    """Return the groups of `size` completions of one prompt, and how many of them have equal scores; nothing for 1."""
    if size == 1:
        return {}
    rewards, real = scores.reward.unflatten(0, (-1, size)), rollout.row_mask.unflatten(0, (-1, size)).any(1)
    lowest, highest = rewards.aminmax(dim=1)
    equal = highest - lowest <= 1e-6 * highest.abs().clamp_min(1)
    return {"groups": real.sum(), "equal_groups": (equal & real).sum()}


def critic_sums(values: Tensor, returns: Tensor, mask: Tensor) -> Batch:
    """Return sums of squares about their means over all ranks, for `explained_variance`; all inputs are [B, A].

    The means are subtracted first: if returns lie close together, sums of squares have no digits left.
    """
    both = torch.stack([returns, returns - values])
    *totals, count = distributed.all_sum(torch.stack([*(both * mask).sum((1, 2)), mask.sum()]))
    mean = torch.stack(totals) / count.clamp_min(1)
    spread, error = (((both - mean[:, None, None]) * mask) ** 2).sum((1, 2))
    return {"spread": spread, "error": error}


def explained_variance(sums: Metrics) -> float:
    """Return 1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant one.

    It is 0 too if all returns are equal.
    """
    return 1 - sums["error"] / sums["spread"] if sums["spread"] else 0.0


def record_arithmetic(
    context: StageContext,
    sums: Metrics,
    updates: float,
    pretraining: TextLengths | None = None,
    *,
    copies: int | None = 1,
    reused: bool = False,
) -> None:
    """Record the tokens and FLOPs of a step's phases in `context.phases`.

    Args:
        sums: those of `rollout_sums`, over all ranks.
        pretraining: raw text of each update, in addition to the rollout's.
        copies: completions for which a prompt was read once; None: another process drew the rollout.
        reused: the update differentiates the passes that scored policy and critic, and makes no other passes.
    """
    settings, model_flops = context.config.ppo, context.model_flops
    texts = TextLengths(sums["text_tokens"], sums["text_squares"], sums["tokens"])
    passes = settings.ppo_epochs * updates / settings.updates
    raw_text = pretraining or TextLengths(0, 0, 0)
    flops: dict[Phase, float] = {}
    if model_flops is not None:
        values = texts._replace(outputs=texts.tokens)  # a scalar head is read at every token
        read = {name: values if name in ("critic", "reward") else texts for name in (*model_flops, "reference")}
        actor = model_flops["actor"]
        known = {"reference": replace(actor, adapters=0)} | model_flops
        scored = {name: known[name].forward(read[name]) for name in read}
        trained = {name: model_flops[name].update(read[name]) for name in ("actor", "critic") if name in model_flops}
        updated = sum(trained.values()) - (sum(scored[name] for name in trained) if reused else 0)
        prompts = TextLengths(sums["prompt_tokens"], sums["prompt_squares"], 0)
        flops = {
            "generation": actor.forward(generation_lengths(sums["rows"], prompts, texts, copies)) if copies else 0,
            "scoring": sum(scored.values()),
            "training": passes * updated + updates * actor.update(raw_text),
        }
    tokens: dict[Phase, float] = {
        "generation": texts.outputs,
        "scoring": texts.tokens,
        "training": passes * texts.tokens + updates * raw_text.tokens,
    }
    for phase, count in tokens.items():
        context.phases.count_work(phase, tokens=count, flops=flops.get(phase))


_PROMPT, _COMPLETION = 400, 800  # characters that are shown
_CHARACTER_TOKENS = 4  # of a character, at most: UTF-8 has four bytes
# Control characters, and those that turn the direction of text or end lines; joiners make one letter of several.
_HIDDEN, _HARMLESS = {"Cc", "Cf", "Cs", "Zl", "Zp"}, "\n\t\u200c\u200d"


class RolloutSample(NamedTuple):
    """One sequence of a rollout: its texts, its score, and the sum of log(policy / reference) over its `tokens`.

    Attributes:
        pieces: the text of each token; together they are the completion, with its end token.
        by_token: for each token log(policy / reference), the critic's value if there is a critic, and the advantage.
    """

    prompt: str
    completion: str
    score: float
    kl: float  # in nats
    tokens: int
    pieces: Sequence[str] = ()
    by_token: Mapping[str, Sequence[float]] = MappingProxyType({})

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
        text = f"{sample.prompt}\n{sample.completion}\n{sample.numbers}"
        context.recorder.text(f"sample_{number}", step, text, {"sample": sample._asdict()})
        console.print(render_sample(sample, f"ppo: step {step:,}"))
        console.print()


def select_samples(experience: Experience, tokenizer: Any, count: int, host: Any) -> list[RolloutSample]:
    """Return `count` sequences of this rank, as far apart as possible: neighbours may share a prompt."""
    ids, attention, mask = (
        tensor.to(host) for tensor in (experience.input_ids, experience.attention_mask, experience.action_mask)
    )
    columns = {
        "log_ratio": experience.log_probs - experience.ref_log_probs,
        "value": experience.values,
        "advantage": experience.advantages,
    }
    on_host = {name: column.to(host) for name, column in columns.items()}
    scores = experience.reward.to(host).tolist()
    start = ids.shape[1] - experience.completion_length
    samples = []
    for row in sorted({place * len(ids) // count for place in range(count)}):
        completion = ids[row, start:][mask[row].bool()]
        prompt = ids[row, :start][attention[row, :start].bool()]
        prompt_text, text = (
            tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in (prompt, completion)
        )
        drawn = mask[row].bool()
        by_token = {
            name: [round(number, 4) for number in column[row][drawn].tolist()] for name, column in on_host.items()
        }
        kl = on_host["log_ratio"][row].sum().item()
        pieces = token_texts(tokenizer, completion.tolist())
        samples.append(RolloutSample(prompt_text, text, scores[row], kl, len(completion), pieces, by_token))
    return samples


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token, so that together they are the text of all.

    If a character consists of several tokens, the last of them has it, and the others are empty.
    """
    texts, start, read = [], 0, 0  # some tokenizers omit a space at the start, so decode from the token before
    for end in range(1, len(ids) + 1):
        before, after = tokenizer.decode(ids[start:read]), tokenizer.decode(ids[start:end])
        is_part = after.endswith("\ufffd") and end - read < _CHARACTER_TOKENS and end < len(ids)
        if len(after) <= len(before) or is_part:
            texts.append("")
            continue
        texts.append(after[len(before) :])
        start, read = read, end
    return texts


def render_sample(sample: RolloutSample, title: str) -> RenderableType:
    """Return a sample as text for the terminal, without interpreting markup in its texts."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    grid.add_row("prompt", Text(escape_text(sample.prompt, _PROMPT), style="italic"))
    grid.add_row("completion", Text(escape_text(sample.completion, _COMPLETION) or "(empty)", style="green"))
    grid.add_row(title, Text(sample.numbers))
    return grid


def escape_text(text: str, most: int) -> str:
    """Escape control characters in `text`, and omit its middle if it has more than `most` characters."""
    text = re.sub(r"\n{3,}", "\n\n", text)
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
    return "".join(_escape_character(character) for character in text)


def _escape_character(character: str) -> str:
    if character in _HARMLESS or unicodedata.category(character) not in _HIDDEN:
        return character
    return ascii(character)[1:-1]
