"""A model under DeepSpeed: trained (`TrainingEngine`, with AdamW and its schedule) or frozen (`freeze_model`).

The engine turns a list of micro-batches and a loss into one optimizer step. Losses arrive divided by the totals of the
global batch, so the gradient is a sum over micro-batches and ranks and does not depend on how rows are split.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import deepspeed
import torch
from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor, nn

from rlhf.config.schema import LoraConfig, OptimizerConfig
from rlhf.engine import deepspeed_patches as patches
from rlhf.engine import distributed
from rlhf.engine.cpu_offload import offload
from rlhf.engine.deepspeed_config import build_deepspeed_config
from rlhf.engine.fp32_weights import keep_precision, restore_precision
from rlhf.engine.observer import ObservationPoint, whole_gradients, whole_weights
from rlhf.models import quantized
from rlhf.models.loading import place_buffers, place_model, place_parameters
from rlhf.models.lora import find_adapted_layers
from rlhf.models.weight_loading import clear_sources, is_sharded
from rlhf.reporting import verbosity
from rlhf.roles.roles import ModelPlacement

if TYPE_CHECKING:
    from accelerators import Accelerator, Precision
    from rlhf.engine.fp32_weights import EMA

Batch = dict[str, Tensor]

Metrics = dict[str, float]
"""Numbers of a step or an evaluation, by the names under which they are recorded."""

Loss = Callable[[nn.Module, Any], tuple[Tensor, dict[str, Tensor]]]
"""(model, micro-batch) -> (its part of the global loss, statistics that are summed over micro-batches and ranks)."""

ADAPTERS_FACTOR = 10.0
"""Adapters learn at this multiple of the stage's rate, unless `lora.learning_rate` is set: they start at zero, and
their few parameters must produce the change that full fine-tuning spreads over all weights."""

# DeepSpeed 0.19 calls collectives by their names from before torch 2.13, hundreds of times a step.
warnings.filterwarnings("ignore", message=".*(reduce_scatter|all_gather).* is deprecated", category=FutureWarning)


class MetricSums:
    """Named sums of statistics over micro-batches, read from the device once, at the end of a step."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, **numbers: Tensor) -> None:
        """Add scalars, on the device."""
        for name, number in numbers.items():
            number = number.detach().float()
            self._sums[name] = self._sums[name] + number if name in self._sums else number

    def extend(self, other: MetricSums, *names: str) -> None:
        """Add the sums of `other` under `names`, if it has them."""
        self.add(**{name: other._sums[name] for name in names if name in other._sums})

    def read(self) -> Metrics:
        """Return the sums over all ranks; it costs one collective and one host read."""
        stacked = distributed.all_sum(torch.stack([number.reshape(()) for number in self._sums.values()]))
        return dict(zip(self._sums, stacked.tolist()))


def padding_share(sums: Metrics) -> float:
    """Return the share of the computed `positions` without a token of a real row (`present` counts those with one)."""
    return 1 - sums["present"] / max(sums["positions"], 1)


class NotFiniteError(Exception):
    """The gradients of an update are not finite, on all ranks, so it was not taken; the weights are those before it.

    Attributes:
        engine, micro_batches, loss: the arguments of the update; see `TrainingEngine.step`.
    """

    def __init__(self, engine: TrainingEngine, micro_batches: Sequence[Any], loss: Loss) -> None:
        super().__init__(f"gradients of the {engine.name} model are not finite")
        self.engine, self.micro_batches, self.loss = engine, micro_batches, loss


