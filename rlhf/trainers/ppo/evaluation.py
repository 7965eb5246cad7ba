"""What a policy does on held-out prompts: reward, drift from the reference, length, variety, and a judge's view."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhf.data.completions import completion_ids, completion_texts
from rlhf.data.examples import Prompt
from rlhf.engine import distributed
from rlhf.engine.metric_sums import MetricSums
from rlhf.reporting.progress import progress
from rlhf.trainers.context import StageContext
from rlhf.trainers.evaluation_schedule import Found
from rlhf.trainers.ppo.metrics import means, rollout_statistics
from rlhf.trainers.ppo.trainer import PPO
from rlhf.utils.statistics import distinct

Judge = Callable[[str, str], bool]
"""(prompt, completion) -> approved; it judges results and is never part of training."""

_SAMPLES = 3


def evaluate(context: StageContext, ppo: PPO, examples: Sequence[Prompt], when: str, judge: Judge | None) -> Found:
    """Complete the held-out prompts, the same ones with the same random numbers each time.

    Returns:
        Means over the prompts; the first few prompts with their completions.
    """
    state = context.accelerator.rng_state()
    context.accelerator.seed(context.config.seed + context.world.rank)
    sums = MetricSums()
    mine: list[list[int]] = []
    bars = progress(len(examples), f"ppo: held-out prompts {when}", enabled=context.world.is_main)
    with context.phases.running("evaluation"), bars as bar:
        for index in range(len(ppo.held_out)):
            (prompts,) = (context.accelerator.to_device(batch) for batch in ppo.held_out.step(index))
            sequences = ppo.generate(prompts)
            scored = ppo.score(sequences, ppo.held_out.share(index))
            sums.add(**rollout_statistics(scored, sequences, prompts["row_mask"]))
            mine += completion_ids(sequences)
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
    texts = completion_texts(ppo.tokenizer, completions)
    numbers["distinct_2"] = distinct(completions, 2)
    if judge is not None:
        approved = sum(judge(example.row.text, text) for example, text in zip(examples, texts))
        numbers["approved_share"] = approved / len(texts)
    samples = [{"prompt": example.row.text, "completion": text} for example, text in zip(examples[:_SAMPLES], texts)]
    return Found(numbers, samples)
