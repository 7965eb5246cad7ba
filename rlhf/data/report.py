"""What became of a source's rows: how many are used, and why the others are not.

Reading, parsing and tokenization note each row they leave out; one `DataReport` per source goes to the user.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rlhf.config import Stage


@dataclass
class DataReport:
    """Rows of one source in one stage.

    Attributes:
        stage, source: what is reported on.
        train, heldout: rows that are used.
        dropped: reason -> (rows, where the first of them is).
    """

    stage: Stage
    source: str
    train: int = 0
    heldout: int = 0
    dropped: dict[str, tuple[int, str]] = field(default_factory=dict)

    def drop(self, reason: str, where: str) -> None:
        """Count one row that is left out."""
        count, first = self.dropped.get(reason, (0, where))
        self.dropped[reason] = (count + 1, first)

    @property
    def used(self) -> int:
        """Rows that are used, for training or evaluation."""
        return self.train + self.heldout

    def reasons(self) -> str:
        """`3 prompt too long (first: a.jsonl:17), ...`; empty where nothing was left out."""
        return ", ".join(f"{count} {reason} (first: {first})" for reason, (count, first) in self.dropped.items())

    def __str__(self) -> str:
        line = f"{self.stage}: {self.source}: {self.train} rows for training, {self.heldout} held out"
        return f"{line}; left out: {self.reasons()}" if self.dropped else line


def lines(reports: Iterable[DataReport]) -> list[str]:
    """One line per source."""
    return [str(report) for report in reports]
