"""The health of the devices before and after a stage: shown, warned about, and recorded in `stage.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf.engine import distributed
from rlhf.reporting.console import console

if TYPE_CHECKING:
    from accelerators import Health
    from rlhf.trainers.context import StageContext

RULE = "device"
"""Name of the warning, among those that the end of a run repeats."""


class DeviceWatch:
    """Reads the health of all ranks' devices at the start of a stage, and again at its end; every rank makes one."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._before = self._read()
        for rank, health in enumerate(self._before):
            if health.readings:
                readings = ", ".join(f"{name} {value}" for name, value in health.readings.items())
                context.say(f"{context.directory.name}: device of rank {rank}: {readings}")
        self._warn("at the start", [health.problems for health in self._before])

    def conclude(self) -> dict[str, Any]:
        """Return the entry of `stage.json`: the devices in the order of ranks; nothing if no backend reports any."""
        after = self._read()
        pairs = list(zip(self._before, after, strict=True))
        late = [health.problems_since(before) for before, health in pairs]
        if line := self._warn("at the end", late):
            self._context.health.lines[RULE] = line
        if not any(health.readings or health.problems or health.errors for pair in pairs for health in pair):
            return {}
        return {
            "devices": [
                {
                    "before": dict(before.readings),
                    "after": dict(health.readings),
                    "errors": dict(health.errors),
                    "problems": list(dict.fromkeys([*before.problems, *problems])),
                }
                for (before, health), problems in zip(pairs, late, strict=True)
            ]
        }

    def _read(self) -> list[Health]:
        return distributed.all_gather_objects(self._context.accelerator.health())

    def _warn(self, when: str, problems: Sequence[Sequence[str]]) -> str:
        """Print a warning if there are problems, and return its line."""
        found = [f"rank {rank}: {', '.join(clauses)}" for rank, clauses in enumerate(problems) if clauses]
        line = f"{RULE} {when}: {'; '.join(found)}" if found else ""
        if line:
            with console.loudly():
                self._context.say(f"{self._context.directory.name}: warning: {line}")
        return line
