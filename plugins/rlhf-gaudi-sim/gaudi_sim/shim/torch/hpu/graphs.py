"""HPU graphs: operators recorded once while they run, and replayed into the same tensors. In lazy mode only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gaudi_sim.build import load

from .streams import stream as streaming

_device = load()


class HPUGraph:
    """One recording; freed with this object."""

    _handle: int | None = None
    is_recording = False
    """True while any graph is recorded."""

    def capture_begin(self) -> None:
        """Record from now on; to read a value on the host, or to wait for the device, is an error until the end."""
        _device.capture_begin()
        HPUGraph.is_recording = True

    def capture_end(self) -> None:
        """End the recording."""
        self.reset()
        HPUGraph.is_recording = False
        self._handle = _device.capture_end()

    def replay(self, asynchronous: bool = False) -> None:
        """Run the recorded operators again, on the tensors that they were recorded with."""
        if self._handle is None:
            raise RuntimeError("HPUGraph.replay: nothing has been recorded; call capture_begin and capture_end first")
        _device.replay(self._handle)

    def reset(self) -> None:
        """Forget what was recorded."""
        if self._handle is not None:
            _device.free(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.reset()


@contextmanager
def graph(hpu_graph: HPUGraph, stream: torch.Stream | None = None, **_: Any) -> Iterator[None]:
    """Record the block."""
    with streaming(stream):
        hpu_graph.capture_begin()
        try:
            yield
        finally:
            hpu_graph.capture_end()
