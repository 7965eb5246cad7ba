"""DPO: prefer the chosen reply of each pair, relative to the initial policy (arXiv:2305.18290).

The policy's implicit reward of a reply is beta log (policy / reference), which needs no reward model. Before its first
step the policy is the reference: it scores every pair that training will use, and no other model is loaded. The scores
are saved in the stage's folder, so that a resumed stage can read them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rlhf.config.schema import DPOConfig
from rlhf.data.batches import Batches, collate_dpo
from rlhf.data.examples import NumberedPair, NumberedPairs
from rlhf.data.stage_dataset import StageData
from rlhf.engine import distributed
from rlhf.engine.cpu_offload import on_device
from rlhf.engine.engine import Batch, Metrics, TrainingEngine
from rlhf.engine.observer import ObservationPoint
from rlhf.losses.dpo import preference_losses, sequence_log_probs
from rlhf.losses.log_probs import masked
from rlhf.models.forward import completion_log_probs
from rlhf.models.lora import without_adapters
from rlhf.models.shape import ModelFlops, TextLengths
from rlhf.reporting.progress import progress
from rlhf.trainers.context import StageContext
from rlhf.trainers.greedy_samples import GreedySamples
from rlhf.trainers.stage_models import ModelFactory
from rlhf.trainers.supervised import SupervisedTrainer, count_different_rows, mean_by_reply
from rlhf.trainers.trainer import EvalResult
from rlhf.utils.atomic_io import atomic_file

MEANS = ("accuracy", "margin", "drift", "chosen_reward", "rejected_reward", "chosen_log_prob", "rejected_log_prob")
"""Metrics that are means over pairs, in training and on held-out rows."""


class DPOTrainer(SupervisedTrainer):
    """A causal language model that learns preferences directly; evaluated by loss, accuracy and implicit rewards."""

    unit = "pairs"
    displayed = ("loss", "accuracy", "margin")

    def __init__(self, context: StageContext, models: ModelFactory, tokenizer: Any, data: StageData) -> None:
        limits = context.config.data
        collate = partial(collate_dpo, prompt=limits.max_prompt_length, completion=limits.max_completion_length)
        train, heldout = NumberedPairs(data.train), NumberedPairs(data.heldout, len(data.train))
        super().__init__(context, models.causal_lm, tokenizer, collate, replace(data, train=train, heldout=heldout))
        self.samples = GreedySamples(self.engine, context, tokenizer, data.heldout)
        self.reference: LiveReference | PrecomputedReference
        if context.config.dpo.reference == "beside":
            model = context.frozen("reference", models.causal_lm) if "reference" in context.placements else None
            self.reference = LiveReference(context, self.engine, model)
        else:
            ranges = [
                BatchRange(self.batches, min(self.total_steps, len(self.batches))),
                BatchRange(self.held_out, len(self.held_out)),
            ]
            self.reference = PrecomputedReference(context, self.engine, ranges, len(train) + len(heldout))

    def count(self, batch: Batch) -> Tensor:
        """Return the number of real pairs."""
        return batch["pair_mask"].sum()

    def count_wrong_targets(self, batch: Batch, examples: Sequence[NumberedPair], real: int) -> int:
        """Count the rows whose targets are not exactly their reply."""
        mask = batch["completion_mask"]
        replies = [pair.chosen_ids for pair in examples] + [pair.rejected_ids for pair in examples]
        return count_different_rows(batch["input_ids"][:, -mask.shape[1] :], mask, replies)

    def prepare(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Add the reference's log-probabilities."""
        return self.reference.add_to(batches)

    def loss(self, model: nn.Module, batch: Batch, total: Tensor) -> tuple[Tensor, Batch]:
        """Return a part of the mean loss over pairs, and the statistics of the pairs."""
        losses, sums = preference_sums(model, batch, self.context.config.dpo, self.context.observation)
        return losses / total.clamp_min(1), sums

    def flops(self, texts: TextLengths, models: Sequence[ModelFlops]) -> float:
        """Return the FLOPs of an update on these texts, and of a live reference's forward pass if there is one."""
        if self.context.config.dpo.reference != "beside":
            return super().flops(texts, models)
        reference = models[1] if len(models) > 1 else replace(models[0], adapters=0)
        return super().flops(texts, models) + reference.forward(texts)

    def average(self, sums: Metrics) -> Metrics:
        """Return the means of `preference_sums`."""
        return preference_means(sums)

    def rescore(self, model: nn.Module, batch: Batch, total: Tensor) -> Batch:
        """Return parts of the mean log-probabilities of replies, from those of whole rows."""
        ids, mask = batch["input_ids"], batch["completion_mask"]
        tokens = completion_log_probs(model, ids, batch["attention_mask"], ids.shape[1] - 1).log_probs
        return mean_by_reply(masked(tokens[:, -mask.shape[1] :], mask).sum(1), batch, total, "log_prob")

    def evaluate(self, when: str) -> EvalResult:
        """Return the mean loss of the held-out pairs, the means of `MEANS`, and greedy completions as in SFT."""

        def statistics(model: nn.Module, batch: Batch) -> Batch:
            (batch,) = self.prepare([batch])
            losses, sums = preference_sums(model, batch, self.context.config.dpo)
            return sums | {"loss": losses}

        sums = self.sum_over_heldout(f"preferences {when}", statistics)
        means = preference_means(sums)
        ended, samples = self.samples.complete()
        numbers = {"loss": sums["loss"] / max(sums["pairs"], 1)} | {key: means[key] for key in MEANS}
        return EvalResult(numbers | ended, samples)