class TrainingEngine:
    """A model, its optimizer and its learning-rate schedule.

    Attributes:
        omitted_steps: steps of the schedule that were not taken.
        observation: where the numbers of steps are reported.
        overflows_always: gradients have overflowed at the lowest loss scale: the range of fp16 is too small for them.
        parameter_counts: numbers of parameters, `trainable` and `all`.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        *,
        accelerator: Accelerator,
        precision: Precision,
        placement: ModelPlacement,
        optimizer: OptimizerConfig,
        total_steps: int,
        micro_batch_size: int,
        accumulation: int,
        observation: ObservationPoint | None = None,
    ) -> None:
        self.name = name
        self.accelerator = accelerator
        self.placement = placement
        self.optimizer_config = optimizer
        self._adapter_factor = compute_adapter_factor(optimizer, placement.lora)
        self.total_steps = total_steps
        self.omitted_steps = 0
        self.zero_stage = placement.zero_stage
        self.precision = precision
        self.ema: EMA | None = None
        self.observation = observation or ObservationPoint()
        # DeepSpeed clips inside its own optimizers; plain fp32 training without ZeRO has none of them.
        self._clips_itself = self.zero_stage == 0 and precision.name == "fp32"
        self._norm: Tensor = torch.zeros(())
        self._scale = 1.0
        self._trained = False
        self.overflows_always = False
        self.parameter_counts = _count_parameters(model)
        fuse_layers(model, accelerator)
        place_buffers(model, accelerator.device())
        keep_precision(model, precision.dtype)
        place_parameters(model, accelerator.device())
        _check_placement(model, accelerator.device())
        if self.zero_stage == 3:
            patches.round_linear_once()
        # If the optimizer's state is offloaded, its step runs on the host too.
        on_host = placement.offloads_optimizer
        adamw = accelerator.kernels.get("adamw_cpu_offload" if on_host else "adamw", required=True)
        with verbosity.suppress_stdout():  # operators that DeepSpeed compiles
            self.engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=adamw(
                    group_parameters(model, optimizer.weight_decay, self._adapter_factor),
                    # 0 during DeepSpeed's setup (see patches.undo_setup_step); each step sets its rate.
                    lr=0.0,
                    betas=optimizer.betas,
                    eps=optimizer.eps,
                ),
                config=build_deepspeed_config(
                    placement,
                    accelerator,
                    precision,
                    micro_batch_size,
                    accumulation,
                    max_grad_norm=None if self._clips_itself else optimizer.max_grad_norm,
                    trained=self.parameter_counts["trainable"],
                ),
            )
        patches.undo_setup_step(self.engine)
        if self.zero_stage == 3:
            patches.declare_adapters(find_adapted_layers(model).values())
        if self.zero_stage == 0:
            patches.replace_step(self.engine, ranks=distributed.world().size, loss_scaling=precision.loss_scaling)
        restore_precision(self.engine)
        accelerator.step_boundary(f"{name}/set-up")  # separates the setup from the first batch's graph

    @property
    def module(self) -> nn.Module:
        """The model without DeepSpeed."""
        return cast(nn.Module, self.engine.module)

    @property
    def vocabulary(self) -> int:
        """The number of logits of a token; the model must be a language model."""
        weight: Any = self.module.get_output_embeddings().weight  # type: ignore[operator]
        return int(getattr(weight, "ds_shape", weight.shape)[0])

    @property
    def optimizer(self) -> Any:
        """DeepSpeed's optimizer, which wraps the accelerator's."""
        return self.engine.optimizer

    @property
    def steps(self) -> int:
        """Optimizer steps, including `skipped` ones."""
        return int(self.engine.global_steps)

    @property
    def skipped(self) -> int:
        """Optimizer steps not taken because gradients were not finite."""
        return int(self.engine.skipped_steps)

    @property
    def scheduled_rate(self) -> float:
        """Learning rate of the next step; like Adam's moments it does not count skipped steps."""
        steps = self.steps + self.omitted_steps - self.skipped
        return compute_learning_rate(self.optimizer_config, steps, self.total_steps)

    @property
    def rates(self) -> dict[str, float]:
        """Learning rates of the next step, by the names under which they are recorded."""
        rate = self.scheduled_rate
        adapters = {"lora_learning_rate": self._adapter_factor * rate} if self.placement.lora.rank else {}
        return {"learning_rate": rate} | adapters

    def train(self) -> None:
        """Switch to training passes; `step` does so too."""
        self.engine.train()
        if self.zero_stage == 3 and not self._trained:
            patches.restart_trace(self.engine)
        self._trained = True

    def step(self, micro_batches: Sequence[Any], loss: Loss, *, apply: bool = True) -> MetricSums:
        """Take one optimizer step over this rank's micro-batches of one global batch.

        A loss may use forward passes that were made before (`train`), with the same weights: below ZeRO-3 those of all
        micro-batches; at ZeRO-3 that of one, since it gathers weights in the order of a pass and its backward pass.

        Args:
            micro_batches: the arguments of `loss`, one by one.
            loss: returns the loss and the statistics of a micro-batch.
            apply: False leaves the weights unchanged, and the gradients for a later `apply`.

        Returns:
            The statistics of `loss`, and the loss, summed on the device.

        Raises:
            NotFiniteError: the gradients are not finite; not with loss scaling, which lowers the scale instead.
        """
        world_size = distributed.world().size
        boundary = self.accelerator.step_boundary
        for group in self.engine.optimizer.param_groups:
            group["lr"] = group["factor"] * self.scheduled_rate
        self.train()
        sums = MetricSums()
        for number, batch in enumerate(micro_batches, 1):
            boundary(f"{self.name}/before-forward")
            self.observation.micro_batch = number - 1
            with self.precision.autocast():
                value, statistics = loss(self.engine, batch)
            boundary(f"{self.name}/loss")
            self.observation.report("loss", self.name, loss=value)
            patches.begin_micro_batch(self.engine)
            self._scale = patches.missing_loss_scale(
                self.engine, loss_scaling=self.precision.loss_scaling, zero_stage=self.zero_stage
            )
            # DeepSpeed averages over ranks; the loss is a part of a sum.
            self.engine.backward(value * (world_size * self._scale), scale_wrt_gas=False)
            boundary(f"{self.name}/backward")
            if number < len(micro_batches):
                self.engine.step()  # counts the micro-batch
                boundary(f"{self.name}/step")
            sums.add(loss=value, **statistics)
        self.observation.micro_batch = -1
        scale = self.loss_scale() if self.precision.loss_scaling else 1.0
        gradients = whole_gradients(self.module, zero_stage=self.zero_stage, loss_scale=scale)
        self.observation.report_all("gradients", self.name, gradients)
        skipped = self.skipped
        if apply:
            self.apply()
        if self.skipped > skipped and not self.precision.loss_scaling:
            raise NotFiniteError(self, micro_batches, loss)
        return sums

    def apply(self) -> None:
        """Update the weights with the gradients of the last `step`, unless these are not finite."""
        skipped = self.skipped
        if self._clips_itself:
            clip = self.accelerator.kernels.get("clip_grad_norm", required=True)
            trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
            self._norm = clip(trained, self.optimizer_config.max_grad_norm)
            if not math.isfinite(self._norm):  # DeepSpeed's optimizers skip such a step
                for parameter in trained:
                    parameter.grad = None
                self.engine.skipped_steps += 1
        if self.precision.loss_scaling:
            self.overflows_always |= patches.step_at_lowest_scale(self.engine)
        else:
            self.engine.step()
        self.accelerator.step_boundary(f"{self.name}/step")
        weights = whole_weights(self.module, self.optimizer, zero_stage=self.zero_stage)
        self.observation.report_all("update", self.name, weights)
        if self.ema and self.skipped == skipped:
            self.ema.follow()
            self.accelerator.step_boundary(f"{self.name}/average")

    def grad_norm(self) -> float:
        """Return the norm of the last step's gradient, before clipping."""
        norm: Tensor | float = self._norm if self._clips_itself else self.engine.get_global_grad_norm()
        return float(norm) / self._scale

    def loss_scale(self) -> float:
        """Return the loss scale of the next step, which keeps its gradients in the range of fp16."""
        return float(self.engine.optimizer.loss_scale)

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[nn.Module]:
        """Yield the model without DeepSpeed, with whole weights on every rank, for reading and for generation.

        At ZeRO-3 the weights are gathered once for the block.
        """
        with contextlib.ExitStack() as stack:
            if self.zero_stage == 3:
                stack.enter_context(GatheredParameters(list(self.module.parameters())))
            stack.enter_context(patches.without_hooks(self.engine))
            yield self.module


