"""Timers of a stage's phases: the running phase, the duration of each phase of a step, its arithmetic and memory.

A stage marks its phases and counts their work; the timers compute seconds, rates, shares, and sums over all steps.
Marks of the accelerator say when its device was done with a phase; the timers wait only at the end of a step. A
profiler records each phase as a range with its name, by which `profile_operators` assigns operators to phases.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rlhf.utils.activity import activity

if TYPE_CHECKING:
    from accelerators import Accelerator, Precision


Phase = Literal[
    "preparation",
    "loading",
    "set-up",
    "generation",
    "scoring",
    "training",
    "evaluation",
    "reading a checkpoint",
    "writing a checkpoint",
    "saving",
]
"""The phases of a stage, by their names in records, plans and messages."""

STEP_PHASES: tuple[Phase, ...] = ("generation", "scoring", "training")
"""Timed phases of a PPO step; steps of other stages are `training` only."""

OTHER = "other"
"""The rest of a step outside its phases."""

_RANGE, _STEP_RANGE = "rlhf/", "rlhf/step"
_MACHINE_DEPENDENT = re.compile(
    rf"(\w+_)?(seconds|per_second|tflops)|peak_memory|peak_share|({'|'.join((*STEP_PHASES, OTHER))})_share"
)


def is_machine_dependent(key: str) -> bool:
    """Return whether a recorded number measures speed or memory, and therefore differs between equal runs."""
    return _MACHINE_DEPENDENT.fullmatch(key) is not None


class PhaseTime(NamedTuple):
    """Seconds of a phase of a step, and its work; None if it is not known, or the phase has no such work.

    Attributes:
        tokens: the tokens that it worked on, of all ranks.
        flops: the FLOPs of one device.
        decode_steps: the decoding steps of this rank.
        bytes_read: the bytes of weights that this rank read in them.
    """

    seconds: float
    tokens: float | None = None
    flops: float | None = None
    decode_steps: float | None = None
    bytes_read: float | None = None

    def rates(self) -> dict[str, float]:
        """Return tokens, TFLOPs and bytes a second, and seconds a decoding step."""
        seconds = self.seconds
        rates = {} if self.tokens is None else {"tokens_per_second": self.tokens / seconds}
        rates |= {} if self.flops is None else {"tflops": self.flops / seconds / 1e12}
        rates |= {} if self.decode_steps is None else {"step_seconds": seconds / self.decode_steps}
        return rates | ({} if self.bytes_read is None else {"bytes_per_second": self.bytes_read / seconds})

    def plus(self, other: PhaseTime) -> PhaseTime:
        """Return the sum of two phases that follow each other."""
        pairs = zip(self[1:], other[1:])
        work = [None if one is None or another is None else one + another for one, another in pairs]
        return PhaseTime(self.seconds + other.seconds, *work)


class PhaseTimers:
    """Timers of a stage's phases.

    Attributes:
        current: the running phase; after an error, the one in which it was raised.
        seconds: duration of the latest step.
        peak_memory: most bytes that were in use at one time in any step so far, or between them.
        totals: seconds of all steps by phase and as `step`; `flops`, of one device.
        waits: wait for the device at the end of each phase, for `profile_operators`.
    """

    def __init__(self, accelerator: Accelerator, precision: Precision, ranks: int = 1) -> None:
        self._accelerator, self._ranks = accelerator, ranks
        self._peak_flops = accelerator.info().peak_flops.get(precision.name)
        self.current: Phase = "preparation"
        self.seconds, self.peak_memory = 0.0, 0
        self.totals: dict[str, float] = {}
        self.waits = False
        self._start()

    def _start(self) -> None:
        self._seconds, self._flops, self._tokens = (defaultdict[str, float](float) for _ in range(3))
        self._decode_steps, self._bytes_read = (defaultdict[str, float](float) for _ in range(2))
        self._known = True  # the FLOPs of all phases
        self._marks: list[tuple[Phase, Any, Any]] = []  # of phases, at their starts and ends

    @contextmanager
    def running(self, phase: Phase) -> Iterator[None]:
        """Record the running phase, for messages; phases may nest, and the innermost counts."""
        outer, self.current = self.current, phase
        activity.phase = phase
        yield
        self.current = activity.phase = outer  # not after an error, because its message names the phase

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Time a phase of the step on the device. Timed phases cannot be nested."""
        start = self._accelerator.mark()
        with self.running(phase), self._accelerator.named_range(f"{_RANGE}{phase}"):
            yield
            if self.waits:
                self._accelerator.synchronize()
        self._marks.append((phase, start, self._accelerator.mark()))

    def count_work(self, phase: Phase, *, tokens: float, flops: float | None) -> None:
        """Add the work of all ranks in a phase; `flops` is None if a model's shape is not known."""
        self._tokens[phase] += tokens
        self._flops[phase] += flops or 0.0
        self._known = self._known and flops is not None

    def count_decode_steps(self, phase: Phase, steps: int, *, step_bytes: float | None) -> None:
        """Add decoding steps of this rank in a phase; each reads `step_bytes` of weights, None if that is not known."""
        self._decode_steps[phase] += steps
        if step_bytes is not None:
            self._bytes_read[phase] += steps * step_bytes

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a whole step."""
        self._start()
        self.peak_memory = self.highest_memory()
        self._accelerator.reset_peak()
        start = time.perf_counter()
        with self._accelerator.named_range(_STEP_RANGE):
            yield
            self._accelerator.synchronize()
        self.seconds = time.perf_counter() - start
        for phase, begin, end in self._marks:
            self._seconds[phase] += end.seconds_since(begin)
        step = {"step": self.seconds, "flops": sum(self._flops.values()) / self._ranks}
        self.totals |= {name: self.totals.get(name, 0.0) + value for name, value in (self._seconds | step).items()}

    def highest_memory(self) -> int:
        """Return `peak_memory` up to now."""
        return max(self.peak_memory, self._accelerator.memory().peak)

    def phase_times(self) -> dict[str, PhaseTime]:
        """Return the latest step's phases, and the rest of it as `other`."""
        seconds = self._with_rest(self._seconds, self.seconds)
        flops = {name: value / self._ranks for name, value in self._flops.items()} if self._known else {}
        work = (self._tokens, flops, self._decode_steps, self._bytes_read)
        return {name: PhaseTime(seconds[name], *(counts.get(name) for counts in work)) for name in seconds}

    def metrics(self) -> dict[str, float]:
        """Return the recorded metrics of the latest step; docs/metrics.md defines the keys."""
        metrics = {"seconds": self.seconds, "peak_memory": float(self._accelerator.memory().peak)}
        if len(self._seconds) > 1:
            for name, phase in self.phase_times().items():
                metrics |= {f"{name}_seconds": phase.seconds, f"{name}_share": phase.seconds / self.seconds}
                metrics |= {f"{name}_{rate}": value for rate, value in phase.rates().items()}
        elif self._tokens:
            metrics["tokens_per_second"] = sum(self._tokens.values()) / self.seconds
        return metrics | self._speed(sum(self._flops.values()) / self._ranks, self.seconds)

    def summary(self) -> dict[str, Any]:
        """Return the summary's entries about all steps of the stage."""
        totals = self.totals
        if not totals:
            return {}
        seconds = {name: value for name, value in totals.items() if name not in ("step", "flops")}
        phases = {"phases": self._with_rest(seconds, totals["step"])} if len(seconds) > 1 else {}
        return phases | self._speed(totals["flops"], totals["step"])

    def _with_rest(self, seconds: dict[str, float], step: float) -> dict[str, float]:
        return {**seconds, OTHER: max(step - sum(seconds.values()), 0.0)}

    def _speed(self, flops: float, seconds: float) -> dict[str, float]:
        """Return the rate of `flops` on one device, and its share of the device's peak."""
        if not (self._known and flops):
            return {}
        peak = {"peak_share": flops / seconds / self._peak_flops} if self._peak_flops else {}
        return {"tflops": flops / seconds / 1e12, **peak}


