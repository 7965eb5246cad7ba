"""What one model holds: weights, gradients, masters, moments, and what comes and goes around them, in bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rlhf.config.schema import Config
from rlhf.models.shape import Shape
from rlhf.roles.roles import REDUCE_BUCKET_SIZE, ModelPlacement

Kind = Literal[
    "weights",
    "gradients",
    "masters",
    "moments",
    "average",
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

LIVE = 1_000_000_000  # elements: DeepSpeed 0.19.8's stage3_max_live_parameters
AHEAD = 50_000_000  # elements: its stage3_prefetch_bucket_size
BLOCK = 2**25  # bytes: what is smaller comes from glibc's heap, which keeps it when it is freed (M_MMAP_THRESHOLD)
_LARGEST_COPY = 0.1  # part of a device's memory (rlhf.models.lora)


class Item(NamedTuple):
    """Bytes of one kind that a role has, on each device or, of each rank, on the host.

    `small` of them are in blocks that an allocator of the host keeps for later when they are freed.
    """

    role: str
    kind: Kind
    size: int
    host: bool = False
    small: int = 0


@dataclass(frozen=True)
class Surroundings:
    """Where a run is: how many ranks, in which precision, with which attention.

    Args:
        one_memory: the devices' memory is the host's.
        base: bytes of a process before it loads a model.
        fused: attention makes no matrix of weights.
        margin: part of what is there that a device's allocator loses between blocks.
        memory: bytes that a device has; None: not known.
    """

    ranks: int = 1
    precision: str = "bf16"
    fused: bool = True
    one_memory: bool = False
    base: int = 0
    margin: float = 0.0
    memory: int | None = None

    @property
    def width(self) -> int:
        """Bytes of a number in the compute precision."""
        return 4 if self.precision == "fp32" else 2

    @property
    def sums(self) -> int:
        """Bytes of a number in which ranks add gradients up."""
        return 4 if self.precision != "fp16" and self.ranks > 1 else self.width


def total(items: Sequence[Item], *, host: bool) -> int:
    return sum(item.size for item in items if item.host == host)


def in_blocks(role: str, kind: Kind, *sizes: int, host: bool = False) -> Item:
    """Blocks of so many bytes."""
    return Item(role, kind, sum(sizes), host, small=sum(size for size in sizes if size < BLOCK))


@dataclass(frozen=True)
class Model:
    """A role's model.

    Args:
        shared: its frozen weights are another role's, and count there.
        parts: gradients of several micro-batches are added up for a step.
    """

    role: str
    shape: Shape
    scalar_head: bool = False
    shared: bool = False
    parts: bool = False

    def counts(self, placement: ModelPlacement) -> tuple[int, int]:
        """All numbers, and those that are trained."""
        whole = self.shape.parameters(scalar_head=self.scalar_head)
        adapters = self.shape.adapters(placement.lora.rank)
        trained = adapters + (self.shape.embedding if self.scalar_head else 0) if placement.lora.rank else whole
        return whole + adapters, trained if placement.role.trained else 0

    def weights(self, placement: ModelPlacement, around: Surroundings, *, whole: bool = False) -> int:
        """Bytes of the weights of one rank, or `whole`."""
        everything, trained = self.counts(placement)
        frozen = everything - trained
        quantized = self.shape.in_linears if placement.engine.frozen != "auto" and frozen else 0
        size = trained * around.width
        if not self.shared:
            size += (frozen - quantized) * around.width + _quantized(quantized, placement.engine.frozen)
        if placement.zero_stage < 3 or whole:
            return size
        return size // around.ranks + (self._persistent(placement) * around.width if around.ranks > 1 else 0)

    def resting(self, placement: ModelPlacement, around: Surroundings, *, fresh: bool = False) -> list[Item]:
        """What is there between uses: weights, masters, moments, and at ZeRO-3 gradients.

        Args:
            fresh: before the first step, which makes the moments.
        """
        _, trained = self.counts(placement)
        each = self._each(placement)
        stage, width, part = placement.zero_stage, around.width, _part(placement, around)
        items = [each("weights", self.weights(placement, around), width, _host(placement.offloads_parameters, around))]
        if not trained:
            return items
        away = _host(placement.offloads_optimizer, around)
        if (stage or width < 4) and not (stage == 3 and width == 4):  # whose shards are masters already
            items.append(each("masters", 4 * trained // part, 4, away))
        if not fresh or stage == 0:
            items.append(each("moments", 8 * trained // part, 4, away))
        if placement.offloads_optimizer:  # float32 gradients there, and below ZeRO-3 a copy in the weights' type
            items.append(each("gradients", 4 * trained // part, 4, away))
            if stage < 3:
                items.append(each("communication", width * trained // part, width, away))
                added = 4 if stage == 2 else width  # gradients of micro-batches, added up there
                items.append(each("gradients", added * trained // part if self.parts and not fresh else 0, 4, away))
                room = width * min(self.shape.largest, trained)  # for one gradient on its way, on either side
                items += [in_blocks(self.role, "communication", room, host=side) for side in (away, False)]
        if stage == 3 and not fresh:  # what the backward pass leaves, beside those in float32 where these are offloaded
            size = (4 if self.parts else width) * trained // part
            items.append(in_blocks(self.role, "gradients", size, host=away))
        if stage == 3 and not (fresh and around.one_memory):  # a bucket for good; a host gives pages when they are used
            items.append(in_blocks(self.role, "communication", around.sums * _bucket(placement, trained, around)))
        return items

    def average(self, placement: ModelPlacement, around: Surroundings, *, on_host: bool) -> Item:
        """A moving average of what is trained, in float32, shared among ranks as masters are."""
        size = 4 * self.counts(placement)[1] // _part(placement, around)
        return self._each(placement)("average", size, 4, _host(on_host, around))

    def making(self, placement: ModelPlacement, around: Surroundings) -> list[Item]:
        """Loading: the weights, and the most that setting up the engine adds for a moment."""
        _, trained = self.counts(placement)
        each = self._each(placement)
        items = self.resting(placement, around, fresh=True)
        if trained and (placement.zero_stage or around.width < 4):  # gradients of 0, with which its states are made
            items.append(each("loading", 4 * trained // _part(placement, around), 4))
        if trained and placement.zero_stage in (1, 2):  # weights as they were read, before a flat copy took their place
            items.append(Item(self.role, "loading", 0, small=self._small(around.width)))
        return items

    def backward(self, placement: ModelPlacement, around: Surroundings) -> tuple[Item, list[Item]]:
        """Gradients between the micro-batches of one step, and what is there when the last backward pass ends.

        An embedding that is the output's too has a gradient of either use, and their sum, at one time.
        """
        _, trained = self.counts(placement)
        each, width = self._each(placement), around.width
        stage, part = placement.zero_stage, _part(placement, around)
        bucket = width * _bucket(placement, trained, around)
        waiting = bucket if stage in (1, 2) and not around.one_memory else 0  # from the start of the pass
        kept = 0
        if self.parts and stage == 2 and not placement.offloads_optimizer:
            kept = 4 * trained // part
        elif self.parts and stage < 2:
            kept = width * trained
        before = each("gradients", kept + waiting, width)
        gradients = width * trained + waiting
        if stage == 2:
            gradients = kept + bucket
        elif stage == 3:
            gradients = width * min(self.shape.layer if not placement.lora.rank else trained, trained)
        twice = 0
        another = self.parts or stage > 1  # a sum, or a bucket, that has a copy already
        if not placement.lora.rank and not self.scalar_head:
            twice = (3 if another else 2) if self.shape.tied else (1 if another else 0)
        after = [in_blocks(self.role, "gradients", gradients) if stage > 1 else each("gradients", gradients, width)]
        if twice:
            after.append(in_blocks(self.role, "gradients", twice * width * self.shape.tokens))
        return before, after

    def step(self, placement: ModelPlacement, around: Surroundings) -> list[list[Item]]:
        """Moments after the backward pass: ranks add their gradients up, and the optimizer takes its step."""
        _, trained = self.counts(placement)
        each = self._each(placement)
        stage, width, part, ranks = placement.zero_stage, around.width, _part(placement, around), around.ranks
        bucket = min(placement.bucket(trained) if stage else REDUCE_BUCKET_SIZE, trained)
        own = each("gradients", width * trained, width)
        # A flat copy of a bucket, and that in the type in which it is added up.
        copies = (bucket * width + (bucket * 4 if width < around.sums else 0)) if ranks > 1 else 0
        adding = in_blocks(self.role, "communication", copies)
        norm = 8 * (self.shape.largest if trained > self.shape.largest else 0) // part  # a gradient in float64
        if stage == 0:
            return [[own, adding], [own, each("gradients", 4 * trained if width < 4 else 0, 4)]]
        if stage == 3:
            kept = (4 if self.parts else width) * trained // part
            # A bucket's gradients beside each other, for each rank its part; gloo, on a host, adds them up in a copy.
            scattered = around.sums * bucket * (2 if around.one_memory else 1)
            if ranks == 1:
                scattered = (4 if self.parts else width) * bucket
            stepping = 0 if placement.offloads_optimizer else kept + (0 if self.parts else 4 * trained // part)
            return [
                [in_blocks(self.role, "communication", scattered)],
                [in_blocks(self.role, "communication", stepping, 0 if placement.offloads_optimizer else norm)],
            ]
        flat = in_blocks(self.role, "gradients", width * (trained if stage == 1 else bucket))
        if stage == 2 and self.parts and width < 4:  # kept in float32 already
            kept_there = in_blocks(self.role, "gradients", 0 if placement.offloads_optimizer else 4 * trained // part)
            if ranks == 1:  # a flat copy of the bucket here too
                adding = in_blocks(self.role, "communication", bucket * width)
            return [[flat, adding, kept_there]]
        stepping = 0 if placement.offloads_optimizer else (width + (4 if width < 4 else 0)) * trained // part
        return [[flat, adding], [flat, in_blocks(self.role, "communication", stepping)]]

    def gathered(self, placement: ModelPlacement, around: Surroundings) -> list[Item]:
        """ZeRO-3: layers that are whole for a moment."""
        if placement.zero_stage < 3 or around.ranks == 1:
            return []
        whole, one = self.counts(placement)[0], max(self.shape.layer, self.shape.tokens)
        if not placement.engine.zero_persistence_threshold:
            return [self._each(placement)("gathered layers", around.width * one, around.width)]
        # What was fetched ahead lies in a flat buffer until the last of its parameters, copied out of it, is used; gloo
        # on a host gathers into a buffer of its own, in two threads at a time.
        ahead = around.width * min(whole, AHEAD) * (3 if around.one_memory else 1)
        live = self._each(placement)("gathered layers", around.width * min(whole, LIVE), around.width)
        return [live, in_blocks(self.role, "gathered layers", ahead)]

    def for_rollouts(self, config: Config, placement: ModelPlacement, around: Surroundings) -> list[Item]:
        """Generating: whole weights at ZeRO-3, and the copy that adapters are merged into."""
        items = []
        if placement.zero_stage == 3 and around.ranks > 1:
            items.append(Item(self.role, "gathered layers", self._rollout(config, placement, around)))
        if placement.lora.rank and self._merges(config, placement, around):
            items.append(self._each(placement)("merged weights", self.shape.in_linears * around.width, around.width))
        return items

    def saving(self, placement: ModelPlacement, around: Surroundings) -> list[Item]:
        """Export and checkpoints: one parameter at a time is whole, on the host."""
        return [in_blocks(self.role, "saving", 4 * self.shape.largest, host=_host(True, around))]

    def _merges(self, config: Config, placement: ModelPlacement, around: Surroundings) -> bool:
        """Whether rollouts add adapters to a copy of the weights; as `rlhf.models.lora.should_merge` decides it."""
        if config.lora.merge != "auto":
            return config.lora.merge
        copy = self.shape.in_linears * around.width
        return placement.engine.frozen == "auto" and (around.memory is None or copy <= _LARGEST_COPY * around.memory)

    def _rollout(self, config: Config, placement: ModelPlacement, around: Surroundings) -> int:
        whole = self.weights(placement, around, whole=True)
        how = config.ppo.generation_weights
        if how == "layerwise":
            return around.width * (self.shape.layer + self.shape.tokens)
        if how == "tensor_parallel":
            return whole // (config.ppo.tensor_parallel or around.ranks)
        return whole

    def _each(self, placement: ModelPlacement) -> Callable[..., Item]:
        """Makes items whose bytes are spread over parameters: in blocks of their own, or flat from ZeRO 1 on."""
        everything, trained = self.counts(placement)

        def item(kind: Kind, size: int, width: int, host: bool = False) -> Item:
            flat = placement.zero_stage in (1, 2) and not placement.lora.rank and trained and kind != "gradients"
            if flat or size < BLOCK:
                return in_blocks(self.role, kind, size, host=host)
            part = 1.0 if trained < everything and kind != "weights" else self._small(width) / (everything * width)
            return Item(self.role, kind, size, host, small=int(size * part))

        return item

    def _small(self, width: int) -> int:
        """Bytes in parameters of their own that are smaller than `BLOCK`."""
        shape = self.shape
        small = [linear.numbers for linear in shape.linears if linear.numbers * width < BLOCK]
        inside = shape.layers * (sum(small) + shape.norms)
        return width * (inside + (shape.tokens if shape.tokens * width < BLOCK else 0))

    def _persistent(self, placement: ModelPlacement) -> int:
        """ZeRO-3: numbers in parameters below the threshold, which stay whole."""
        threshold = placement.engine.zero_persistence_threshold
        small = self.shape.norms + sum(linear.outputs for linear in self.shape.linears if linear.bias)
        adapters = [
            numbers
            for linear in self.shape.linears
            for numbers in (linear.inputs * placement.lora.rank, linear.outputs * placement.lora.rank)
            if numbers < threshold
        ]
        return self.shape.layers * (small + sum(adapters)) if threshold > self.shape.hidden else 0


def _part(placement: ModelPlacement, around: Surroundings) -> int:
    """Among how many ranks the optimizer's state is shared."""
    return around.ranks if placement.zero_stage else 1


def _bucket(placement: ModelPlacement, trained: int, around: Surroundings) -> int:
    """Elements of the bucket for gradients; of a host's memory, those that are written to."""
    size = placement.bucket(trained)
    return min(size, trained) if around.one_memory else size


def _host(away: bool, around: Surroundings) -> bool:
    return away and not around.one_memory


def _quantized(numbers: int, kind: str) -> int:
    """Bytes of quantized weights, with their scales: one a row of int8, one in float32 a group of 64 of int4."""
    return numbers if kind == "int8" else numbers // 2 + numbers // 16
