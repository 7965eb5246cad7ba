"""What one model holds: weights, gradients, masters, moments, and what comes and goes around them, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rlhf.config import Config
from rlhf.planning.shapes import Shape
from rlhf.roles import Holding

Kind = Literal[
    "weights",
    "gradients",
    "masters",
    "moments",
    "activations",
    "logits",
    "KV cache",
    "gathered layers",
    "merged weights",
    "communication",
    "experience",
    "loading",
    "saving",
    "libraries",
    "fragmentation",
]

BUCKET = 500_000_000  # elements: DeepSpeed 0.19.8's reduce_bucket_size, and its engine's for ZeRO 0
LIVE = 1_000_000_000  # elements: its stage3_max_live_parameters


class Item(NamedTuple):
    """Bytes of one kind that a role has, on each device or, of each rank, on the host."""

    role: str
    kind: Kind
    size: int
    host: bool = False


@dataclass(frozen=True)
class Surroundings:
    """Where a run is: how many ranks, in which precision, with which attention.

    Args:
        one_memory: the devices' memory is the host's.
        base: bytes of a process before it loads a model.
        fused: attention makes no matrix of weights.
        margin: part of what is there that an allocator loses between blocks.
    """

    ranks: int = 1
    precision: str = "bf16"
    fused: bool = True
    one_memory: bool = False
    base: int = 0
    margin: float = 0.0

    @property
    def width(self) -> int:
        """Bytes of a number in the compute precision."""
        return 4 if self.precision == "fp32" else 2


def total(items: Sequence[Item], *, host: bool) -> int:
    return sum(item.size for item in items if item.host == host)


def fragments(items: Sequence[Item], around: Surroundings) -> list[Item]:
    """What the devices' allocator loses."""
    lost = int(around.margin * total([item for item in items if item.kind != "libraries"], host=False))
    return [Item("process", "fragmentation", lost)] if lost else []


