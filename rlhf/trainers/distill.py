"""Distillation, from top to bottom: the student draws completions, the teacher reads them, the student is updated.

`DistillTrainer.step` is the algorithm (arXiv:2306.13649, with all rows drawn by the student): the loss is the mean over
the tokens that the student has drawn of the divergence between its distribution and the teacher's, over the whole
vocabulary. A teacher on servers tells the probabilities of the drawn tokens alone, from which the divergence is
estimated. Prompts, rollouts and the evaluation are those of PPO; there is no reward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.data.batches import collate_ppo
from rlhf.data.examples import Prompt
from rlhf.data.stage_dataset import StageData
from rlhf.engine import distributed
from rlhf.engine.cpu_offload import on_device
from rlhf.engine.engine import Batch, Metrics, TrainingEngine, padding_share
from rlhf.losses.divergence import Logits, sampled_divergences
from rlhf.losses.log_probs import masked
from rlhf.models.forward import completion_divergences, completion_log_probs, next_token_logits
from rlhf.models.shape import TextLengths, generation_lengths
from rlhf.reporting.step_records import RankStep
from rlhf.trainers.context import StageContext
from rlhf.trainers.ppo.evaluation import Approves, HeldoutPrompts
from rlhf.trainers.ppo.experience import MicroBatcher, Rollout, join_rows
from rlhf.trainers.ppo.memory_choices import choose_by_memory
from rlhf.trainers.ppo.metrics import length_sums, padding_sums
from rlhf.trainers.ppo.policy_decoder import PolicyDecoder
from rlhf.trainers.ppo.recorded_rollout import TEACHER, StepContents, restore_numbers
from rlhf.trainers.ppo.reports import report_rollout
from rlhf.trainers.stage_models import ModelFactory, log_outputs, save_outputs
from rlhf.trainers.teacher_servers import TeacherServers
from rlhf.trainers.trainer import EvalResult


class DistillTrainer:
    """Distillation's models, prompts and step; a `rlhf.trainers.trainer.Trainer`.

    Attributes:
        student: the model that is trained.
        teacher: the model that it learns from, frozen; None if `servers` have it.
        policy: draws the student's completions.
        given: a recorded rollout, which steps take instead of drawing one.
        scored: the same, with what servers have said of it, which steps take instead of asking them.
    """

    unit = "tokens"
    displayed = ("loss", "response_length", "truncated_share")

    def __init__(
        self,
        context: StageContext,
        models: ModelFactory,
        tokenizer: Any,
        data: StageData,
        rule: Approves | None = None,
    ) -> None:
        """Load the models and prepare the batches; `rule` is used in evaluations only."""
        self.context, self.tokenizer, self.data = context, tokenizer, data
        self.accelerator = context.accelerator
        self.settings = settings = context.config.distill
        self.given: RankStep | None = None
        self.scored: RankStep | None = None
        self._contents = StepContents([], {})

        ranks, limits = context.world.size, context.config.data
        micro_rows, rows = settings.micro_batch(ranks, section="distill"), settings.batch_size // ranks
        self.micro_batcher = MicroBatcher(micro_rows, context.shapes)
        collate = partial(
            collate_ppo,
            pad_token_id=tokenizer.pad_token_id,
            policy=context.shapes,
            maximum=limits.max_prompt_length,
        )
        self.batches = context.batches(data.train, collate, batch_size=settings.batch_size, micro_batch_size=rows)
        self.epoch_steps = len(self.batches)
        self.total_steps = settings.total_steps(self.epoch_steps)

        self.student = context.engine(
            "student",
            models.causal_lm,
            settings.optimizer,
            total_steps=self.total_steps * settings.updates,
            batch_size=settings.batch_size,
            micro_batch_size=micro_rows,
        )
        self.teacher = context.frozen("teacher", models.causal_lm) if "teacher" in context.placements else None
        self.servers = TeacherServers(context, tokenizer, micro_rows) if settings.teacher_servers else None
        judge = context.frozen("judge", models.scalar_head) if "judge" in context.placements else None
        examples = [example for example in data.heldout if isinstance(example, Prompt)][: settings.eval_rows]
        batches = context.evaluation_batches(data.heldout, collate, settings, rows=rows)
        self.held_out = HeldoutPrompts(context, tokenizer, examples, batches, rows, judge, rule)
        self.policy = PolicyDecoder(
            context,
            self.student,
            tokenizer,
            self.micro_batcher,
            settings.sampling,
            batch_size=settings.generation_batch_size,
            rows=settings.generation_rows(ranks),
            layout=choose_by_memory(context).layout,
        )
        self.decoder = self.policy.decoder

    @property
    def engines(self) -> dict[str, TrainingEngine]:
        """The student, by the name that checkpoints use."""
        return {"model": self.student}

    def step(self, index: int) -> Metrics:
        """Take step `index`: one rollout, and `distill.updates` updates on it."""
        context = self.context
        (own,) = self.batches.step(index)
        self._contents = StepContents.of(self.batches.own_numbers(index), own, self.decoder.random.get_state())
        prompts = self.accelerator.to_device(own)
        with context.phases("generation"):
            rollout = self.draw(prompts)
            if not self.given:
                self.policy.count_steps()
        self._contents.rollout = rollout
        report_rollout(context.observation, rollout, "student")
        with context.phases("scoring"):
            scores = self._ask_servers(rollout, self.scored)
            parts = self.read(rollout, scores)
        self._contents.teacher_log_probs = scores
        with context.phases("training"):
            # Of the whole global batch: the loss is a mean over it, however rows are split.
            total = distributed.all_sum(rollout.action_mask.sum()).clamp_min(1)
            self.student.omitted_steps = index * self.settings.updates - self.student.steps
            rates, loss = self.student.rates, partial(self._loss, total=total)
            sums = self.student.step(parts, loss)
            for update in range(1, self.settings.updates):
                context.observation.update = update
                self.student.step(parts, loss)
        rows = rollout.row_mask.float()
        sums.add(
            rows=rows.sum(),
            tokens=rollout.action_mask.sum(),
            ended=(rollout.ended * rows).sum(),
            **length_sums(rollout, rows),
            **padding_sums(rollout),
        )
        totals = sums.read()
        self._count_work(totals)
        return {
            "loss": totals["loss"],
            **rollout_numbers(totals),
            "padding_share": padding_share(totals),
            **rates,
            "grad_norm": self.student.grad_norm(),
        }

    def draw(self, prompts: Batch) -> Rollout:
        """Return a step's rollout: drawn now, or a recorded one, for which the generator moves on as if it were."""
        if not self.given:
            return self.generate(prompts)
        self.decoder.skip(len(prompts["prompt_ids"]))
        return self.policy.restore(prompts, self.given)

    def generate(self, prompts: Batch) -> Rollout:
        """Complete prompts; see `rlhf.data.batches.collate_ppo` for what they consist of."""
        return self.policy.generate(prompts)

    def _ask_servers(self, rollout: Rollout, scored: RankStep | None = None) -> Tensor | None:
        """Return the log-probabilities of a rollout's tokens by the teacher's servers, if there are any, [B, A].

        Those of a recorded rollout, `scored`, are in its record.
        """
        if not self.servers:
            return None
        with self.context.phases.running("scoring"):
            return restore_numbers(scored, TEACHER, self.accelerator) if scored else self.servers.score(rollout)

    @torch.no_grad()
    def read(self, rollout: Rollout, scores: Tensor | None = None) -> list[dict[str, Any]]:
        """Return the micro-batches of a rollout, each with what the `teacher` says of its completions.

        That is its `Logits`, or the `scores` of its servers, [n, a] of [B, A].
        """
        tensors = {name: getattr(rollout, name) for name in ("input_ids", "attention_mask", "action_mask")}
        parts: list[dict[str, Any]] = []
        with self.context.phases.running("scoring"), on_device(self.teacher):
            for cut in rollout.micro_batches:
                part = {name: cut.select(tensor, rollout.completion_length) for name, tensor in tensors.items()}
                if scores is not None:
                    parts.append(part | {"teacher": cut.select(scores, rollout.completion_length)})
                    continue
                logits = self._read_by_teacher(part)
                # One output layer for all: of a sharded teacher it is a copy.
                logits = logits._replace(weight=parts[0]["teacher"].weight) if parts else logits
                parts.append(part | {"teacher": logits})
        return parts

    def _read_by_teacher(self, part: Batch) -> Logits:
        assert self.teacher
        with self.context.precision.autocast():
            length = part["action_mask"].shape[1]
            logits = next_token_logits(self.teacher, part["input_ids"], part["attention_mask"], length)
        self.accelerator.step_boundary("score/teacher")
        return logits

    def _divergences(self, model: nn.Module, part: dict[str, Any]) -> Tensor:
        """Return the divergence at each token of a micro-batch, [n, a] in nats; 0 where no token was drawn."""
        mask, teacher, ids = part["action_mask"], part["teacher"], (part["input_ids"], part["attention_mask"])
        if self.servers:
            log_probs = completion_log_probs(model, *ids, mask.shape[1]).log_probs
            return masked(sampled_divergences(log_probs, teacher), mask)
        reverse = self.settings.divergence == "reverse"
        return masked(completion_divergences(model, teacher, *ids, mask.shape[1], reverse=reverse), mask)

    def _loss(self, model: nn.Module, part: dict[str, Any], *, total: Tensor) -> tuple[Tensor, Batch]:
        """Return a micro-batch's part of the mean over all `total` tokens."""
        divergences = self._divergences(model, part)
        self.context.observation.report("scores", "student", divergences=divergences)
        return divergences.sum() / total, {}

    def _count_work(self, totals: Metrics) -> None:
        """Record the tokens and FLOPs of a step's phases."""
        context = self.context
        texts = TextLengths(totals["text_tokens"], totals["text_squares"], totals["tokens"])
        prompts = TextLengths(totals["prompt_tokens"], totals["prompt_squares"], 0)
        flops: tuple[float, float, float] | tuple[None, None, None] = (None, None, None)
        if context.model_flops is not None:
            student, teacher = context.model_flops["student"], context.model_flops.get("teacher")
            drawn, read = generation_lengths(totals["rows"], prompts, texts), teacher.forward(texts) if teacher else 0
            flops = student.forward(drawn), read, self.settings.updates * student.update(texts)
        context.phases.count_work("generation", tokens=texts.outputs, flops=flops[0])
        context.phases.count_work("scoring", tokens=texts.tokens, flops=flops[1])
        context.phases.count_work("training", tokens=self.settings.updates * texts.tokens, flops=flops[2])

    def repeat_scoring(self) -> Iterator[tuple[Any, Callable[[], object]]]:
        """Yield the micro-batches of the last rollout, each with a function by which the teacher reads it again."""
        assert self._contents.rollout
        if self.servers:  # nothing is computed here
            return
        for part in self.read(self._contents.rollout):
            yield part, torch.no_grad()(partial(self._read_by_teacher, part))

    def describe_step(self) -> RankStep:
        """Return the last step's rollout."""
        return self._contents.describe()

    @torch.no_grad()
    def evaluate(self, when: str) -> EvalResult:
        """Return the mean divergence of the student's completions of the held-out prompts, and what judges them.

        Completions are sampled with the same random numbers each time.
        """
        with self.decoder.seeded(self.context.config.seed):
            return self.held_out.evaluate_by(when, self.generate, self._measure, _average)

    def _measure(self, rollout: Rollout, examples: Sequence[Prompt]) -> tuple[Batch, dict[str, Tensor]]:
        """Return sums for `_average` over a rollout's real rows, and the `divergence` of each row."""
        self.student.engine.eval()
        outputs = []
        for part in self.read(rollout, self._ask_servers(rollout)):
            with self.context.precision.autocast():
                outputs.append(self._divergences(self.student.engine, part))
            self.accelerator.step_boundary("distill/evaluate")
        divergences = join_rows(rollout.micro_batches, outputs, rollout.completion_length).sum(1)
        rows = rollout.row_mask.float()
        sums = {
            "rows": rows.sum(),
            "tokens": rollout.action_mask.sum(),
            "ended": (rollout.ended * rows).sum(),
            "loss": (divergences * rows).sum(),
        }
        return sums, {"divergence": divergences}

    def save(self, folder: Path) -> None:
        """Save the student."""
        save_outputs(self.context, self.student, self.tokenizer, folder)

    def summarize(self) -> dict[str, Any]:
        """Log what was saved and return the summary's entries about the model and the data."""
        log_outputs(self.context, self.student)
        return {"parameters": self.student.parameter_counts, **self.data.summary}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs in addition to the engine: the generator that draws."""
        return {"random": self.decoder.random.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.decoder.random.set_state(state["random"])


def rollout_numbers(sums: Metrics) -> Metrics:
    """Return the tokens of a rollout, the mean length of completions, and the share of those without an end."""
    rows = max(sums["rows"], 1)
    return {
        "tokens": sums["tokens"],
        "response_length": sums["tokens"] / rows,
        "truncated_share": 1 - sums["ended"] / rows,
    }


def _average(sums: Metrics) -> Metrics:
    return {"loss": sums["loss"] / max(sums["tokens"], 1), **rollout_numbers(sums)}
