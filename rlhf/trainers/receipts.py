"""Receipts of weights: training changes the weights that it should, no others, and the same on all ranks.

A sample of each tensor is kept from the start of the process, and compared later bit for bit: an update moves nearly
all numbers of a tensor, so a few of them suffice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlhf.engine import distributed
from rlhf.engine.engine import Metrics, TrainingEngine
from rlhf.engine.fp32_weights import get_fp32_weights
from rlhf.models.weight_loading import is_sharded

if TYPE_CHECKING:
    from accelerators import Accelerator

SAMPLE = 256
"""Numbers of a tensor that are compared."""


class WeightReceipts:
    """Samples of the weights of a stage's models, and what has become of them."""

    def __init__(self, models: Mapping[str, TrainingEngine | nn.Module], accelerator: Accelerator) -> None:
        """Sample all weights; every rank calls it.

        Args:
            models: engines of trained models, modules of frozen ones.
        """
        self._host = accelerator.host_device()
        engines = [model for model in models.values() if isinstance(model, TrainingEngine)]
        modules = [model.module if isinstance(model, TrainingEngine) else model for model in models.values()]
        parameters = list({id(weight): weight for module in modules for weight in module.parameters()}.values())
        self._optimizers = [engine.optimizer for engine in engines]
        self._frozen = [weight for weight in parameters if not weight.requires_grad]
        self._whole = [weight for weight in parameters if not is_sharded(weight)]
        self._frozen_before = self._sample(self._frozen)
        self._trained_before = [self._sample(get_fp32_weights(optimizer)) for optimizer in self._optimizers]

    @torch.no_grad()
    def compare(self) -> Metrics:
        """Return what has changed since the start; every rank calls it.

        Returns:
            changed_frozen_weights: frozen tensors that have changed. unequal_weights: whole tensors that differ between
            ranks. unchanged_weights: the share of a model's trained tensors that have not changed, of the model with
            the largest share; at ZeRO 1 to 3 the tensors are shares of groups. The largest of all ranks.
        """
        changed = _count_changes(self._frozen_before, self._sample(self._frozen))
        trained = [self._sample(get_fp32_weights(optimizer)) for optimizer in self._optimizers]
        unchanged = [
            1 - _count_changes(before, now) / max(len(now), 1)
            for before, now in zip(self._trained_before, trained, strict=True)
        ]
        samples = [numbers.numpy().tobytes() for numbers in map(_bits, self._sample(self._whole))]
        ranks = distributed.all_gather_objects((changed, max(unchanged, default=0.0), samples))
        return {
            "changed_frozen_weights": float(max(changed for changed, _, _ in ranks)),
            "unchanged_weights": max(unchanged for _, unchanged, _ in ranks),
            "unequal_weights": float(sum(len(set(numbers)) > 1 for numbers in zip(*(rank[2] for rank in ranks)))),
        }

    def _sample(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return some numbers of each tensor, in the host's memory; of a sharded parameter, of this rank's share."""
        pieces = [_stride(getattr(tensor, "ds_tensor", tensor).detach()) for tensor in tensors]
        alike = defaultdict[tuple[torch.device, torch.dtype], list[int]](list)
        for place, piece in enumerate(pieces):
            alike[piece.device, piece.dtype].append(place)
        for places in alike.values():  # one copy from the device for all
            joined = torch.cat([pieces[place] for place in places]).to(self._host, copy=True)
            for place, numbers in zip(places, joined.split([len(pieces[place]) for place in places])):
                pieces[place] = numbers
        return pieces


def _stride(tensor: Tensor) -> Tensor:
    """Return at most `SAMPLE` numbers of a tensor, spread over it."""
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor[:: max(1, len(tensor) // 16)].reshape(-1)
    return flat[:: max(1, -(-len(flat) // SAMPLE))]


def _bits(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)


def _count_changes(before: Sequence[Tensor], now: Sequence[Tensor]) -> int:
    return sum(not torch.equal(_bits(old), _bits(new)) for old, new in zip(before, now, strict=True))
