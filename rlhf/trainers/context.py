"""The context of a stage: settings, hardware, rank, folders, and the loaded models."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from rlhf.config.schema import Config, OptimizerConfig, TrainingConfig
from rlhf.data.batches import Batches
from rlhf.engine import distributed
from rlhf.engine.engine import TrainingEngine, freeze_model, recompute_in_parts
from rlhf.engine.observer import ObservationPoint
from rlhf.errors import ConfigError
from rlhf.models.dropout import set_dropout
from rlhf.models.forward import ScalarHead
from rlhf.models.lora import add_adapters, should_merge
from rlhf.models.quantized import count_quantized, quantize
from rlhf.models.shape import ModelFlops, Shape, shape_from
from rlhf.models.shared_base import SharedBase
from rlhf.reporting.console import console
from rlhf.reporting.health import HealthMonitor, HealthWarning
from rlhf.reporting.progress import progress
from rlhf.reporting.recorder import Recorder
from rlhf.reporting.timers import PhaseTimers
from rlhf.roles.roles import ModelPlacement, RoleName, model_placements
from rlhf.trainers.weight_samples import WeightSamples

if TYPE_CHECKING:
    from accelerators import Accelerator, Precision, ShapePolicy
    from rlhf.runs.directory import RunDirectory
    from rlhf.runs.stage_directory import StageDirectory


ModelLoader = Callable[[RoleName], Any]
"""Loads a role's model; see `rlhf.trainers.stage_models.ModelFactory`."""


