"""The memory of one model: weights, gradients, float32 weights, moments, and temporary buffers.

The sizes are those that DeepSpeed 0.19.8 allocates for a model of a `Shape`, placed as the settings say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from rlhf.config.schema import Config
from rlhf.memory.environment import Environment
from rlhf.models.shape import Shape
from rlhf.roles.roles import REDUCE_BUCKET_SIZE, ModelPlacement

MemoryKind = Literal[
    "weights",
    "gradients",
    "masters",
    "moments",
    "average",
    "activations",
    "logits",
    "KV cache",
    "recordings",
    "gathered layers",
    "merged weights",
    "converted weights",
    "communication",
    "experience",
    "loading",
    "saving",
    "libraries",
    "fragmentation",
]

BLOCK = 2**25
"""Bytes: smaller blocks come from glibc's heap, which keeps them when they are freed (M_MMAP_THRESHOLD)."""

_MAX_LIVE = 1_000_000_000  # elements: DeepSpeed 0.19.8's stage3_max_live_parameters
_PREFETCH = 50_000_000  # elements: its stage3_prefetch_bucket_size


class MemoryItem(NamedTuple):
    """Bytes of one kind that a role uses, on each device or, for each rank, on the host.

    `small` of them are in blocks that the host's allocator keeps for reuse when they are freed.
    """

    role: str
    kind: MemoryKind
    size: int
    host: bool = False
    small: int = 0


def block_item(role: str, kind: MemoryKind, *sizes: int, host: bool = False) -> MemoryItem:
    """Return an item that consists of blocks of these sizes."""
    return MemoryItem(role, kind, sum(sizes), host, small=sum(size for size in sizes if size < BLOCK))


def sum_bytes(items: Sequence[MemoryItem], *, host: bool) -> int:
    """Return the bytes of all items on the host, or on the device."""
    return sum(item.size for item in items if item.host == host)


