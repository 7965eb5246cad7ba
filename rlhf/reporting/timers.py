"""How long the phases of a step take, how much arithmetic that is, and the memory that it takes.

A stage marks its phases and says what was done in them; seconds, rates, shares and sums over all steps flow out. The
device is waited for at the end of a phase and nowhere else. A profiler sees each phase as a range of its name.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.profiler import record_function

if TYPE_CHECKING:
    from accelerators import Accelerator, Precision

OTHER = "other"
"""What is left of a step beside its phases."""

PHASES = ("generation", "scoring", "training")
"""Those of a PPO step; the other stages' steps are `training` alone."""

_OF_THE_MACHINE = re.compile(
    rf"(\w+_)?(seconds|per_second|tflops)|peak_memory|peak_share|({'|'.join((*PHASES, OTHER))})_share"
)


def of_the_machine(key: str) -> bool:
    """Whether a recorded number tells how fast a step was, and not what came of it: it is never the same twice."""
    return _OF_THE_MACHINE.fullmatch(key) is not None


class Part(NamedTuple):
    """A phase of a step: how long it took, the tokens that it worked on, and its operations on one device.

    None of what nobody has said.
    """

    seconds: float
    tokens: float | None = None
    flops: float | None = None

    def rates(self) -> dict[str, float]:
        """Tokens, and 10^12 operations, a second."""
        found = {} if self.tokens is None else {"tokens_per_second": self.tokens / self.seconds}
        return found | ({} if self.flops is None else {"tflops": self.flops / self.seconds / 1e12})

    def __add__(self, other: Part) -> Part:  # type: ignore[override]
        """Both, one after the other."""
        tokens = None if self.tokens is None or other.tokens is None else self.tokens + other.tokens
        flops = None if self.flops is None or other.flops is None else self.flops + other.flops
        return Part(self.seconds + other.seconds, tokens, flops)


class Phases:
    """The phases of a stage's steps.

    Attributes:
        seconds: of the latest step, all of it.
        peak_memory: most bytes that were in use at one time in any step so far, or between them.
        totals: seconds of all steps by phase and as `step`; `flops`, of one device.
    """

    def __init__(self, accelerator: Accelerator, precision: Precision, ranks: int = 1) -> None:
        self._accelerator, self._ranks = accelerator, ranks
        self._peak_flops = accelerator.info().peak_flops.get(precision.name)
        self.seconds, self.peak_memory = 0.0, 0
        self.totals: dict[str, float] = {}
        self._begin()

    def _begin(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._flops: dict[str, float] = defaultdict(float)
        self._tokens: dict[str, float] = defaultdict(float)
        self._known = True

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """A phase of the step; what the device was given in it counts to it. Phases do not nest."""
        begun = time.perf_counter()
        with record_function(f"rlhf/{name}"):
            yield
            self._accelerator.synchronize()
        self._seconds[name] += time.perf_counter() - begun

    def did(self, name: str, *, tokens: float, flops: float | None) -> None:
        """Say what was done in a phase, by all ranks together; `flops` None: a model's shape is not known."""
        self._tokens[name] += tokens
        self._flops[name] += flops or 0.0
        self._known = self._known and flops is not None

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step, all of it."""
        self._begin()
        self.peak_memory = self.most_memory()
        self._accelerator.reset_peak()
        begun = time.perf_counter()
        with record_function("rlhf/step"):
            yield
            self._accelerator.synchronize()
        self.seconds = time.perf_counter() - begun
        step = {"step": self.seconds, "flops": sum(self._flops.values()) / self._ranks}
        self.totals |= {name: self.totals.get(name, 0.0) + more for name, more in (self._seconds | step).items()}

    def most_memory(self) -> int:
        """As `peak_memory`, up to now."""
        return max(self.peak_memory, self._accelerator.memory().peak)

    def parts(self) -> dict[str, Part]:
        """The latest step's phases, and what is left of it beside them."""
        seconds = self._whole(self._seconds, self.seconds)
        flops = {name: value / self._ranks for name, value in self._flops.items()} if self._known else {}
        return {name: Part(seconds[name], self._tokens.get(name), flops.get(name)) for name in seconds}

    def numbers(self) -> dict[str, float]:
        """What is recorded of the latest step; see docs/metrics.md."""
        found = {"seconds": self.seconds, "peak_memory": float(self._accelerator.memory().peak)}
        if len(self._seconds) > 1:
            for name, part in self.parts().items():
                found |= {f"{name}_seconds": part.seconds, f"{name}_share": part.seconds / self.seconds}
                found |= {f"{name}_{rate}": value for rate, value in part.rates().items()}
        elif self._tokens:
            found["tokens_per_second"] = sum(self._tokens.values()) / self.seconds
        return found | self._speed(sum(self._flops.values()) / self._ranks, self.seconds)

    def summary(self) -> dict[str, Any]:
        """What a stage's summary says of all its steps."""
        totals = self.totals
        if not totals:
            return {}
        seconds = {name: value for name, value in totals.items() if name not in ("step", "flops")}
        found: dict[str, Any] = {"phases": self._whole(seconds, totals["step"])} if len(seconds) > 1 else {}
        return found | self._speed(totals["flops"], totals["step"])

    def _whole(self, seconds: dict[str, float], step: float) -> dict[str, float]:
        return {**seconds, OTHER: max(step - sum(seconds.values()), 0.0)}

    def _speed(self, flops: float, seconds: float) -> dict[str, float]:
        """Of `flops` on one device."""
        if not (self._known and flops):
            return {}
        peak = {"peak_share": flops / seconds / self._peak_flops} if self._peak_flops else {}
        return {"tflops": flops / seconds / 1e12, **peak}