EngineStep = tuple[TrainingEngine, Sequence[Any], Loss]
"""(engine, micro-batches, loss): the inputs of `TrainingEngine.step`."""


def synchronized_step(steps: Sequence[EngineStep]) -> list[MetricSums]:
    """Take one optimizer step of each engine, or of none if the gradients of one overflow in fp16.

    Otherwise a policy could be updated without its critic, which no algorithm does (DeepSpeed-Chat:
    `--align_overflow`). Each engine lowers only its own loss scale: if no gradients overflowed, a lower scale would
    round small gradients to zero for the thousand steps until it rises again. Only for engines with loss scaling,
    because the gradients of all models are in memory at the same time.

    Returns:
        The result of `TrainingEngine.step` for each engine.
    """
    sums = [engine.step(micro_batches, loss, apply=False) for engine, micro_batches, loss in steps]
    overflowed = [patches.gradients_overflow(engine.optimizer) for engine, *_ in steps]
    for (engine, *_), lower in zip(steps, overflowed):
        with patches.override_overflow(engine.optimizer, skip=any(overflowed), lower=lower):
            engine.apply()
    return sums


def freeze_model(
    model: nn.Module, *, accelerator: Accelerator, precision: Precision, placement: ModelPlacement, shared: bool = False
) -> nn.Module:
    """Prepare a model for scoring only: in the compute precision, on the device or offloaded, sharded at ZeRO-3.

    Weights that stay on the device are converted to the layout that it reads fastest (operation `inference_weights`),
    unless the model has `shared` weights of another one.
    """
    model.requires_grad_(False).eval()
    clear_sources(model)
    fuse_layers(model, accelerator)
    if placement.zero_stage < 3 and placement.offloads_parameters:
        return offload(place_model(model, accelerator.host_device(), precision.dtype), accelerator)
    if placement.zero_stage < 3:
        place_model(model, accelerator.device(), precision.dtype)
        if not shared and (prepare := accelerator.kernels.get("inference_weights")):
            # The output layer is excluded: its product may be computed in parts and fused with the loss.
            prepare(getattr(model, "base_model", model), keep=False)
        return model
    place_buffers(model, accelerator.device())
    patches.round_linear_once()
    frozen, *_ = deepspeed.initialize(
        model=model,
        config=build_deepspeed_config(placement, accelerator, precision, micro_batch_size=1, accumulation=1),
    )
    frozen.eval()
    return cast(nn.Module, frozen)