@dataclass(frozen=True)
class ModelMemory:
    """The memory of a role's model at the moments of a stage.

    Attributes:
        shared: the frozen weights belong to another role, which counts them.
        initial_kept: parts that are trained next to adapters are copies; the frozen originals stay for other models.
        accumulates: a step sums the gradients of several micro-batches.
    """

    placement: ModelPlacement
    shape: Shape
    environment: Environment
    shared: bool = False
    initial_kept: bool = False
    accumulates: bool = False

    @property
    def role(self) -> str:
        """Name of the role."""
        return self.placement.role.name

    @property
    def scalar_head(self) -> bool:
        """True if the model scores texts."""
        return self.placement.role.scalar_head

    @cached_property
    def parameters(self) -> int:
        """The number of parameters, including those of adapters."""
        return self.shape.parameters(scalar_head=self.scalar_head) + self.shape.adapters(self.placement.lora.rank)

    @cached_property
    def trained(self) -> int:
        """The number of parameters that are trained."""
        if not self.placement.role.trained:
            return 0
        if not (rank := self.placement.lora.rank):
            return self.parameters
        return self.shape.adapters(rank) + (self.shape.embedding if self.scalar_head else 0) + self.also_trained

    @cached_property
    def also_trained(self) -> int:
        """The number of parameters that `lora.also_train` adds to the adapters."""
        lora = self.placement.lora
        if not (self.placement.role.trained and lora.rank):
            return 0
        return self.shape.parts(lora.also_train, scalar_head=self.scalar_head)

    @property
    def frozen(self) -> int:
        """The number of parameters that are not trained."""
        return self.parameters - self.trained

    def weights(self, *, whole: bool = False) -> int:
        """Return the bytes of the weights on one rank, or of the `whole` model."""
        width, ranks = self.environment.width, self.environment.ranks
        size = self.trained * width
        if self.initial_kept and not self.shared:
            size += self.also_trained * width
        if not self.shared:
            size += self._bytes(self.frozen, self._quantized)
        if self.placement.zero_stage < 3 or whole:
            return size
        return size // ranks + (self._persistent() * width if ranks > 1 else 0)

    def resting(self, *, fresh: bool = False) -> list[MemoryItem]:
        """Return the memory between uses: weights, float32 weights, moments, and at ZeRO-3 gradients.

        Args:
            fresh: before the first step, which creates the moments.
        """
        trained, stage, width, part = self.trained, self.placement.zero_stage, self.environment.width, self._sharers
        items = [self._item("weights", self.weights(), width, self._on_host(self.placement.offloads_parameters))]
        if not trained:
            return items
        offloads = self.placement.offloads_optimizer
        host = self._on_host(offloads)
        if (stage or width < 4) and not (stage == 3 and width == 4):  # its shards are the float32 weights already
            items.append(self._item("masters", 4 * trained // part, 4, host))
        if not fresh or stage == 0:
            items.append(self._item("moments", 8 * trained // part, 4, host))
        if offloads:  # float32 gradients, and below ZeRO-3 a copy in the weights' type
            items.append(self._item("gradients", 4 * trained // part, 4, host))
            if stage < 3:
                items.append(self._item("communication", width * trained // part, width, host))
                added = 4 if stage == 2 else width  # gradients of micro-batches are summed on the host
                accumulated = added * trained // part if self.accumulates and not fresh else 0
                items.append(self._item("gradients", accumulated, 4, host))
                passing = width * min(self.shape.largest, trained)  # one gradient in transfer, on both sides
                items += [block_item(self.role, "communication", passing, host=side) for side in (host, False)]
        if stage == 3 and not fresh:  # created by the backward pass, in addition to offloaded gradients in float32
            size = (4 if self.accumulates else width) * trained // part
            items.append(block_item(self.role, "gradients", size, host=host))
        if stage == 3 and not (fresh and self.environment.unified_memory):  # kept; a host allocates pages on first use
            items.append(block_item(self.role, "communication", self.environment.reduce_width * self._bucket()))
        return items

    def average(self, *, on_host: bool) -> MemoryItem:
        """Return the moving average of trained weights, in float32, sharded like the float32 weights."""
        return self._item("average", 4 * self.trained // self._sharers, 4, self._on_host(on_host))

    def loading(self) -> list[MemoryItem]:
        """Return the weights, and the maximum that the engine's setup uses temporarily."""
        items, trained, stage = self.resting(fresh=True), self.trained, self.placement.zero_stage
        if trained and (stage or self.environment.width < 4):  # zero gradients, from which DeepSpeed creates its states
            items.append(self._item("loading", 4 * trained // self._sharers, 4))
        if self._quantized and not self.shared:  # a whole matrix in float32, packed, and at ZeRO-3 joined and sharded
            packed = _quantized_bytes(self._widest, self.placement.engine.frozen)
            copies = [packed] * (3 if stage == 3 else 1)
            items.append(block_item(self.role, "loading", 4 * self._widest, *copies))
        if trained and stage in (1, 2):  # the weights that were loaded, until a flat copy replaces them
            items.append(MemoryItem(self.role, "loading", 0, small=self._small(self.environment.width)))
        return items

    def backward(self) -> tuple[MemoryItem, list[MemoryItem]]:
        """Return the gradients between micro-batches of a step, and at the end of the last backward pass.

        An embedding tied to the output layer has a gradient from each use and their sum at the same time.
        """
        trained, width, rank = self.trained, self.environment.width, self.placement.lora.rank
        stage, part = self.placement.zero_stage, self._sharers
        bucket = width * self._bucket()
        waiting = bucket if stage in (1, 2) and not self.environment.unified_memory else 0  # from the start of the pass
        accumulated = 0
        if self.accumulates and stage == 2 and not self.placement.offloads_optimizer:
            accumulated = 4 * trained // part
        elif self.accumulates and stage < 2:
            accumulated = width * trained
        before = self._item("gradients", accumulated + waiting, width)
        gradients = width * trained + waiting
        if stage == 2:
            gradients = accumulated + bucket
        elif stage == 3:
            gradients = width * min(trained if rank else self.shape.layer, trained)
        copies = 0
        has_copy = self.accumulates or stage > 1  # a sum, or a bucket
        if (not rank or "embeddings" in self.placement.lora.also_train) and not self.scalar_head:
            copies = (3 if has_copy else 2) if self.shape.tied else (1 if has_copy else 0)
        after = [
            block_item(self.role, "gradients", gradients) if stage > 1 else self._item("gradients", gradients, width)
        ]
        if copies:
            after.append(block_item(self.role, "gradients", copies * width * self.shape.tokens))
        return before, after

    def step(self) -> list[list[MemoryItem]]:
        """Return the memory after the backward pass: while ranks sum gradients, and while the optimizer steps."""
        trained, width, ranks = self.trained, self.environment.width, self.environment.ranks
        stage, part, offloads = self.placement.zero_stage, self._sharers, self.placement.offloads_optimizer
        reduce_width = self.environment.reduce_width
        bucket = min(self.placement.bucket(trained) if stage else REDUCE_BUCKET_SIZE, trained)
        gradients = self._item("gradients", width * trained, width)
        # A flat copy of a bucket, and one in the type in which gradients are summed.
        copies = (bucket * width + (bucket * 4 if width < reduce_width else 0)) if ranks > 1 else 0
        adding = block_item(self.role, "communication", copies)
        norm = 8 * (self.shape.largest if trained > self.shape.largest else 0) // part  # a gradient in float64
        if stage == 0:
            return [[gradients, adding], [gradients, self._item("gradients", 4 * trained if width < 4 else 0, 4)]]
        if stage == 3:
            accumulated = (4 if self.accumulates else width) * trained // part
            # A bucket's gradients in one buffer, with a part for each rank; gloo, on a host, sums them in a copy.
            scattered = reduce_width * bucket * (2 if self.environment.unified_memory else 1)
            if ranks == 1:
                scattered = (4 if self.accumulates else width) * bucket
            stepping = 0 if offloads else accumulated + (0 if self.accumulates else 4 * trained // part)
            return [
                [block_item(self.role, "communication", scattered)],
                [block_item(self.role, "communication", stepping, 0 if offloads else norm)],
            ]
        flat = block_item(self.role, "gradients", width * (trained if stage == 1 else bucket))
        if stage == 2 and self.accumulates and width < 4:  # they were accumulated in float32
            accumulated_item = block_item(self.role, "gradients", 0 if offloads else 4 * trained // part)
            if ranks == 1:  # here too, a flat copy of the bucket
                adding = block_item(self.role, "communication", bucket * width)
            return [[flat, adding, accumulated_item]]
        stepping = 0 if offloads else (width + (4 if width < 4 else 0)) * trained // part
        return [[flat, adding], [flat, block_item(self.role, "communication", stepping)]]

    def copied(self) -> list[MemoryItem]:
        """Return the copy on the device of a frozen model's weights, which wait on the host between its passes."""
        placement = self.placement
        if placement.role.trained or placement.zero_stage == 3 or not self._on_host(placement.offloads_parameters):
            return []
        return [self._item("weights", self.weights(), self.environment.width)]

    def gathered(self) -> list[MemoryItem]:
        """Return the layers that are temporarily gathered at ZeRO-3."""
        width = self.environment.width
        if self.placement.zero_stage < 3 or self.environment.ranks == 1:
            return []
        if not self.placement.engine.zero_persistence_threshold:
            gathered = self._item("gathered layers", max(self._layer_bytes(), width * self.shape.tokens), width)
            return [gathered, *self._unpacked()]
        # DeepSpeed counts a byte of packed weights like a number.
        counted = self.parameters - self._quantized + self._bytes(self._quantized, self._quantized)
        whole = self._bytes(self.parameters, self._quantized)
        # Prefetched parameters stay in a flat buffer until the last of them has been copied out and used. A host
        # prefetches none (rlhf.engine.deepspeed_config).
        prefetched = 0 if self.environment.unified_memory else whole * min(counted, _PREFETCH) // counted
        live = self._item("gathered layers", whole * min(counted, _MAX_LIVE) // counted, width)
        return [live, block_item(self.role, "gathered layers", prefetched), *self._unpacked()]

    def gathered_for_generation(self, config: Config) -> list[MemoryItem]:
        """Return the weights that generation reads at ZeRO-3, in addition to the shards."""
        width, mode, items = self.environment.width, config.ppo.generation_weights, []
        if self.placement.zero_stage == 3 and self.environment.ranks > 1:
            size = self.weights(whole=True)
            if mode == "layerwise":
                size = self._layer_bytes() + width * self.shape.tokens
            elif mode == "tensor_parallel":  # of unpacked weights
                size = width * self.parameters // (config.ppo.tensor_parallel or self.environment.ranks)
            items.append(MemoryItem(self.role, "gathered layers", size))
            items += self._unpacked()
        return items

    def merged(self, config: Config) -> list[MemoryItem]:
        """Return the copy of the weights with merged adapters, which rollouts read."""
        width, items = self.environment.width, []
        copied = self.shape.in_linears * width
        can_merge = self.placement.lora.rank and self.placement.engine.frozen == "auto"  # not into quantized weights
        if can_merge and config.lora.merges(copied, self.environment.device_memory):
            items.append(self._item("merged weights", copied, width))
            items.append(block_item(self.role, "merged weights", *2 * [4 * self._widest]))  # sums in float32
        return items

    def converted(self, config: Config, *, copied: bool) -> list[MemoryItem]:
        """Return the additional memory of weights in the device's layout for rollouts: a copy, or one layer at a time.

        The output layer's are converted too, and in place only if they are not the embedding's.
        """
        width, mode = self.environment.width, config.ppo.generation_weights
        if not self.environment.converts_weights:
            return []
        numbers, output = self.shape.in_linears - self._quantized, self.shape.tokens
        if self.placement.zero_stage == 3 and self.environment.ranks > 1 and mode != "whole":
            if mode == "layerwise":
                return []
            parts = config.ppo.tensor_parallel or self.environment.ranks
            numbers, output = self.shape.in_linears // parts, output // parts
        if copied:
            joined = 2 * self._widest if numbers else 0  # a gate and its input, which become one product
            items = [self._item("converted weights", (numbers + output) * width, width)]
            return [*items, block_item(self.role, "converted weights", joined * width)]
        largest = max(self._widest if numbers else 0, 0 if self.shape.tied else output)
        return [block_item(self.role, "converted weights", largest * width)]

    def saving(self) -> list[MemoryItem]:
        """Return the additional memory of exports and checkpoints: one whole parameter at a time, on the host."""
        return [block_item(self.role, "saving", 4 * self.shape.largest, host=self._on_host(True))]

    def _unpacked(self) -> list[MemoryItem]:
        """Return the largest quantized matrix, unpacked for its product, and what unpacking it uses temporarily.

        Per number, as `accelerators.quantized` does it: `int8` in two steps of the compute precision; `int4` in a byte,
        a float32 and, if that is narrower, the compute precision.
        """
        if not self._quantized:
            return []
        width = self.environment.width
        bytes_each = 2 * width if self.placement.engine.frozen == "int8" else 5 + (width if width < 4 else 0)
        largest = max(linear.inputs * linear.outputs for linear in self.shape.linears)
        return [block_item(self.role, "gathered layers", bytes_each * largest)]

    @property
    def _quantized(self) -> int:
        """The number of quantized weights."""
        is_quantized = self.placement.engine.frozen != "auto" and self.trained < self.parameters
        return self.shape.in_linears if is_quantized else 0

    def _bytes(self, numbers: int, quantized: int) -> int:
        """Return the bytes of `numbers`, of which some are `quantized`."""
        packed = _quantized_bytes(quantized, self.placement.engine.frozen)
        return (numbers - quantized) * self.environment.width + packed

    def _layer_bytes(self) -> int:
        """Return the bytes of one layer's weights."""
        return self._bytes(self.shape.layer, self._quantized // self.shape.layers)

    def _item(self, kind: MemoryKind, size: int, width: int, host: bool = False) -> MemoryItem:
        """Return an item whose bytes are spread over parameters: in a block for each, or flat from ZeRO 1 on."""
        flat = self.placement.zero_stage in (1, 2) and not self.placement.lora.rank and self.trained
        if (flat and kind != "gradients") or size < BLOCK:
            return block_item(self.role, kind, size, host=host)
        if self.trained < self.parameters and "weights" not in kind:
            part = 1 - self._large_trained(width) / self.trained if self.trained else 1.0
        else:
            part = self._small(width) / (self.parameters * width)
        return MemoryItem(self.role, kind, size, host, small=int(size * part))

    def _small(self, width: int) -> int:
        """Return the bytes of parameters that are smaller than `BLOCK`."""
        shape = self.shape
        small = [linear.numbers for linear in shape.linears if linear.numbers * width < BLOCK]
        inside = shape.layers * (sum(small) + shape.norms)
        return width * (inside + (shape.tokens if shape.tokens * width < BLOCK else 0))

    def _large_trained(self, width: int) -> int:
        """Return the numbers of embeddings that are trained next to adapters, if they are not smaller than `BLOCK`."""
        trained = self.also_trained and "embeddings" in self.placement.lora.also_train
        if not trained or self.shape.tokens * width < BLOCK:
            return 0
        return self.shape.tokens * (1 if self.shape.tied or self.scalar_head else 2)

    def _persistent(self) -> int:
        """Return the number of elements in parameters below ZeRO-3's threshold, which stay whole."""
        threshold, rank = self.placement.engine.zero_persistence_threshold, self.placement.lora.rank
        small = self.shape.norms + sum(linear.outputs for linear in self.shape.linears if linear.bias)
        adapters = [side * rank for linear in self.shape.linears for side in (linear.inputs, linear.outputs)]
        small += sum(numbers for numbers in adapters if numbers < threshold)
        return self.shape.layers * small if threshold > self.shape.hidden else 0

    @property
    def _widest(self) -> int:
        """Numbers in the largest matrix of a layer."""
        return max(linear.inputs * linear.outputs for linear in self.shape.linears)

    @property
    def _sharers(self) -> int:
        """The number of ranks that share the optimizer's state."""
        return self.environment.ranks if self.placement.zero_stage else 1

    def _bucket(self) -> int:
        """Return the elements of the bucket for gradients; on a host, only those that are written to."""
        size = self.placement.bucket(self.trained)
        return min(size, self.trained) if self.environment.unified_memory else size

    def _on_host(self, offloaded: bool) -> bool:
        return offloaded and not self.environment.unified_memory


def _quantized_bytes(numbers: int, kind: str) -> int:
    """Return the bytes of quantized weights and scales: int8 has one per row, int4 a float32 for each 64 weights."""
    return numbers if kind == "int8" else numbers // 2 + numbers // 16
