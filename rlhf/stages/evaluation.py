"""What a policy does on held-out prompts: reward, drift from the reference, length, variety, and a judge's view."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlhf.data.tokenization import Prompt
from rlhf.engine import distributed
from rlhf.engine.statistics import Sums
from rlhf.engine.training import Batch
from rlhf.metrics.progress import progress
from rlhf.objectives import masked
from rlhf.stages.loop import Numbers, StageContext

if TYPE_CHECKING:
    from rlhf.stages.ppo import PPO

Judge = Callable[[str, str], bool]
"""(prompt, completion) -> approved; it judges results and is never part of training."""

_SAMPLES = 3


def evaluate(
    context: StageContext, ppo: PPO, examples: Sequence[Prompt], when: str, judge: Judge | None
) -> dict[str, Any]:
    """Complete the held-out prompts, the same ones with the same random numbers each time.

    Returns:
        `numbers`: means over the prompts; `samples`: the first few prompts with their completions.
    """
    state = context.accelerator.rng_state()
    context.accelerator.seed(context.config.seed + context.world.rank)
    sums = Sums()
    mine: list[list[int]] = []
    with progress(len(examples), f"ppo: held-out prompts {when}", enabled=context.world.is_main) as bar:
        for index in range(len(ppo.held_out)):
            (prompts,) = (context.accelerator.to_device(batch) for batch in ppo.held_out.step(index))
            sequences = ppo.generate(prompts)
            scored = ppo.score(sequences)
            mask = sequences["action_mask"]
            sums.add(**rollout_statistics(scored, mask, prompts["row_mask"]))
            ids = sequences["input_ids"][:, -mask.shape[1] :]
            lengths = mask.sum(-1).long()
            mine += [row[:n] for row, n in zip(ids.tolist(), lengths.tolist())]
            bar.advance(len(ppo.held_out.examples(index)))
    context.accelerator.set_rng_state(state)

    numbers = means(sums.read())
    del numbers["tokens"]
    rows = ppo.batch_rows
    # Rank r holds the r-th share of each batch; put the rows back into the order of the examples.
    shares = distributed.all_gather_objects(mine)
    completions = [
        row for start in range(0, len(mine), rows) for share in shares for row in share[start : start + rows]
    ][: len(examples)]
    texts = [ppo.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in completions]
    numbers["distinct_2"] = distinct_2(completions)
    if judge is not None:
        approved = sum(judge(example.row.text, text) for example, text in zip(examples, texts))
        numbers["approved_share"] = approved / len(texts)
    samples = [{"prompt": example.row.text, "completion": text} for example, text in zip(examples[:_SAMPLES], texts)]
    return {"numbers": numbers, "samples": samples}


def record(context: StageContext, step: int, found: dict[str, Any]) -> None:
    """Record what `evaluate` found after `step` steps."""
    context.recorder.log(step, {f"heldout_{key}": value for key, value in found["numbers"].items()})
    for position, sample in enumerate(found["samples"]):
        context.recorder.text(f"heldout_{position}", step, f"{sample['prompt']}\n{sample['completion']}")


def rollout_statistics(scored: Batch, mask: Tensor, row_mask: Tensor) -> Batch:
    """Sums over real rows and tokens of a rollout; `means` divides them."""
    rows = row_mask.float()
    log_ratio = masked(scored["log_probs"] - scored["ref_log_probs"], mask)
    return {
        "rows": rows.sum(),
        "tokens": mask.sum(),
        "reward": (scored["scores"] * rows).sum(),
        "reward_squared": (scored["scores"] ** 2 * rows).sum(),
        "kl": log_ratio.sum(),
        "entropy": masked(scored["entropy"], mask).sum(),
    }


def means(sums: Numbers) -> Numbers:
    """Means of what `rollout_statistics` summed: per sequence, but entropy per token."""
    rows = max(sums["rows"], 1)
    mean = sums["reward"] / rows
    return {
        "tokens": sums["tokens"],
        "reward": mean,
        "reward_std": max(sums["reward_squared"] / rows - mean**2, 0.0) ** 0.5,
        "kl": sums["kl"] / rows,
        "entropy": sums["entropy"] / max(sums["tokens"], 1),
        "response_length": sums["tokens"] / rows,
    }


def distinct_2(completions: Sequence[Sequence[int]]) -> float:
    """Different pairs of neighbouring tokens, as a part of all such pairs (arXiv:1510.03055): 0 same, 1 varied."""
    pairs = [pair for ids in completions for pair in itertools.pairwise(ids)]
    return len(set(pairs)) / max(len(pairs), 1)
