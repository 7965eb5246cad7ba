"""The defaults of a device whose operators wait in streams, as those of GPUs and NPUs do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from accelerators.accelerator import Accelerator
from accelerators.marks import EventMark
from accelerators.shapes import ShapePolicy


class StreamAccelerator(Accelerator):
    """A device that torch knows, with streams, events and a separate memory.

    If its runtime can record a stream, the backend sets `graphs` and offers `stream_graphs`.
    """

    chunk_elements = 1 << 24
    absent: ClassVar[Mapping[str, str]] = {
        "inference_weights": "its matrix products read weights in the order that they are trained in",
        "fused_layers": "torch has no fused form of such layers for a device that trains; a plugin may bring one",
        "sampling": "torch draws by several operators; a plugin may bring one kernel",
    }

    def mark(self) -> EventMark:
        """Return an event in the current stream."""
        return EventMark(self.device())

    def shape_policy(self) -> ShapePolicy:
        """Return few lengths, because each is a separate recording, in multiples of a matrix unit's 16."""
        return ShapePolicy("bucketed", pad_to_multiple=16, first=64)

    def pins_memory(self) -> bool:
        """Return True: copies from page-locked memory overlap with operators."""
        return True