def preference_sums(
    model: nn.Module, batch: Batch, settings: DPOConfig, observation: ObservationPoint | None = None
) -> tuple[Tensor, Batch]:
    """Return (loss, statistics), both summed over the real pairs of a batch that has its `reference`."""
    log_probs, mask = reply_log_probs(model, batch), batch["pair_mask"]
    if observation:
        observation.report("scores", "dpo", log_probs=log_probs, reference=batch["reference"])
    chosen, rejected = (log_probs - batch["reference"]).chunk(2)
    losses = preference_losses(
        chosen - rejected, loss=settings.loss, beta=settings.beta, label_smoothing=settings.label_smoothing
    )
    of_pairs = {
        "pairs": mask,
        # A tie counts half: before the first step, all are ties.
        "accuracy": ((chosen - rejected).sign() + 1) / 2,
        "margin": settings.beta * (chosen - rejected),
        "drift": (chosen + rejected) / 2,
        "chosen_reward": settings.beta * chosen,
        "rejected_reward": settings.beta * rejected,
        "chosen_log_prob": log_probs.chunk(2)[0],
        "rejected_log_prob": log_probs.chunk(2)[1],
    }
    return (losses * mask).sum(), {key: (value.detach() * mask).sum() for key, value in of_pairs.items()}


def preference_means(sums: Metrics) -> Metrics:
    """Return the means over pairs of `preference_sums`; other numbers stay."""
    pairs = max(sums["pairs"], 1)
    return sums | {key: sums[key] / pairs for key in MEANS}


FILE = "reference.safetensors"


class BatchRange(NamedTuple):
    """The first `steps` batches of `rlhf.data.batches.collate_dpo`."""

    batches: Batches[NumberedPair]
    steps: int

    @property
    def numbers(self) -> list[int]:
        """The numbers of the pairs in these batches."""
        return [example.number for step in range(self.steps) for example in self.batches.examples(step)]


def reply_log_probs(model: nn.Module, batch: Batch) -> Tensor:
    """Return the log-probabilities of a batch's replies, in nats: [2B], one for each row."""
    mask = batch["completion_mask"]
    tokens = completion_log_probs(model, batch["input_ids"], batch["attention_mask"], mask.shape[1])
    return sequence_log_probs(tokens.log_probs, mask)