class Clock:
    """Clock of a stage; `earlier` is the time of earlier processes, from which it resumes."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.earlier = 0.0

    def seconds(self) -> float:
        """Return the seconds spent on the stage, in all processes."""
        return self.earlier + time.perf_counter() - self._start


@dataclass(frozen=True)
class StageContext:
    """The settings, hardware, rank and folders of a stage, and its loaded models."""

    config: Config
    accelerator: Accelerator
    precision: Precision
    shapes: ShapePolicy
    world: distributed.World
    run: RunDirectory
    directory: StageDirectory
    recorder: Recorder
    clock: Clock = field(default_factory=Clock)
    models: dict[str, TrainingEngine | nn.Module] = field(default_factory=dict)
    """Loaded models by role: engines of trained ones, modules of frozen ones."""
    bases: dict[str, SharedBase] = field(default_factory=dict)
    """Frozen weights of models trained with LoRA, by role, which other models may share."""

    left_out: list[int] = field(default_factory=list)
    """Steps that were left out because numbers were not finite."""

    observation: ObservationPoint = field(default_factory=ObservationPoint)
    """Where steps report their tensors; `observation.observer` receives them."""

    exits: ExitStack = field(default_factory=ExitStack)
    """What ends with the stage, and with an error too."""

    def say(self, line: str) -> None:
        """Print a line on rank 0."""
        if self.world.is_main:
            console.print(line, markup=False, soft_wrap=True)

    def warn(self, step: int, warnings: Sequence[HealthWarning], tag: str = "warning") -> None:
        """Print and record warnings of the health monitor."""
        for warning in warnings:
            with console.loudly():
                self.say(f"{self.directory.name}: warning: {warning.line}")
            values = {"rule": warning.rule.name, "state": warning.state, "remedy": warning.remedy}
            self.recorder.text(tag, step, warning.line, values)

    def commit(self) -> None:
        """Delete the backup of the stage that this one replaces, once it has a first result."""
        if self.world.is_main:
            self.run.commit(self.directory)

    @cached_property
    def placements(self) -> dict[RoleName, ModelPlacement]:
        """The placements of the stage's models, by role."""
        return model_placements(self.config, self.directory.name)

    @cached_property
    def weight_samples(self) -> WeightSamples:
        """Samples of all loaded models, taken when this is first read."""
        return WeightSamples(self.models, self.accelerator)

    @cached_property
    def phases(self) -> PhaseTimers:
        """Timers of the stage's phases."""
        return PhaseTimers(self.accelerator, self.precision, self.world.size)

    @cached_property
    def health(self) -> HealthMonitor:
        """The rules that detect when the stage goes wrong."""
        return HealthMonitor(self.config, self.directory.name, precision=self.precision.name)

    def configuration(self, name: RoleName) -> Any:
        """Return the transformers configuration of a role's loaded model; None if it has none."""
        model: Any = getattr(self.models[name], "module", self.models[name])  # under DeepSpeed
        return getattr(model.model if isinstance(model, ScalarHead) else model, "config", None)

    def shape(self, name: RoleName) -> Shape:
        """Return the shape of a role's loaded model.

        Raises:
            ConfigError: the shape is not known.
        """
        config = self.configuration(name)
        return shape_from(config.to_dict() if config else {}, name)

    @cached_property
    def model_flops(self) -> dict[RoleName, ModelFlops] | None:
        """Counters of the FLOPs of models in steps, after all are loaded; None if a model's shape is not known."""
        counters: dict[RoleName, ModelFlops] = {}
        for name, placement in self.placements.items():
            if not placement.role.in_steps:
                continue
            try:
                shape = self.shape(name)
            except ConfigError:
                return None
            counters[name] = ModelFlops.of(shape, scalar_head=placement.role.scalar_head, rank=placement.lora.rank)
        return counters

    def engine(
        self,
        name: RoleName,
        load: ModelLoader,
        optimizer: OptimizerConfig,
        *,
        total_steps: int,
        batch_size: int,
        micro_batch_size: int,
        extra_micro_batches: int = 0,
    ) -> TrainingEngine:
        """Load the role's model and return its training engine, for batches of `batch_size` rows.

        Each optimizer step on a rank also has `extra_micro_batches`.

        Raises:
            RLHFError: the model cannot be loaded, or has no layers that `lora` could adapt.
        """
        placement = self.placements[name]
        lora, model = placement.lora, self._load(placement, load)
        if placement.dropout is not None:
            set_dropout(model, placement.dropout)
        if placement.gradient_checkpointing:
            options = {"use_reentrant": False, **recompute_in_parts(self.accelerator)}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        if lora.rank:
            add_adapters(model, lora, seed=self.config.seed)
            if self.directory.name in ("ppo", "distill") and lora.share_base is not False and placement.zero_stage < 3:
                self.bases[name] = SharedBase(model)
        with self.phases.running("set-up"):
            engine = self.models[name] = TrainingEngine(
                name,
                ScalarHead(model) if placement.role.scalar_head else model,
                accelerator=self.accelerator,
                precision=self.precision,
                placement=placement,
                optimizer=optimizer,
                total_steps=total_steps,
                micro_batch_size=micro_batch_size,
                accumulation=batch_size // (micro_batch_size * self.world.size) + extra_micro_batches,
                observation=self.observation,
            )
        if lora.rank:
            trainable, total = engine.parameter_counts["trainable"], engine.parameter_counts["all"]
            self.say(f"{name}: LoRA of rank {lora.rank} trains {trainable:,} of {total:,} parameters")
            merged, why = should_merge(model, lora, self.accelerator.memory().total)
            if name == "actor" and not merged and why:
                self.say(f"{name}: rollouts apply the adapters separately from the weights: {why}")
        return engine

    def frozen(self, name: RoleName, load: ModelLoader) -> nn.Module:
        """Load the role's model for scoring only; see `freeze_model`."""
        placement = self.placements[name]
        model = self._load(placement, load)
        shared = self._shares_base(model)
        if placement.offloads_parameters and shared:
            if self.accelerator.host_device() != self.accelerator.device():
                self.say(f"{name}: its weights stay on the device, because a model that is trained shares them")
            placement = replace(placement, engine=placement.engine.model_copy(update={"offload": "none"}))
        with self.phases.running("set-up"):
            self.models[name] = freeze_model(
                ScalarHead(model) if placement.role.scalar_head else model,
                accelerator=self.accelerator,
                precision=self.precision,
                placement=placement,
                shared=shared,
            )
        return cast(nn.Module, self.models[name])

    def _load(self, placement: ModelPlacement, load: ModelLoader) -> Any:
        """Load a role's model, and quantize its frozen weights if the placement says so."""
        with self.phases.running("loading"):
            model = load(placement.role.name)
        if kind := placement.quantization:
            packing = self.accelerator.kernels.get("quantized_weights", required=True)
            # Weights that `load` has not quantized.
            quantize(model, kind, packing, exported=placement.role.trained, sharded=placement.zero_stage == 3)
            if not self._shares_base(model):  # the line about the shared base covers it
                self.say(
                    f"{placement.role.name}: the {count_quantized(model):,} frozen weights of its linear layers "
                    f"are in {kind}"
                )
        return model

    def _shares_base(self, model: nn.Module) -> bool:
        """Return whether a model shares weights with one that is trained."""
        trained = {id(parameter) for base in self.bases.values() for parameter in base.model.parameters()}
        return any(id(parameter) in trained for parameter in model.parameters())

    def batches(
        self, examples: Sequence[Any], collate: Any, *, batch_size: int, micro_batch_size: int, **options: Any
    ) -> Batches[Any]:
        """Return this rank's share of the global batches over `examples`."""
        return Batches(
            examples,
            collate,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            rank=self.world.rank,
            world_size=self.world.size,
            seed=self.config.seed,
            **options,
        )

    def evaluation_batches(
        self, examples: Sequence[Any], collate: Any, training: TrainingConfig, rows: int, **options: Any
    ) -> Batches[Any]:
        """Return batches over the first `eval_rows` held-out examples, in order, with `rows` rows per rank."""
        size, examples = rows * self.world.size, examples[: training.eval_rows]
        self.health.heldout_rows = len(examples)
        return self.batches(examples, collate, batch_size=size, micro_batch_size=rows, shuffle=False, **options)

    def evaluate_batches(self, batches: Batches[Any], description: str) -> Iterator[tuple[int, Iterator[Any]]]:
        """Yield the index and the micro-batches of each global batch, on the device; show `description` meanwhile.

        The time until all batches are consumed counts as evaluation.
        """
        bars = progress(batches.rows, f"{self.directory.name}: {description}", enabled=self.world.is_main)
        with self.phases.running("evaluation"), bars as bar:
            for index in range(len(batches)):
                yield index, map(self.accelerator.to_device, batches.step(index))
                bar.advance(len(batches.examples(index)))
