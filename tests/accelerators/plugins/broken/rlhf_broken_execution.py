"""Backends of `rlhf_broken` that run or record functions wrongly; each is the CPU's but for one fault."""

import contextlib
import random

import torch

from accelerators import CaptureError
from accelerators.backends.cpu.backend import CPU


class BoundaryWaits(CPU):
    name = "boundary-waits"

    def step_boundary(self, tag):
        self.synchronize()


class BoundaryComputes(CPU):
    name = "boundary-computes"

    def step_boundary(self, tag):
        torch.zeros(1)


class BoundaryDraws(CPU):
    name = "boundary-draws"

    def step_boundary(self, tag):
        random.random()


class BoundaryCompiles(CPU):
    name = "boundary-compiles"
    _compiled = 0

    def step_boundary(self, tag):
        self._compiled += 1

    def compilations(self):
        return self._compiled


class LazyBoundary(BoundaryWaits):
    """Not broken: a lazy backend has work to do at its boundaries."""

    name = "lazy-boundary"

    def is_lazy(self):
        return True


class CaptureStale(CPU):
    """Replays the first call, whatever the input."""

    name = "capture-stale"

    def capture(self, fn, key):
        fn, first = super().capture(fn, key), []

        def replay(x):
            first[:] = first or [x]
            return fn(first[0])

        return replay


class CaptureOverwrites(CPU):
    """Gives out the tensors that the next replay writes into."""

    name = "capture-overwrites"

    def capture(self, fn, key):
        fn, held = super().capture(fn, key), {}

        def replay(x):
            for name, value in fn(x).items():
                held.setdefault(name, torch.empty_like(value)).copy_(value)
            return dict(held)

        return replay


class CaptureLetsItemThrough(CPU):
    name = "capture-lets-item-through"

    def capture(self, fn, key):
        return fn


class CaptureOtherError(CPU):
    name = "capture-other-error"

    def capture(self, fn, key):
        checked = super().capture(fn, key)

        def call(*arguments):
            with contextlib.suppress(CaptureError):
                return checked(*arguments)
            raise RuntimeError("operation not permitted when stream is capturing")

        return call