class PrecomputedReference:
    """The policy's log-probabilities of all pairs, computed before its first step."""

    def __init__(self, context: StageContext, policy: TrainingEngine, ranges: Sequence[BatchRange], pairs: int) -> None:
        """Read the table of log-probabilities, or compute it; every rank takes part.

        The table has a row for each of `pairs` in the data; those in `ranges` are used in training and evaluation.
        """
        table = _read_table(context, [number for batches in ranges for number in batches.numbers], pairs)
        if table is None:
            table = _compute_table(context, policy, ranges, pairs)
            _write_table(context, table)
        self._table = table.to(context.accelerator.device())

    def add_to(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the batches, each with `reference` [2B]: log-probabilities of its rows' replies."""
        return [batch | {"reference": self._table[batch["number"]].T.reshape(-1)} for batch in batches]


class LiveReference:
    """A second model, or with LoRA the policy without its adapters."""

    def __init__(self, context: StageContext, policy: TrainingEngine, model: nn.Module | None) -> None:
        self._policy, self._model = policy, model
        self._precision, self._boundary = context.precision, context.accelerator.step_boundary

    @torch.no_grad()
    def add_to(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the batches as `PrecomputedReference` does."""
        if self._model is None:
            self._policy.engine.eval()
            with without_adapters(self._policy.module):
                return [self._score(self._policy.engine, batch) for batch in batches]
        with on_device(self._model):
            return [self._score(self._model, batch) for batch in batches]

    def _score(self, model: nn.Module, batch: Batch) -> Batch:
        with self._precision.autocast():
            log_probs = reply_log_probs(model, batch)
        self._boundary("dpo/reference")
        return batch | {"reference": log_probs}


@torch.no_grad()
def _compute_table(context: StageContext, policy: TrainingEngine, ranges: Sequence[BatchRange], pairs: int) -> Tensor:
    """Return the log-probabilities of the chosen and the rejected replies, [pairs, 2]; NaN for pairs in no batch."""
    policy.engine.eval()
    table, visits = (torch.zeros(pairs, columns, device=context.accelerator.device()) for columns in (2, 1))
    rows = sum(len(batches.numbers) for batches in ranges)
    bars = progress(rows, "dpo: reference log-probabilities", enabled=context.world.is_main)
    with context.phases.running("scoring"), bars as bar:
        for batches, step in ((batches, step) for batches, steps in ranges for step in range(steps)):
            for batch in map(context.accelerator.to_device, batches.step(step)):
                with context.precision.autocast():
                    log_probs = reply_log_probs(policy.engine, batch).view(2, -1).T
                real = batch["pair_mask"][:, None]
                table.index_add_(0, batch["number"], masked(log_probs, real))
                visits.index_add_(0, batch["number"], real.float())
                context.accelerator.step_boundary("dpo/reference")
            bar.advance(len(batches.examples(step)))
    # Each rank has scored its own share.
    return torch.where(distributed.all_sum(visits) > 0, distributed.all_sum(table), torch.nan)


def _read_table(context: StageContext, numbers: Sequence[int], pairs: int) -> Tensor | None:
    """Read the table of an earlier process; None if the stage does not resume, or the table lacks some `numbers`.

    None also for a damaged table, with a line.
    """
    path, table = context.directory.path / FILE, None
    with distributed.on_main(f"reading {path}") as main:
        if main and context.directory.latest_checkpoint and path.is_file():
            table = _load_table(path)
            if table is None:
                context.say(f"note: {path} is damaged; the reference's log-probabilities are computed again")
            # The stage may be trained for longer now.
            if table is not None and (table.shape[0] != pairs or table[numbers].isnan().any()):
                table = None
    return distributed.all_gather_objects(table)[0]


def _write_table(context: StageContext, table: Tensor) -> None:
    path = context.directory.path / FILE
    with distributed.on_main(f"writing {path}") as main:
        if main:
            with atomic_file(path) as temporary:
                table = table.to(context.accelerator.host_device())
                save_file({"log_probs": table}, temporary, metadata={"sha256": _hash_table(table)})


def _load_table(path: Path) -> Tensor | None:
    """Return the table in a file; None if the file is damaged: it can be computed again."""
    try:
        with safe_open(path, "pt") as file:
            table: Tensor = file.get_tensor("log_probs")
            return table if (file.metadata() or {}).get("sha256") == _hash_table(table) else None
    except SafetensorError:
        return None


def _hash_table(table: Tensor) -> str:
    return hashlib.sha256(table.contiguous().numpy().tobytes()).hexdigest()
