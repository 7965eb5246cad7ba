"""Which of a stage's weights change in training, and whether all ranks have the same.

Some numbers of each tensor are kept from the start, and compared later bit for bit: an update moves nearly all numbers
of a tensor, so a few of them suffice. Ranks compare sums over the bits of all numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlhf.engine import distributed
from rlhf.engine.engine import Metrics, TrainingEngine
from rlhf.engine.fp32_weights import CHUNK, get_fp32_weights
from rlhf.models.quantized import find_quantized_layers
from rlhf.models.weight_loading import is_sharded

if TYPE_CHECKING:
    from accelerators import Accelerator

SAMPLE = 256
"""Numbers of a tensor that are compared with those from the start."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightSamples:
    """Samples of the weights of a stage's models, taken before its first step in this process.

    Weights in a layout of the device's own, which `inference_weights` makes, are left out.
    """

    def __init__(self, models: Mapping[str, TrainingEngine | nn.Module], accelerator: Accelerator) -> None:
        """Sample all weights.

        Args:
            models: engines of trained models, modules of frozen ones.
        """
        self._host = accelerator.host_device()
        self._engines = [model for model in models.values() if isinstance(model, TrainingEngine)]
        modules = [model.module if isinstance(model, TrainingEngine) else model for model in models.values()]
        layers = [layer for module in modules for layer in find_quantized_layers(module).values()]
        weights: list[Tensor] = [weight for module in modules for weight in module.parameters()]
        weights += [weight for layer in layers for weight in layer.buffers()]
        self._weights = [
            weight for weight in {id(weight): weight for weight in weights}.values() if weight.layout == torch.strided
        ]
        self._before = self._sample(self._weights)
        self._trained_before = [self._sample(get_fp32_weights(engine.optimizer)) for engine in self._engines]
        self._steps_before = [engine.steps - engine.skipped for engine in self._engines]

    @torch.no_grad()
    def compare(self) -> Metrics:
        """Return how many weights have changed that should not; every rank calls it.

        Returns:
            changed_frozen_weights: frozen tensors that have changed. unequal_weights: tensors that differ between
            ranks, in any bit; those that ZeRO 3 shards are not compared.
        """
        now = self._sample(self._weights)
        changed = sum(
            _digest(old) != _digest(new)
            for weight, old, new in zip(self._weights, self._before, now, strict=True)
            if not weight.requires_grad
        )
        ranks = distributed.all_gather_objects((changed, self._sum_whole_weights()))
        return {
            "changed_frozen_weights": float(max(count for count, _ in ranks)),
            "unequal_weights": float(sum(len(set(sums)) > 1 for sums in zip(*(sums for _, sums in ranks)))),
        }

    @torch.no_grad()
    def count_unchanged(self) -> Metrics:
        """Return the share of a model's trained tensors that have not changed, of the model with the largest share.

        Models count that have gradients and a learning rate, and whose last update was not skipped. At ZeRO 1 to 3, a
        tensor is a rank's share of a group. Every rank calls it.

        Returns:
            unchanged_weights; nothing if no rank has weights in memory.
        """
        counts: list[tuple[int, int]] = []
        for engine, before, steps in zip(self._engines, self._trained_before, self._steps_before, strict=True):
            now = self._sample(get_fp32_weights(engine.optimizer))
            pairs = [(old, new) for old, new in zip(before, now, strict=True) if len(new)]  # NVMe leaves empty ones
            learns = engine.steps - engine.skipped > steps and 0 < engine.grad_norm() < math.inf
            moves = any(group["lr"] for group in engine.optimizer.param_groups)
            same = sum(_digest(old) == _digest(new) for old, new in pairs)
            counts.append((same if learns and moves else 0, len(pairs)))
        sums = [
            (sum(same for same, _ in ranks), sum(count for _, count in ranks))
            for ranks in zip(*distributed.all_gather_objects(counts), strict=True)
        ]
        shares = [same / count for same, count in sums if count]
        return {"unchanged_weights": max(shares)} if shares else {}

    def _sum_whole_weights(self) -> list[int]:
        """Return a sum over the bits of each tensor that all ranks have; empty with one rank."""
        if distributed.world().size == 1:
            return []
        sums = [_sum_bits(weight.detach()).reshape(1) for weight in self._weights if not is_sharded(weight)]
        return [int(number) for number in self._to_host(sums)]

    def _sample(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return some numbers of each tensor, in the host's memory; of a sharded parameter, of this rank's share."""
        return self._to_host([_select_numbers(getattr(tensor, "ds_tensor", tensor).detach()) for tensor in tensors])

    def _to_host(self, samples: list[Tensor]) -> list[Tensor]:
        """Copy flat tensors of any devices to the host's memory."""
        alike = defaultdict[tuple[torch.device, torch.dtype], list[int]](list)
        for place, numbers in enumerate(samples):
            alike[numbers.device, numbers.dtype].append(place)
        for places in alike.values():  # one copy from the device for all
            joined = torch.cat([samples[place] for place in places]).to(self._host, copy=True)
            for place, numbers in zip(places, joined.split([len(samples[place]) for place in places]), strict=True):
                samples[place] = numbers
        return samples


def _select_numbers(tensor: Tensor) -> Tensor:
    """Return at most `SAMPLE` numbers of a tensor, spread over it; of one that is not contiguous, the first column."""
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor
    while flat.dim() > 1:
        flat = flat.select(-1, 0)
    return flat[:: max(1, -(-len(flat) // SAMPLE))]


def _sum_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's numbers, each read as an integer, on its device; it wraps around."""
    numbers = tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])
    # In chunks, because each is converted.
    return torch.stack([chunk.sum(dtype=torch.int64) for chunk in numbers.split(CHUNK)]).sum()


def _digest(numbers: Tensor) -> bytes:
    return hashlib.blake2b(numbers.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).digest()