def recompute_in_parts(accelerator: Accelerator) -> dict[str, Any]:
    """Return options of `torch.utils.checkpoint` by which the backward pass of each layer begins after a step boundary.

    In one graph, an accelerator that runs lazily would keep what checkpointing saves. Empty for others.
    """

    @contextlib.contextmanager
    def after_boundary() -> Iterator[None]:
        accelerator.step_boundary("recompute")
        yield

    return {"context_fn": lambda: (contextlib.nullcontext(), after_boundary())} if accelerator.is_lazy() else {}


def fuse_layers(model: nn.Module, accelerator: Accelerator) -> None:
    """Replace layers by the device's fused forms, if it has any (operation `fused_layers`)."""
    if fuse := accelerator.kernels.get("fused_layers"):
        fuse(model)


def _check_placement(model: nn.Module, device: torch.device) -> None:
    """Assert that parameters are on the device before an optimizer takes them: it would update others in vain."""
    there = torch.empty(0, device=device).device  # with its index
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad or is_sharded(parameter) or parameter.device == there, name


def _count_parameters(model: nn.Module) -> dict[str, int]:
    """Return the number of a model's parameters that are `trainable`, and of `all`."""
    # A packed weight is counted by its numbers, not by its bytes.
    packed = set(map(id, quantized.list_packed_parameters(model)))
    parameters = [parameter for parameter in model.parameters() if id(parameter) not in packed]
    # `ds_numel` counts a sharded parameter whole.
    sizes = [getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters]
    return {
        "trainable": sum(size for parameter, size in zip(parameters, sizes) if parameter.requires_grad),
        "all": sum(sizes) + quantized.count_quantized(model),
    }


def compute_adapter_factor(optimizer: OptimizerConfig, lora: LoraConfig) -> float:
    """Return the factor on a stage's learning rate for its adapters; they follow the same schedule."""
    return ADAPTERS_FACTOR if lora.learning_rate is None else lora.learning_rate / optimizer.learning_rate


def group_parameters(model: nn.Module, weight_decay: float, factor: float = 1.0) -> list[dict[str, Any]]:
    """Return trainable parameters in groups: matrices with weight decay, vectors (biases, norms) without, adapters.

    The `factor` of a group multiplies the stage's learning rate: `factor` for adapters, 1 for others.
    """
    # A parameter partitioned by ZeRO-3 is flat and empty; `ds_shape` has its shape.
    trainable = [(".lora_" in name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for adapter, p in trainable if not adapter and len(getattr(p, "ds_shape", p.shape)) > 1]
    vectors = [p for adapter, p in trainable if not adapter and len(getattr(p, "ds_shape", p.shape)) <= 1]
    adapters = [p for adapter, p in trainable if adapter]
    groups = [
        {"params": matrices, "weight_decay": weight_decay, "factor": 1.0},
        {"params": vectors, "weight_decay": 0.0, "factor": 1.0},
        {"params": adapters, "weight_decay": weight_decay, "factor": factor},
    ]
    return [group for group in groups if group["params"]]


def compute_learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based) of `total_steps`.

    It rises linearly over the warm-up, then follows the schedule down to `min_lr_ratio` of the peak at the last step.
    """
    warmup = round(config.warmup if config.warmup >= 1 else config.warmup * total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, total_steps - warmup - 1)
    shape = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "wsd": min(1.0, (total_steps - 1 - step) / max(1, round(config.decay * total_steps))),
    }[config.schedule]
    floor = 1.0 if config.schedule == "constant" else config.min_lr_ratio
    return config.learning_rate * (floor + (1.0 - floor) * shape)
