"""The evaluation of PPO's policy on held-out prompts: by the reward, by a judge, and by a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.data.batches import Batch, Batches, completion_ids, completion_texts
from rlhf.data.examples import Prompt
from rlhf.engine import distributed
from rlhf.engine.cpu_offload import on_device
from rlhf.engine.engine import Metrics, MetricSums
from rlhf.models.forward import sequence_scores
from rlhf.trainers.context import StageContext
from rlhf.trainers.loop import EvalResult
from rlhf.trainers.ppo.experience import Rollout, Scores, join_rows
from rlhf.trainers.ppo.metrics import mean_score, rollout_means, rollout_sums, row_numbers
from rlhf.utils.statistics import distinct

Rule = Callable[[str, str], bool]
"""(prompt, completion) -> approved."""

_SUMMARY_SAMPLES = 3


@dataclass(frozen=True)
class HeldoutPrompts:
    """The held-out prompts, and what judges completions of them.

    Attributes:
        batches: over `examples`, each with `rows` rows on a rank.
        judge: a second reward model (`ppo.judge`); None without one.
        rule: the rule of the data; None if they have none.
    """

    context: StageContext
    tokenizer: Any
    examples: Sequence[Prompt]
    batches: Batches[Prompt]
    rows: int
    judge: nn.Module | None
    rule: Rule | None

    def evaluate(
        self, when: str, generate: Callable[[Batch], Rollout], score: Callable[[Rollout, Sequence[Prompt]], Scores]
    ) -> EvalResult:
        """Evaluate completions by `generate` and `score`, sampled with the same random numbers each time."""
        context, examples = self.context, self.examples
        state = context.accelerator.rng_state()
        context.accelerator.seed(context.config.seed + context.world.rank)
        sums, center = MetricSums(), None
        ids: list[list[int]] = []
        measured: list[Metrics] = []
        for index, (prompts,) in context.evaluate_batches(self.batches, f"held-out prompts {when}"):
            rollout = generate(prompts)
            scores = score(rollout, self.batches.share(index))
            center = mean_score(rollout, scores) if center is None else center
            sums.add(**rollout_sums(rollout, scores, center))
            ids += completion_ids(rollout.input_ids, rollout.action_mask)
            measured += row_numbers(rollout, scores, self._score_by_judge(rollout))
        context.accelerator.set_rng_state(state)

        numbers = rollout_means(sums.read())
        del numbers["tokens"]
        # Rank r has the r-th share of each batch; restore the order of the examples.
        shares, size = distributed.all_gather_objects(list(zip(ids, measured, strict=True))), self.rows
        in_order = [
            row for start in range(0, len(ids), size) for share in shares for row in share[start : start + size]
        ]
        del in_order[len(examples) :]  # they fill the last batch
        numbers["distinct_2"] = distinct([completion for completion, _ in in_order], 2)
        texts = completion_texts(self.tokenizer, [completion for completion, _ in in_order])
        rows: list[dict[str, Any]] = [
            {"prompt": example.row.text, "completion": text, **row}
            for example, text, (_, row) in zip(examples, texts, in_order, strict=True)
        ]
        judged = [row["judge"] for row in rows if self.judge]
        if judged:
            numbers["judge_reward"] = fmean(judged)
        if self.rule is not None:
            for row in rows:
                row["approved"] = self.rule(row["prompt"], row["completion"])
            numbers["approved_share"] = sum(row["approved"] for row in rows) / len(rows)
        samples = [{key: row[key] for key in ("prompt", "completion")} for row in rows[:_SUMMARY_SAMPLES]]
        return EvalResult(numbers, samples, judged, rows)

    @torch.no_grad()
    def _score_by_judge(self, rollout: Rollout) -> Tensor | None:
        """Return the judge's scores of completions, [B]; None without a judge."""
        if self.judge is None:
            return None
        scores, length = [], rollout.completion_length
        with self.context.phases.running("scoring"), on_device(self.judge), self.context.precision.autocast():
            for cut in rollout.micro_batches:
                ids, mask = (cut.select(part, length) for part in (rollout.input_ids, rollout.attention_mask))
                scores.append(sequence_scores(self.judge, ids, mask))
                self.context.accelerator.step_boundary("evaluate/judge")
        return join_rows(rollout.micro_batches, scores, length)