@dataclass(frozen=True)
class Model:
    """A role's model. `shared`: its frozen weights are another role's, and count there."""

    role: str
    shape: Shape
    scalar_head: bool = False
    shared: bool = False

    def counts(self, holding: Holding) -> tuple[int, int]:
        """All numbers, and those that are trained."""
        whole = self.shape.parameters(scalar_head=self.scalar_head)
        adapters = self.shape.adapters(holding.lora.rank)
        trained = adapters + (self.shape.embedding if self.scalar_head else 0) if holding.lora.rank else whole
        return whole + adapters, trained if holding.role.trained else 0

    def weights(self, holding: Holding, around: Surroundings, *, whole: bool = False) -> int:
        """Bytes of the weights of one rank, or `whole`."""
        everything, trained = self.counts(holding)
        frozen = everything - trained
        quantized = self.shape.in_linears if holding.engine.frozen != "auto" and frozen else 0
        size = trained * around.width
        if not self.shared:
            size += (frozen - quantized) * around.width + _quantized(quantized, holding.engine.frozen)
        if holding.zero_stage < 3 or whole:
            return size
        return size // around.ranks + self._persistent(holding) * around.width

    def resting(self, holding: Holding, around: Surroundings, *, fresh: bool = False) -> list[Item]:
        """What is there between uses: weights, masters and moments.

        Args:
            fresh: before the first step, which makes the moments.
        """
        _, trained = self.counts(holding)
        items = [Item(self.role, "weights", self.weights(holding, around), _host(holding.offloads_parameters, around))]
        if not trained:
            return items
        part = _part(holding, around)
        away = _host(holding.offloads_optimizer, around)
        if holding.zero_stage or around.width < 4:
            own = holding.zero_stage == 3 and around.width == 4  # ZeRO-3's shards are masters already
            items.append(Item(self.role, "masters", 0 if own else 4 * trained // part, away))
        if not fresh or holding.zero_stage == 0:
            items.append(Item(self.role, "moments", 8 * trained // part, away))
        if holding.offloads_optimizer:  # DeepSpeed holds float32 gradients and a copy in the weights' type there
            items.append(Item(self.role, "gradients", 4 * trained // part, away))
            if holding.zero_stage < 3:
                items.append(Item(self.role, "communication", around.width * trained // part, away))
        elif holding.zero_stage == 3:
            items.append(Item(self.role, "gradients", around.width * trained // part))
        return items

    def making(self, holding: Holding, around: Surroundings) -> list[Item]:
        """Loading: the weights, and the most that setting up the engine adds for a moment."""
        _, trained = self.counts(holding)
        items = self.resting(holding, around, fresh=True)
        width, part = around.width, _part(holding, around)
        if trained and holding.zero_stage in (1, 2):  # flat copies of the weights, made group by group
            items.append(Item(self.role, "loading", max(0, width * trained - (4 * trained // part))))
        return items

    def accumulated(self, holding: Holding, around: Surroundings, accumulation: int) -> int:
        """Bytes of gradients that are there between the micro-batches of one step."""
        _, trained = self.counts(holding)
        if accumulation == 1 or (holding.zero_stage == 3):
            return 0
        if holding.zero_stage == 2:
            return 4 * trained // _part(holding, around)
        return around.width * trained

    def step(self, holding: Holding, around: Surroundings, accumulation: int) -> list[Item]:
        """The end of the backward pass, or the optimizer's step: gradients, and what reduces them."""
        _, trained = self.counts(holding)
        width, part, ranks = around.width, _part(holding, around), around.ranks
        bucket = min(BUCKET, trained)
        if holding.zero_stage == 0:
            gradients = trained * (4 if width == 4 else width + 4)
            moving = bucket * 4 if ranks > 1 else 0
            moving = max(0, moving - (4 * trained if width < 4 else 0))
        elif holding.zero_stage == 3:
            gradients = 0  # at rest already
            moving = bucket * width + (bucket * 4 if ranks > 1 and width < 4 else 0)
        else:
            whole = trained if holding.zero_stage == 1 else bucket
            gradients = whole * width
            reducing = bucket * (width + 4 if width < 4 else 4) if ranks > 1 else 0
            stepping = (
                0 if holding.offloads_optimizer else (width + 4) * trained // part if width < 4 else 4 * trained // part
            )
            moving = max(reducing, stepping)
        return [Item(self.role, "gradients", gradients), Item(self.role, "communication", moving)]

    def gathered(self, holding: Holding, around: Surroundings) -> list[Item]:
        """ZeRO-3: layers that are whole for a moment."""
        if holding.zero_stage < 3 or around.ranks == 1:
            return []
        whole = self.counts(holding)[0]
        live = (
            min(whole, LIVE) if holding.engine.zero_persistence_threshold else max(self.shape.layer, self.shape.tokens)
        )
        return [Item(self.role, "gathered layers", around.width * live)]

    def for_rollouts(self, config: Config, holding: Holding, around: Surroundings) -> list[Item]:
        """Generating: whole weights at ZeRO-3, and the copy that adapters are merged into."""
        items = []
        if holding.zero_stage == 3 and around.ranks > 1:
            items.append(Item(self.role, "gathered layers", self._rollout(config, holding, around)))
        if holding.lora.rank and config.lora.merge is not False:
            items.append(Item(self.role, "merged weights", self.shape.in_linears * around.width))
        return items

    def saving(self, holding: Holding, around: Surroundings) -> list[Item]:
        """Export and checkpoints: one parameter at a time is whole, on the host."""
        return [Item(self.role, "saving", 4 * self.shape.largest, _host(True, around))]

    def _rollout(self, config: Config, holding: Holding, around: Surroundings) -> int:
        whole = self.weights(holding, around, whole=True)
        how = config.ppo.generation_weights
        if how == "layerwise":
            return around.width * (self.shape.layer + self.shape.tokens)
        if how == "tensor_parallel":
            return whole // (config.ppo.tensor_parallel or around.ranks)
        return whole

    def _persistent(self, holding: Holding) -> int:
        """ZeRO-3: numbers in parameters below the threshold, which stay whole."""
        threshold = holding.engine.zero_persistence_threshold
        small = self.shape.norms + sum(linear.outputs for linear in self.shape.linears if linear.bias)
        adapters = [
            numbers
            for linear in self.shape.linears
            for numbers in (linear.inputs * holding.lora.rank, linear.outputs * holding.lora.rank)
            if numbers < threshold
        ]
        return self.shape.layers * (small + sum(adapters)) if threshold > self.shape.hidden else 0


def _part(holding: Holding, around: Surroundings) -> int:
    """Among how many ranks the optimizer's state is shared."""
    return around.ranks if holding.zero_stage else 1


def _host(away: bool, around: Surroundings) -> bool:
    return away and not around.one_memory


def _quantized(numbers: int, kind: str) -> int:
    """Bytes of quantized weights, with their scales: one a row of int8, one in float32 a group of 64 of int4."""
    return numbers if kind == "int8" else numbers // 2 + numbers // 16
