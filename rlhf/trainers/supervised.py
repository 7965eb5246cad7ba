"""Trainers of SFT and the reward model, and the base of all trainers that learn from labelled rows.

`SupervisedTrainer` has the batches, the step, checkpoints and results; each stage adds its loss and its evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.config.schema import EpochConfig, RewardConfig
from rlhf.data.batches import (
    MicroBatchRows,
    collate_reward,
    collate_sft,
    count_padding,
    digest_batches,
    example_length,
)
from rlhf.data.examples import Demonstration, Pair
from rlhf.data.stage_dataset import StageData
from rlhf.engine import distributed
from rlhf.engine.engine import Batch, Metrics, MetricSums, TrainingEngine, padding_share
from rlhf.engine.observer import ObservationPoint
from rlhf.losses.log_probs import masked
from rlhf.losses.reward_model import PairwiseLoss, pairwise_reward_loss
from rlhf.models.dropout import is_stochastic
from rlhf.models.forward import (
    completion_log_probs,
    compute_log_probs,
    in_one_row,
    model_inputs,
    sequence_scores,
)
from rlhf.models.scalar_head import describe_loading
from rlhf.models.shape import ModelFlops, TextLengths
from rlhf.reporting.step_records import RankStep
from rlhf.trainers.context import ModelLoader, StageContext
from rlhf.trainers.greedy_samples import GreedySamples
from rlhf.trainers.row_counts import RowCounts
from rlhf.trainers.stage_models import ModelFactory, log_outputs, save_outputs
from rlhf.trainers.trainer import EvalResult
from rlhf.utils.statistics import perplexity


class SupervisedTrainer:
    """A model that learns from rows; a `rlhf.trainers.trainer.Trainer`.

    Subclasses define `count`, `count_wrong_targets`, `loss`, `rescore` and `evaluate`, and if necessary `average` and
    `prepare`.
    """

    unit: str
    displayed: tuple[str, ...]

    def __init__(self, context: StageContext, load: ModelLoader, tokenizer: Any, collate: Any, data: StageData) -> None:
        """Load the model and prepare the batches; `collate` creates a micro-batch (`rlhf.data.batches`).

        It also receives the padding token and the shape policy.
        """
        name = context.directory.name
        self.context, self.tokenizer, self.data = context, tokenizer, data
        self.settings: EpochConfig = getattr(context.config, name)
        settings, micro = self.settings, self.settings.micro_batch(context.world.size, section=name)
        sizes = {"batch_size": settings.batch_size, "micro_batch_size": micro}
        collate = partial(collate, pad_token_id=tokenizer.pad_token_id, policy=context.shapes)
        self.batches = context.batches(data.train, collate, **sizes, length=example_length)
        self.held_out = context.evaluation_batches(data.heldout, collate, settings, rows=micro, length=example_length)
        self.epoch_steps = len(self.batches)
        self.total_steps = settings.total_steps(self.epoch_steps)
        self._row_counts = RowCounts(len(data.train), context.accelerator)
        self._step = RankStep([])
        (role,) = (role for role, placement in context.placements.items() if placement.role.trained)
        self.engine = context.engine(role, load, settings.optimizer, total_steps=self.total_steps, **sizes)

    @property
    def engines(self) -> dict[str, TrainingEngine]:
        """The model, by the name that checkpoints use."""
        return {"model": self.engine}

    def count(self, batch: Batch) -> Tensor:
        """Return the number of targets in a micro-batch; the loss is a mean over those of the global batch."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch, total: Tensor) -> tuple[Tensor, Batch]:
        """Return a micro-batch's part of the mean over all `total` targets, and sums of statistics."""
        raise NotImplementedError

    def count_wrong_targets(self, batch: Batch, examples: Sequence[Any], real: int) -> int:
        """Count the rows of a micro-batch that would learn other tokens than those of their examples.

        Args:
            batch: a micro-batch on the host.
            examples: its examples; those after the first `real` ones are fillers.
        """
        raise NotImplementedError

    def average(self, sums: Metrics) -> Metrics:
        """Return a step's metrics, given the sums of `loss` over all ranks."""
        return sums

    def rescore(self, model: nn.Module, batch: Batch, total: Tensor) -> Batch:
        """Return a micro-batch's part of some metrics, computed by the functions with which PPO scores."""
        raise NotImplementedError

    def prepare(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Add the outputs of other models that `loss` needs to a step's micro-batches, on the device."""
        return batches

    def evaluate(self, when: str) -> EvalResult:
        """Measure the model on the held-out rows."""
        raise NotImplementedError

    def step(self, index: int) -> Metrics:
        """Take one optimizer step on global batch `index`."""
        context, engine = self.context, self.engine
        micro_batches = self.batches.micro_batches(index)
        on_host = [self.batches.collate(rows.examples, rows.real) for rows in micro_batches]
        self._step = RankStep(
            [number for rows in micro_batches for number in rows.numbers], digests={"rows": digest_batches(on_host)}
        )
        wrong = sum(
            self.count_wrong_targets(batch, rows.examples, rows.real)
            for batch, rows in zip(on_host, micro_batches, strict=True)
        )
        batches: Sequence[Batch] = [context.accelerator.to_device(batch) for batch in on_host]
        with context.phases("training"):
            for number, batch in enumerate(batches):
                context.observation.micro_batch = number
                context.observation.report("rows", "", **batch)
            context.observation.micro_batch = -1
            batches = self.prepare(batches)
            # Of the whole global batch: the loss is a mean over it, however rows are split.
            total = distributed.all_sum(torch.stack([self.count(batch) for batch in batches]).sum().float())
            rescored = self._rescore_batch(batches, total) if index == 0 else {}
            rates = engine.rates
            sums = engine.step(batches, lambda model, batch: self.loss(model, batch, total))
        for batch in batches:
            sums.add(**text_sums(batch), **count_padding(batch))
        sums.add(wrong_targets=context.accelerator.to_device(torch.tensor(float(wrong))))
        totals = sums.read()
        checks = {"wrong_targets": totals.pop("wrong_targets"), **self._count_rows(index, micro_batches)}
        texts = TextLengths(*(totals.pop(f"read_{name}") for name in TextLengths._fields))
        flops = None if context.model_flops is None else self.flops(texts, [*context.model_flops.values()])
        context.phases.count_work("training", tokens=texts.tokens, flops=flops)
        share = padding_share({key: totals.pop(key) for key in ("present", "positions")})
        metrics = self.average(totals)
        if rescored:
            gaps = [abs(metrics[name] - value) / max(abs(value), 1.0) for name, value in rescored.items()]
            metrics["score_gap"] = max(gaps)
        return metrics | checks | rates | {"padding_share": share, "grad_norm": engine.grad_norm()}

    def _count_rows(self, index: int, micro_batches: Sequence[MicroBatchRows]) -> Metrics:
        """Count the rows of a step; return those repeated so far after the first step, an epoch, and the last step."""
        if index % self.epoch_steps == 0:
            self._row_counts.start_epoch()
        for rows in micro_batches:
            self._row_counts.add(rows.numbers)
        ends = (index + 1) % self.epoch_steps == 0 or index + 1 == self.total_steps
        return self._row_counts.compare() if index == 0 or ends else {}

    @torch.no_grad()
    def _rescore_batch(self, batches: Sequence[Batch], total: Tensor) -> Metrics:
        """Return metrics of a batch, computed as PPO scores; none if training passes draw at random."""
        if is_stochastic(self.engine.module):
            return {}
        self.engine.engine.eval()
        sums = MetricSums()
        for batch in batches:
            with self.context.precision.autocast():
                sums.add(**self.rescore(self.engine.engine, batch, total.clamp_min(1)))
            self.context.accelerator.step_boundary(f"{self.context.directory.name}/rescore")
        return sums.read()

    @torch.no_grad()
    def sum_over_heldout(
        self, description: str, statistics: Callable[[nn.Module, Batch], dict[str, Tensor]]
    ) -> Metrics:
        """Return the sums of `statistics(model, batch)` over all held-out batches; show `description` meanwhile."""
        context, sums = self.context, MetricSums()
        self.engine.engine.eval()
        for _, batches in context.evaluate_batches(self.held_out, description):
            for batch in batches:
                with context.precision.autocast():
                    batch_sums = statistics(self.engine.engine, batch)
                context.accelerator.step_boundary(f"{context.directory.name}/evaluate")
                sums.add(**batch_sums)
        return sums.read()

    def describe_step(self) -> RankStep:
        """Return the rows of the last step."""
        return self._step

    def repeat_scoring(self) -> Iterator[tuple[Any, Callable[[], object]]]:
        """Yield nothing: rows are not scored before the update."""
        yield from ()

    def save(self, folder: Path) -> None:
        """Save the model."""
        save_outputs(self.context, self.engine, self.tokenizer, folder)

    def summarize(self) -> dict[str, Any]:
        """Log what was saved and return the summary's entries about the model and the data."""
        log_outputs(self.context, self.engine)
        return {"parameters": self.engine.parameter_counts, **self.data.summary}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs in addition to the engine: nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""

    def flops(self, texts: TextLengths, models: Sequence[ModelFlops]) -> float:
        """Return the FLOPs of an update on these texts.

        Args:
            texts: lengths of the texts.
            models: the trained model, and those that only score.
        """
        return models[0].update(texts)


def text_sums(batch: Batch) -> Batch:
    """Return the sums of `TextLengths` over a batch's real rows, with the prefix `read_`."""
    real = batch["loss_mask"].any(1) if "loss_mask" in batch else batch["pair_mask"].repeat(2)
    lengths = batch["attention_mask"].sum(1) * real
    targets = batch.get("loss_mask", batch.get("completion_mask"))  # a scalar head is read at every token
    outputs = lengths if targets is None else targets.sum(1) * real
    return {"read_tokens": lengths.sum(), "read_pairs": (lengths**2).sum(), "read_outputs": outputs.sum()}


class SFTTrainer(SupervisedTrainer):
    """A causal language model that learns demonstrations; evaluated by its perplexity."""

    unit = "tokens"
    displayed = ("loss",)

    def __init__(self, context: StageContext, models: ModelFactory, tokenizer: Any, data: StageData) -> None:
        collate = partial(collate_sft, maximum=context.config.data.max_length, loss_on=context.config.sft.loss_on)
        super().__init__(context, models.causal_lm, tokenizer, collate, data)
        self.samples = GreedySamples(self.engine, context, tokenizer, data.heldout)

    def count(self, batch: Batch) -> Tensor:
        """Return the number of target tokens."""
        return batch["loss_mask"][:, 1:].sum()

    def count_wrong_targets(self, batch: Batch, examples: Sequence[Demonstration], real: int) -> int:
        """Count the rows whose targets are not exactly their completion, or all tokens but the first."""
        loss_on_prompts = self.context.config.sft.loss_on == "all"
        expected = [
            row.completion_ids if row.prompt_ids and not loss_on_prompts else [*row.prompt_ids, *row.completion_ids][1:]
            for row in examples[:real]
        ]
        expected += [[] for _ in examples[real:]]
        mask = batch["loss_mask"]
        if "targets" in batch:  # which the loss reads instead
            mask = torch.zeros_like(mask).flatten().index_fill(0, batch["targets"], True).view_as(mask)
        return count_different_rows(batch["input_ids"], mask, expected)

    def loss(self, model: nn.Module, batch: Batch, total: Tensor) -> tuple[Tensor, Batch]:
        """Return a part of the mean negative log-likelihood per target token, and the tokens of real rows."""
        tokens = (batch["attention_mask"] * batch["loss_mask"].any(-1, keepdim=True)).sum()
        likelihood = negative_log_likelihood(model, batch, self.context.observation)
        return likelihood / total.clamp_min(1), {"tokens": tokens}

    def rescore(self, model: nn.Module, batch: Batch, total: Tensor) -> Batch:
        """Return a part of the loss."""
        ids, mask = batch["input_ids"], batch["attention_mask"]
        log_probs = completion_log_probs(model, ids, mask, ids.shape[1] - 1).log_probs
        return {"loss": -masked(log_probs, batch["loss_mask"][:, 1:]).sum() / total}

    def evaluate(self, when: str) -> EvalResult:
        """Return the perplexity: exp of the mean negative log-likelihood per target token of the held-out rows.

        The greedy completions of the first held-out prompts belong to the result.
        """

        def statistics(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            return {"nll": negative_log_likelihood(model, batch), "targets": self.count(batch)}

        sums = self.sum_over_heldout(f"perplexity {when}", statistics)
        ended, samples = self.samples.complete()
        return EvalResult({"perplexity": perplexity(sums["nll"] / max(sums["targets"], 1))} | ended, samples)


def count_different_rows(ids: Tensor, mask: Tensor, expected: Sequence[Sequence[int]]) -> int:
    """Count the rows whose tokens under `mask`, [B, T] like `ids`, are not the `expected` ones."""
    return sum(row[targets].tolist() != list(right) for row, targets, right in zip(ids, mask, expected, strict=True))


def negative_log_likelihood(model: nn.Module, batch: Batch, observation: ObservationPoint | None = None) -> Tensor:
    """Return the sum over the target tokens of a batch (`loss_mask` [B, T] marks them): a scalar, in nats.

    If the batch has the targets' indices (`targets`), only the positions that predict them have logits.
    """
    ids, mask, targets = batch["input_ids"], batch["attention_mask"], batch.get("targets")
    if targets is None:
        log_probs = completion_log_probs(model, ids, mask, ids.shape[1] - 1).log_probs
        log_probs = masked(log_probs, batch["loss_mask"][:, 1:])
    else:
        labels = ids.flatten().index_select(0, targets)
        inputs, tokens = in_one_row(model, model_inputs(model, ids, mask), mask)
        places = targets - 1
        if tokens is not None:
            places = tokens.numbers.index_select(0, places)
        log_probs = compute_log_probs(model, inputs, labels, places=places).log_probs
    if observation:
        observation.report("scores", "sft", log_probs=log_probs)
    return -log_probs.sum()


class RewardTrainer(SupervisedTrainer):
    """A model with a scalar head that learns preferences; evaluated by its accuracy and its mean scores."""

    unit = "pairs"
    displayed = ("loss", "accuracy")

    def __init__(self, context: StageContext, models: ModelFactory, tokenizer: Any, data: StageData) -> None:
        collate = partial(collate_reward, maximum=context.config.data.max_length)
        super().__init__(context, models.scalar_head, tokenizer, collate, data)

    def count(self, batch: Batch) -> Tensor:
        """Return the number of real pairs."""
        return batch["pair_mask"].sum()

    def count_wrong_targets(self, batch: Batch, examples: Sequence[Pair], real: int) -> int:
        """Count the rows that are not exactly a prompt and its reply."""
        rows = [pair.prompt_ids + pair.chosen_ids for pair in examples]
        rows += [pair.prompt_ids + pair.rejected_ids for pair in examples]
        return count_different_rows(batch["input_ids"], batch["attention_mask"].bool(), rows)

    def loss(self, model: nn.Module, batch: Batch, total: Tensor) -> tuple[Tensor, Batch]:
        """Return a part of the mean pairwise loss, and the statistics of the pairs."""
        result = pair_loss(model, batch, self.context.config.reward, total)
        scores = {"chosen_scores": result.chosen_scores, "rejected_scores": result.rejected_scores}
        self.context.observation.report("scores", "reward", **scores)
        return result.loss, pair_sums(result, batch)

    def average(self, sums: Metrics) -> Metrics:
        """Return the means of `pair_sums`, and the margin."""
        return pair_means(sums)

    def rescore(self, model: nn.Module, batch: Batch, total: Tensor) -> Batch:
        """Return parts of the mean scores."""
        scores = sequence_scores(model, batch["input_ids"], batch["attention_mask"])
        return mean_by_reply(scores, batch, total, "score")

    def evaluate(self, when: str) -> EvalResult:
        """Return loss, accuracy and mean scores on the held-out pairs."""
        columns: list[Tensor] = []

        def statistics(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            result = pair_loss(model, batch, self.context.config.reward)
            columns.append(pair_columns(result, batch))
            return pair_sums(result, batch) | {"loss": (result.losses * batch["pair_mask"]).sum()}

        sums = self.sum_over_heldout(f"accuracy {when}", statistics)
        numbers = pair_means(sums) | {"loss": sums["loss"] / max(sums["pairs"], 1)}
        return EvalResult(
            {key: numbers[key] for key in ("accuracy", "chosen_score", "rejected_score", "margin", "loss")},
            rows=[row for share in distributed.all_gather_objects(pair_rows(columns)) for row in share],
        )

    def summarize(self) -> dict[str, Any]:
        """Log what was saved, and whether plain transformers can load it; return the summary's entries."""
        summary = super().summarize()
        if line := describe_loading(self.engine.module.model, self.context.directory.model):
            self.context.say(f"note: {line}")
        return summary


def mean_by_reply(values: Tensor, batch: Batch, total: Tensor, name: str) -> Batch:
    """Return sums of `values` [2B] over the chosen and the rejected replies of the real pairs, divided by `total`."""
    sums = (masked(part, batch["pair_mask"]).sum() / total for part in values.chunk(2))
    return dict(zip((f"chosen_{name}", f"rejected_{name}"), sums))


def pair_loss(model: nn.Module, batch: Batch, settings: RewardConfig, total: Tensor | None = None) -> PairwiseLoss:
    """Return the pairwise loss of one micro-batch; `total` is the number of pairs of the global batch."""
    mask = batch["attention_mask"]
    # The loss of all tokens also reads padding of the shorter reply.
    read = mask if settings.loss == "last" else torch.maximum(*mask.chunk(2)).repeat(2, 1)
    scores = model(batch["input_ids"], mask, read)
    return pairwise_reward_loss(
        scores,
        batch["input_ids"],
        mask,
        compared=settings.loss,
        margins=batch["margins"] + settings.margin,
        center=settings.center,
        pair_mask=batch["pair_mask"],
        total=total,
    )


def pair_sums(result: PairwiseLoss, batch: Batch) -> dict[str, Tensor]:
    """Return sums over the real pairs of a micro-batch, for `pair_means` to divide."""
    mask = batch["pair_mask"]
    return {
        "pairs": mask.sum(),
        "accuracy": ((result.chosen_scores > result.rejected_scores) * mask).sum(),
        "chosen_score": (result.chosen_scores * mask).sum(),
        "rejected_score": (result.rejected_scores * mask).sum(),
    }


def pair_columns(result: PairwiseLoss, batch: Batch) -> Tensor:
    """Return the numbers of a micro-batch's pairs for `pair_rows`, [B, 5], on the device."""
    chosen_tokens, rejected_tokens = batch["attention_mask"].sum(1).chunk(2)
    scores = result.chosen_scores, result.rejected_scores
    return torch.stack([*scores, chosen_tokens, rejected_tokens, batch["pair_mask"]], 1)


def pair_rows(columns: Sequence[Tensor]) -> list[dict[str, float]]:
    """Return the scores and the tokens (prompt and reply) of the two replies of each real pair, to six digits."""
    names = ("chosen", "rejected", "chosen_tokens", "rejected_tokens")
    return [
        {name: float(f"{number:.6g}") for name, number in zip(names, numbers)}
        for part in columns
        for *numbers, is_real in part.tolist()
        if is_real
    ]


def pair_means(sums: Metrics) -> Metrics:
    """Return the means over pairs of `pair_sums`, and their margin; other numbers stay."""
    pairs = max(sums["pairs"], 1)
    means = {key: sums[key] / pairs for key in ("accuracy", "chosen_score", "rejected_score")}
    return sums | means | {"margin": means["chosen_score"] - means["rejected_score"]}
