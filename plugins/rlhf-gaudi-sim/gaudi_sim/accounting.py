"""What a Gaudi would have compiled, by line of code, and in lazy mode by step boundary.

In lazy mode, step boundaries come in from the shim's `mark_step`; the C++ module says what each of them ended. In eager
mode, graphs come in from the backend of torch.compile. Out come the counts of the runtime's metrics, and `report()`,
which RLHF_GAUDI_SIM_REPORT=FILE leaves as JSON when rank 0 ends.

Strict mode (RLHF_GAUDI_SIM_STRICT=1) refuses things inside a step, where they would cost every step: host reads,
operands on mixed devices, float64. A step begins and ends at the boundaries that `OPENING` and `CLOSING` name; inside
are forward, loss and backward of a micro-batch, and the scoring of a rollout's first micro-batch. Outside are logging,
and DeepSpeed's initialization and updates, which read norms on the host and compute them in float64 on every device.
Those reads are counted. A recording refuses every read, always.
"""

from __future__ import annotations

import atexit
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gaudi_sim.activation import NAME

OPENING = re.compile(r".*/before-forward|rollout/end")
CLOSING = re.compile(r".*/backward|score/reward")

REPORT_VARIABLE = "RLHF_GAUDI_SIM_REPORT"
STRICT_VARIABLE = "RLHF_GAUDI_SIM_STRICT"
LAZY_VARIABLE = "PT_HPU_LAZY_MODE"


@dataclass
class Tally:
    """What happened up to the boundaries of one tag."""

    compilations: int = 0
    hits: int = 0
    breaks: int = 0


class Accounts:
    """The accounts of this process, over the C++ module."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._tallies: defaultdict[str, Tally] = defaultdict(Tally)
        self._counted = device.counts()
        if not is_lazy():
            device.set_eager()

    def boundary(self, tag: str) -> None:
        """End what was recorded since the last boundary."""
        self._device.end_graph(tag)
        counts = self._device.counts()
        tally = self._tallies[tag]
        for name in vars(tally):
            setattr(tally, name, getattr(tally, name) + counts[name] - self._counted[name])
        self._counted = counts
        if OPENING.fullmatch(tag):
            self._device.enter_step(is_strict())
        elif CLOSING.fullmatch(tag):
            self._device.leave_step()

    def compiled(self, tag: str, line: str, operators: int, difference: str) -> None:
        """Count a graph that torch.compile made, of so many operators."""
        self._device.compiled(tag, line, operators, difference)

    @contextmanager
    def running_graph(self) -> Iterator[None]:
        """Count the block as a run of a graph, or of a fused kernel, and its operators as parts of it.

        In lazy mode they are parts of the graph that is collected.
        """
        if is_lazy():
            yield
            return
        self._device.enter_compiled()
        try:
            yield
        finally:
            self._device.leave_compiled()

    def compilations(self) -> int:
        """Graphs that were new."""
        compiled: int = self._device.counts()["compilations"]
        return compiled

    def report(self) -> dict[str, Any]:
        """See `report`."""
        return {
            "simulation": NAME,
            "lazy": is_lazy(),
            "strict": is_strict(),
            "counts": self._device.counts(),
            "tags": {tag: asdict(tally) for tag, tally in self._tallies.items()},
            "events": self._device.events(),
        }


_accounts: Accounts | None = None


def is_lazy() -> bool:
    """Whether the simulated bridge collects operators until a step boundary; like Gaudi's own, it does if asked to."""
    return os.environ.get(LAZY_VARIABLE, "0") not in ("", "0")


def is_strict() -> bool:
    """Whether what a Gaudi run should not do is an error."""
    return os.environ.get(STRICT_VARIABLE, "0") == "1"


def open_accounts(device: Any) -> Accounts:
    """Begin accounting over the C++ module; called once, when the runtime is first imported."""
    global _accounts
    _accounts = Accounts(device)
    path = os.environ.get(REPORT_VARIABLE)
    if path and os.environ.get("RANK", "0") == "0":
        atexit.register(_write, Path(path))
    return _accounts


def accounts() -> Accounts:
    """Return the accounts of this process, once its runtime has been imported."""
    assert _accounts is not None
    return _accounts


def report() -> dict[str, Any]:
    """Return what was compiled, as values for JSON.

    `counts` are totals; `tags` has for each boundary's tag the compilations, cache hits and host reads (breaks) up to
    it; `events` has one entry per compilation and per host read, oldest first: `kind` (compilation, break), `tag`,
    `line` ("file:line"), `operators`, `difference`, `time` (seconds since 1970), `in_step`. Empty where the simulated
    runtime is not imported.
    """
    return accounts().report() if _accounts else {}


def _write(path: Path) -> None:
    part = path.with_name(f"{path.name}.partial")
    part.write_text(json.dumps(report(), indent=1), encoding="utf-8")
    part.replace(path)