class OperatorTime(NamedTuple):
    """Seconds of an operator, or of a device's kernel, in one phase, without those of the operators it calls."""

    name: str
    phase: str
    seconds: float
    calls: int


class StepProfile(NamedTuple):
    """Seconds of one recorded step, its operators, longest first, and the seconds in which none ran."""

    seconds: float
    operators: list[OperatorTime]
    idle: float
    on_device: bool


def profile_operators(events: Iterable[Any]) -> StepProfile:
    """Return the operators of one step by phase.

    If there is a device in addition to the CPU, its kernels are counted, because the CPU only launches them.

    Args:
        events: of `torch.profiler.profile.events()`, times in microseconds, with the ranges of `PhaseTimers`.
    """
    recorded = list(events)
    host = [event for event in recorded if event.device_type.name == "CPU"]
    device = [event for event in recorded if event.device_type.name != "CPU"]
    ranges = [event for event in host if event.name.startswith(_RANGE)]
    (step,) = (event.time_range for event in ranges if event.name == _STEP_RANGE)
    phases = [(event.name.removeprefix(_RANGE), event.time_range) for event in ranges if event.name != _STEP_RANGE]
    seconds, calls = defaultdict[tuple[str, str], float](float), Counter[tuple[str, str]]()
    for event in device or host:
        start = event.time_range.start
        if event.name.startswith(_RANGE) or event.is_user_annotation or not step.start <= start <= step.end:
            continue
        # A phase ends when the device is done, so all operators that start within it belong to it, on any thread or
        # stream.
        key = event.name, next((name for name, span in phases if span.start <= start <= span.end), OTHER)
        microseconds = event.self_device_time_total if device else event.self_cpu_time_total
        seconds[key] += microseconds / 1e6
        calls[key] += 1
    longest = sorted(seconds, key=seconds.__getitem__, reverse=True)
    operators = [OperatorTime(*key, seconds[key], calls[key]) for key in longest]
    duration = (step.end - step.start) / 1e6
    return StepProfile(duration, operators, max(duration - sum(seconds.values()), 0.0), bool(device))
