"""What became of a source's rows: how many are used, and why the others are not.

Reading, parsing and tokenization note each row they leave out; one `DataReport` per source goes to the user.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rlhf.config.schema import Stage
from rlhf.data.drop_reasons import LEFT_OUT_BY_WEIGHT, remedy
from rlhf.data.examples import Example

Dropped = dict[str, tuple[int, str]]
"""Reason -> (rows, where the first of them is)."""

_REASONS = 6  # named at most; a broken source may have a reason for every row
_REMEDIES = 2


def count(dropped: Dropped, reason: str, where: str, rows: int = 1) -> None:
    """Count rows that are left out; `where` is the first of them."""
    before, first = dropped.get(reason, (0, where))
    dropped[reason] = (before + rows, first)


@dataclass
class DataReport:
    """Rows of one source in one stage.

    Attributes:
        stage, source: what is reported on.
        train, heldout: rows that are used.
        unseen: rows of the stage's share that were not looked at, because a sample was asked for.
        dropped: why rows are left out.
        rows, share: rows of the source that have a prompt, and those of them that the stage may use.
        truncated: rows that are used and were too long (data.too_long: truncate).
        how: what was read as what.
        tokens: of each part of the rows, the lengths that half, 90 %, 99 % and all of them do not exceed.
        example: one of them, of median length.
        lengths: reason -> (tokens of the shortest, of the longest, the most allowed), for rows that are too long.
    """

    stage: Stage
    source: str
    train: int = 0
    heldout: int = 0
    unseen: int = 0
    rows: int = 0
    share: int = 0
    truncated: int = 0
    how: str = ""
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    example: Example | None = None
    dropped: Dropped = field(default_factory=dict)
    lengths: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def drop(self, reason: str, where: str) -> None:
        """Count one row that is left out."""
        count(self.dropped, reason, where)

    def drop_long(self, reason: str, where: str, tokens: int, allowed: int) -> None:
        """Count one row that is left out for its length."""
        self.drop(reason, where)
        shortest, longest, _ = self.lengths.get(reason, (tokens, tokens, allowed))
        self.lengths[reason] = (min(shortest, tokens), max(longest, tokens), allowed)

    @property
    def used(self) -> int:
        """Rows that are used, for training or evaluation."""
        return self.train + self.heldout

    @property
    def unfit(self) -> int:
        """Rows that could not be used, whatever the other sources are."""
        return sum(rows for reason, (rows, _) in self.dropped.items() if reason != LEFT_OUT_BY_WEIGHT)

    def reasons(self) -> str:
        """`3 prompt too long (first: a.jsonl:17), ...`, the most frequent first; empty where nothing was left out."""
        parts = []
        for reason, (rows, first) in self._ranked():
            details = f"first: {first}"
            if reason in self.lengths:
                shortest, longest, allowed = self.lengths[reason]
                met = f"{shortest} to {longest}" if shortest < longest else f"{longest}"
                details = f"{met} tokens, longest allowed {allowed}; {details}"
            parts.append(f"{rows} {reason} ({details})")
        more = len(parts) - _REASONS
        return ", ".join(parts[:_REASONS] + ([f"and {more} reasons more"] if more > 0 else []))

    def remedies(self) -> str:
        """What helps against the reasons that dominate: `raise data.max_prompt_length; ...`."""
        ranked = [(rows, remedy(reason)) for reason, (rows, _) in self._ranked()]
        most = sum(rows for rows, _ in ranked)
        dominant = [help for place, (rows, help) in enumerate(ranked) if not place or 4 * rows >= most]
        return "; ".join(list(dict.fromkeys(dominant))[:_REMEDIES])

    def _ranked(self) -> list[tuple[str, tuple[int, str]]]:
        return sorted(self.dropped.items(), key=lambda item: -item[1][0])

    def __str__(self) -> str:
        line = f"{self.stage}: {self.source}: {self.train} rows for training, {self.heldout} held out"
        line += f" of a sample; {self.unseen} more not looked at" if self.unseen else ""
        line += f"; {self.truncated} truncated" if self.truncated else ""
        return f"{line}; left out: {self.reasons()}" if self.dropped else line


def lines(reports: Iterable[DataReport]) -> list[str]:
    """One line per source."""
    return [str(report) for report in reports]
