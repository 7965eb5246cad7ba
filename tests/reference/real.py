"""Runs of the real stages: `fit` with the trainers of all stages, their engines, batches and records.

`supervised`, `reinforced` and `distilled` take models and settings of `cases` and return what the run left.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from accelerators import Accelerator, ShapePolicy
from rlhf.config.schema import Config
from rlhf.data import pretraining
from rlhf.data.stage_dataset import StageData
from rlhf.engine import distributed
from rlhf.engine.engine import TrainingEngine
from rlhf.models import loading
from rlhf.models.quantized import find_quantized_layers, unpack_weight
from rlhf.reporting.recorder import Recorder
from rlhf.runs.directory import RunDirectory
from rlhf.runs.stage_directory import StageDirectory
from rlhf.trainers.context import StageContext
from rlhf.trainers.distill import DistillTrainer
from rlhf.trainers.dpo import DPOTrainer
from rlhf.trainers.loop import fit
from rlhf.trainers.ppo.trainer import PPOTrainer
from rlhf.trainers.supervised import RewardTrainer, SFTTrainer
from tests.helpers import weights
from tests.in_process import GivenModels, ppo_models
from tests.reference.cases import DOCUMENTS, Models, Outcome, Rollout, Sequence, Tokenizer, Weights, data
from tests.reference.expected import global_batches, ppo_batch


class StopError(Exception):
    """A process that ends after a step."""


def supervised(
    stage: str, accelerator: Accelerator, config: Config, model: Any, count: int, folder: Path
) -> Outcome | None:
    """A stage with a supervised trainer; what it left is returned on rank 0."""
    kind = {"sft": SFTTrainer, "reward": RewardTrainer, "dpo": DPOTrainer}[stage]
    around = _context(accelerator, config, stage, folder)
    with around.recorder:
        # A model of its own at each call: DPO's reference is one beside the policy.
        models = GivenModels(lambda role: _loaded(model, config))
        summary = fit(kind(around, models, Tokenizer(), data(stage, count)), around)
    if not around.world.is_main:
        return None
    return Outcome(_records(around.directory, "loss"), summary["before"], {"model": weights(around.directory.model)})


def reinforced(
    accelerator: Accelerator,
    config: Config,
    models: Models,
    count: int,
    folder: Path,
    *,
    stop_before: int | None = None,
) -> Outcome:
    """The stage PPO, its rollouts looked at; the same on every rank.

    Raises:
        StopError: after all steps before step `stop_before` (0-based).
    """
    around = _context(accelerator, config, "ppo", folder)
    heldout: list[Sequence] = []
    rollouts: list[Rollout] = []

    class Watched(PPOTrainer):
        def generate(self, prompts: Any, copies: int = 1) -> Any:
            completions = super().generate(prompts, copies)
            if not heldout:
                heldout.extend(_sequences(self, completions.input_ids, completions.completion_length, rows.heldout))
            return completions

        def step(self, index: int, reward_fn: Any = None) -> dict[str, float]:
            if index == stop_before:
                raise StopError
            numbers = super().step(index, reward_fn)
            rollouts.append(_rollout(self, index, ppo_batch(config, rows.train, index)))
            return numbers

    rows = data("ppo", count)
    names = ("actor", "reference", "critic", "reward")
    four = ppo_models(*(_loaded(getattr(models, name), config) for name in names))
    documents = mock.patch.object(pretraining, "read_documents", return_value=DOCUMENTS)
    with documents, around.recorder:
        trainer = Watched(around, four, Tokenizer(), rows)
        summary = fit(trainer, around)
    return Outcome(
        _records(around.directory, "policy_loss"),
        summary["before"],
        {name: _state(engine) for name, engine in trainer.engines.items()} | {"saved": weights(around.directory.model)},
        rollouts,
        heldout,
    )


def distilled(
    accelerator: Accelerator,
    config: Config,
    student: Any,
    teacher: Any,
    count: int,
    folder: Path,
    *,
    stop_before: int | None = None,
) -> Outcome:
    """The stage distill, its rollouts looked at; the same on every rank.

    Raises:
        StopError: after all steps before step `stop_before` (0-based).
    """
    around = _context(accelerator, config, "distill", folder)
    heldout: list[Sequence] = []
    rollouts: list[Rollout] = []
    rows = data("distill", count)
    batches = global_batches(config, config.distill, rows.train)

    class Watched(DistillTrainer):
        index = -1

        def generate(self, prompts: Any) -> Any:
            drawn = super().generate(prompts)
            examples = rows.heldout if self.index < 0 else batches[self.index]
            sequences = _sequences(self, drawn.input_ids, drawn.completion_length, examples)
            if self.index >= 0:
                rollouts.append(Rollout(sequences, []))
            elif not heldout:
                heldout.extend(sequences)
            return drawn

        def step(self, index: int) -> dict[str, float]:
            if index == stop_before:
                raise StopError
            self.index = index
            try:
                return super().step(index)
            finally:
                self.index = -1

    models = {"student": _loaded(student, config), "teacher": _loaded(teacher, config)}
    with around.recorder:
        trainer = Watched(around, GivenModels(models.__getitem__), Tokenizer(), rows)
        summary = fit(trainer, around)
    steps = _records(around.directory, "loss")
    return Outcome(steps, summary["before"], {"model": weights(around.directory.model)}, rollouts, heldout)


def evaluated(
    accelerator: Accelerator, config: Config, models: Models, rows: StageData, folder: Path
) -> tuple[list[tuple[str, str]], dict[tuple[int, ...], list[int]]]:
    """PPO's evaluation before training: the (prompt, completion) pairs that it judges, and this rank's completions."""
    judged: list[tuple[str, str]] = []
    generated: dict[tuple[int, ...], list[int]] = {}

    class Watched(PPOTrainer):
        def generate(self, prompts: Any, copies: int = 1) -> Any:
            completions = super().generate(prompts, copies)
            ends, columns = set(self.decoder.eos_ids.tolist()), completions.completion_length
            for row in completions.input_ids.tolist():
                prompt = tuple(token for token in row[:-columns] if token != Tokenizer.pad_token_id)
                generated.setdefault(prompt, _cut(row[-columns:], ends))  # later rows only fill the batch
            return completions

    def judge(prompt: str, completion: str) -> bool:
        judged.append((prompt, completion))
        return True

    context = _context(accelerator, config, "ppo", folder)
    names = ("actor", "reference", "critic", "reward")
    four = ppo_models(*(_loaded(getattr(models, name), config) for name in names))
    with context.recorder:
        Watched(context, four, Tokenizer(), rows, judge).evaluate("before")
    return judged, generated


def _loaded(model: Any, config: Config) -> Any:
    """A copy of a model as `rlhf.models.loading` hands it over."""
    return model and loading._fit_to_tokenizer(copy.deepcopy(model), Tokenizer())


def _sequences(stage: PPOTrainer | DistillTrainer, ids: Tensor, columns: int, examples: list[Any]) -> list[Sequence]:
    """The real rows of what `generate` returned, of all ranks.

    A completion ends with the first of its end tokens: of the stage's masks nothing is taken over.
    """
    mine = [row[-columns:] for row in ids.tolist()]
    every = [row for share in distributed.all_gather_objects(mine) for row in share]
    ends = set(stage.decoder.eos_ids.tolist())
    return [(example.prompt_ids, _cut(row, ends)) for example, row in zip(examples, every)]


def _rollout(stage: PPOTrainer, index: int, examples: list[Any]) -> Rollout:
    """What chance decided in a step on `examples`, of all ranks; the order of the rows is that of `row_order`."""
    settings, size = stage.settings, stage.context.world.size
    passes = []
    for epoch in range(settings.ppo_epochs):
        generator = stage.row_order(index, epoch)
        share = settings.batch_size // size
        order = list(range(share)) if generator is None else torch.randperm(share, generator=generator).tolist()
        rows = (settings.minibatch_size or settings.batch_size) // size
        # Each rank takes the same places of its own share.
        minibatches = [
            [rank * share + place for rank in range(size) for place in order[start : start + rows]]
            for start in range(0, share, rows)
        ]
        passes.append(minibatches)
    drawn = stage.experience
    return Rollout(_sequences(stage, drawn.input_ids, drawn.completion_length, examples), passes)


def _cut(tokens: list[int], ends: set[int]) -> list[int]:
    """Up to and with the first end token."""
    length = next((number for number, token in enumerate(tokens, 1) if token in ends), len(tokens))
    return tokens[:length]


def _state(engine: TrainingEngine) -> Weights:
    """An engine's weights, under the names that `Network.state` gives them."""
    with engine.whole_weights() as module:
        tensors = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        tensors |= {f"{path}.weight": unpack_weight(layer) for path, layer in find_quantized_layers(module).items()}
    if engine.name == "critic":
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    renamed = {}
    for name, tensor in tensors.items():
        for factor in "AB":
            name = name.replace(f".lora_{factor}.default.weight", f".weight.{factor}")
        renamed[name.replace(".base_layer.", ".")] = tensor
    renamed.pop("lm_head.weight", None)  # tied to the embedding
    return renamed


def _context(accelerator: Accelerator, config: Config, stage: Any, folder: Path) -> StageContext:
    """As `rlhf.trainers.pipeline.run` makes it, in a process in which no engine has been at ZeRO-3."""
    torch.nn.functional.linear = torch._C._nn.linear  # DeepSpeed's would stay, and takes several times as long
    run = RunDirectory(folder)
    place, world = run.stage(stage), distributed.world()
    checkpoint = place.latest_checkpoint
    step = int(checkpoint.name.removeprefix("step-")) if checkpoint else None
    recorder = Recorder(place, enabled=world.is_main, resume_step=step)
    shapes = ShapePolicy(config.engine.shapes)
    return StageContext(config, accelerator, accelerator.precision("fp32"), shapes, world, run, place, recorder)


def _records(place: StageDirectory, key: str) -> list[dict[str, float]]:
    """The lines of metrics.jsonl that hold `key`."""
    lines = [json.loads(line) for line in place.metrics.read_text().splitlines()]
    return [line for line in lines if key in line]
