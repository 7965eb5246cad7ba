"""The evaluation of a policy on held-out prompts, in PPO and distillation: by its stage, by a judge, and by a rule."""

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
from rlhf.trainers.ppo.experience import Rollout, Scores, join_rows
from rlhf.trainers.ppo.metrics import mean_score, rollout_means, rollout_sums, row_numbers, score_columns
from rlhf.trainers.trainer import EvalResult
from rlhf.utils.statistics import distinct

Approves = Callable[[str, str], bool]
"""(prompt, completion) -> approved."""
Generate = Callable[[Batch], Rollout]
Score = Callable[[Rollout, Sequence[Prompt]], Scores]
Measure = Callable[[Rollout, Sequence[Prompt]], tuple[Batch, dict[str, Tensor]]]
"""(rollout, examples) -> (sums over its real rows and tokens, numbers of each row by name, [B] each)."""

_SUMMARY_SAMPLES = 3


@dataclass(frozen=True)
class HeldoutPrompts:
    """The held-out prompts, and what judges completions of them.

    Attributes:
        batches: over `examples`, each with `rows` rows on a rank.
        judge: a reward model that never trains the policy (`ppo.judge`, `distill.judge`); None without one.
        rule: the rule of the data; None if they have none.
    """

    context: StageContext
    tokenizer: Any
    examples: Sequence[Prompt]
    batches: Batches[Prompt]
    rows: int
    judge: nn.Module | None
    rule: Approves | None

    def evaluate(self, when: str, generate: Generate, score: Score, *, draws: int = 1) -> EvalResult:
        """Evaluate completions by `generate` and `score`, as PPO does.

        With several `draws`, rows also have the rewards of as many completions, the first one's among them.
        """
        center: Tensor | None = None

        def measure(rollout: Rollout, examples: Sequence[Prompt]) -> tuple[Batch, dict[str, Tensor]]:
            nonlocal center
            scores = score(rollout, examples)
            center = mean_score(rollout, scores) if center is None else center
            return rollout_sums(rollout, scores, center), score_columns(rollout, scores)

        return self.evaluate_by(when, generate, measure, rollout_means, draws=draws)

    def evaluate_by(
        self,
        when: str,
        generate: Generate,
        measure: Measure,
        average: Callable[[Metrics], Metrics],
        *,
        draws: int = 1,
    ) -> EvalResult:
        """Evaluate completions by `generate` and `measure`, whose sums over all rows `average` divides.

        With several `draws`, `measure` returns a `reward` of each row.
        """
        context, examples = self.context, self.examples
        sums = MetricSums()
        ids: list[list[int]] = []
        measured: list[dict[str, Any]] = []
        for index, (prompts,) in context.evaluate_batches(self.batches, f"held-out prompts {when}"):
            rollout = generate(prompts)
            rows_sums, columns = measure(rollout, self.batches.share(index))
            sums.add(**rows_sums)
            ids += completion_ids(rollout.input_ids, rollout.action_mask)
            measured += row_numbers(rollout, columns, self._score_by_judge(rollout))
        if draws > 1:
            for row, rewards in zip(measured, self._draw_more(generate, measure, draws - 1), strict=True):
                row["rewards"] = [row["reward"], *rewards]

        numbers = average(sums.read())
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

    def _draw_more(self, generate: Generate, measure: Measure, count: int) -> list[tuple[float, ...]]:
        """Return the rewards of `count` more completions for each of this rank's rows, fillers included."""
        draws = []
        for draw in range(count):
            rewards: list[float] = []
            for index, (prompts,) in self.context.evaluate_batches(self.batches, f"completion {draw + 2}, best of n"):
                rewards += measure(generate(prompts), self.batches.share(index))[1]["reward"].tolist()
            draws.append([float(f"{reward:.6g}") for reward in rewards])
        return list(zip(*draws, strict=True))

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
