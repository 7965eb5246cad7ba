"""Metrics of a PPO step: reward, drift from the reference, lengths, and the arithmetic of its phases."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlhf.data.batches import Batch
from rlhf.engine import distributed
from rlhf.engine.metric_sums import Metrics
from rlhf.losses.log_probs import masked
from rlhf.models.flops import TextLengths, generation_lengths
from rlhf.reporting.timers import Phase
from rlhf.trainers.context import StageContext
from rlhf.trainers.ppo.experience import Rollout, Scores
from rlhf.trainers.ppo.rewards import is_reward_part


def rollout_sums(rollout: Rollout, scores: Scores) -> Batch:
    """Return sums over real rows and tokens of a rollout, for `rollout_means` to divide."""
    rows, mask = rollout.row_mask.float(), rollout.action_mask
    log_ratio = masked(scores.log_probs - scores.ref_log_probs, mask)
    return {
        "rows": rows.sum(),
        "tokens": mask.sum(),
        "reward": (scores.reward * rows).sum(),
        "reward_squared": (scores.reward**2 * rows).sum(),
        "kl": log_ratio.sum(),
        "entropy": masked(scores.entropy, mask).sum(),
        "ended": (rollout.ended * rows).sum(),
        **length_sums(rollout, rows),
        **{name: (part * rows).sum() for name, part in scores.reward_parts.items()},
    }


def length_sums(rollout: Rollout, rows: Tensor) -> Batch:
    """Return sums over real rows of the lengths of prompts and of whole texts, and of their squares."""
    whole = rollout.attention_mask.sum(1) * rows
    prompts = whole - rollout.action_mask.sum(1)
    return {
        "prompt_tokens": prompts.sum(),
        "prompt_pairs": (prompts**2).sum(),
        "text_tokens": whole.sum(),
        "text_pairs": (whole**2).sum(),
    }


def padding_sums(rollout: Rollout) -> Batch:
    """Return the positions that one model's scoring pass computes, and how many hold a token of a real row."""
    present = (rollout.attention_mask * rollout.row_mask.unsqueeze(1)).sum()
    computed = sum(micro_batch.positions(len(rollout.row_mask)) for micro_batch in rollout.micro_batches)
    return {"present": present, "positions": torch.full_like(present, computed)}


def rollout_means(sums: Metrics) -> Metrics:
    """Return the means of `rollout_sums`: per sequence, but entropy per token."""
    rows = max(sums["rows"], 1)
    mean = sums["reward"] / rows
    return {
        "tokens": sums["tokens"],
        "reward": mean,
        "reward_std": max(sums["reward_squared"] / rows - mean**2, 0.0) ** 0.5,
        "kl": sums["kl"] / rows,
        "entropy": sums["entropy"] / max(sums["tokens"], 1),
        "response_length": sums["tokens"] / rows,
        "truncated_share": 1 - sums["ended"] / rows,
        **{name: number / rows for name, number in sums.items() if is_reward_part(name)},
    }


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
    reused: bool = False,
) -> None:
    """Record the tokens that a step's phases worked on, and the operations that this takes.

    Args:
        context: its `phases` receive the numbers.
        sums: those of `rollout_sums`, over all ranks.
        updates: how many followed the rollout.
        pretraining: raw text of each update, in addition to the rollout's.
        reused: the update differentiates the passes that scored policy and critic, and makes no others.
    """
    settings, model_flops = context.config.ppo, context.model_flops
    texts = TextLengths(sums["text_tokens"], sums["text_pairs"], sums["tokens"])
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
        prompts = TextLengths(sums["prompt_tokens"], sums["prompt_pairs"], 0)
        flops = {
            "generation": actor.forward(generation_lengths(sums["rows"], prompts, texts)),
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
