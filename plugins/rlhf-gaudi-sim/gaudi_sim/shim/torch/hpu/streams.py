"""Streams and events. PyTorch's own: the device tells them that all that was queued is done already."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Event, Stream

__all__ = ["Event", "Stream", "current_stream", "default_stream", "set_stream", "stream"]

_default = torch.accelerator.current_stream()


def default_stream(device: Any = None) -> Stream:
    """Return the default stream."""
    return _default


def current_stream(device: Any = None) -> Stream:
    """Return the stream that work goes to now."""
    return torch.accelerator.current_stream()


def set_stream(stream: Stream) -> None:
    """Send work to a stream from now on."""
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Send the block's work to a stream; None changes nothing."""
    before = current_stream()
    set_stream(stream or before)
    try:
        yield
    finally:
        set_stream(before)
