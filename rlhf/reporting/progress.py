"""Progress of long work: a live bar on a terminal, plain lines elsewhere, nothing on other ranks than 0.

A total and a description flow in, then counts and the latest numbers; rates and remaining time come out.
Print through `console` while a bar is shown: its lines appear above the bar. A copy of what a terminal shows has the
plain lines (`rlhf.reporting.console`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from rlhf.reporting.console import console
from rlhf.utils.units import format_number, format_seconds

_SECONDS_BETWEEN_LINES = 10.0
_NARROW = 75  # columns; below, the numbers need the room that the bar would take


class Bar(Protocol):
    """What `progress` gives."""

    def advance(self, count: int = 1, **metrics: float) -> None:
        """Count finished units, and show the latest numbers beside them."""


@contextmanager
def progress(total: int, description: str, *, unit: str = "rows", enabled: bool = True) -> Iterator[Bar]:
    """Show how far work of `total` units is. Bars may be nested.

    Args:
        unit: what is counted, in the plural; the rate is shown in it per second.
        enabled: True on the one rank that talks.
    """
    if not enabled:
        yield _Silent()
    elif console.is_terminal:
        with _display() as display:
            bars: list[_Live | _Lines] = [_Live(display, total, description, unit)]
            if console.copy:
                bars.append(_Lines(console.copy, total, description, unit))
            bar = _Several(bars)
            yield bar
            bar.close()
    else:
        lines = _Lines(console, total, description, unit)
        yield lines
        lines.close()


class _Silent:
    def advance(self, count: int = 1, **metrics: float) -> None:
        pass


class _Several:
    """Bars that show the same."""

    def __init__(self, bars: Sequence[_Live | _Lines]) -> None:
        self._bars = bars

    def advance(self, count: int = 1, **metrics: float) -> None:
        for bar in self._bars:
            bar.advance(count, **metrics)

    def close(self) -> None:
        for bar in self._bars:
            bar.close()


class _Lines:
    """A line at the start, at most one every ten seconds, and one at the end."""

    def __init__(self, console: Console, total: int, description: str, unit: str) -> None:
        self._console = console
        self._total, self._description, self._unit = total, description, unit
        self._done = 0
        self._metrics: dict[str, float] = {}
        self._started = self._printed = time.monotonic()
        console.print(f"{description}: {total:,} {unit}", soft_wrap=True, markup=False)

    def advance(self, count: int = 1, **metrics: float) -> None:
        self._done += count
        self._metrics.update(metrics)
        now = time.monotonic()
        if now - self._printed >= _SECONDS_BETWEEN_LINES and self._done < self._total:
            self._printed = now
            self._print(f"{_remaining(self._done, self._total, now - self._started)} left")

    def close(self) -> None:
        self._print(f"{format_seconds(time.monotonic() - self._started)} in all")

    def _print(self, last: str) -> None:
        elapsed = time.monotonic() - self._started
        percent = f"{100 * self._done / self._total:.0f}%" if self._total else ""
        parts = [
            f"{self._description}: {self._done:,}/{self._total:,} {self._unit}",
            percent,
            _rate(self._done, elapsed, self._unit),
            last,
            _metrics_text(self._metrics),
        ]
        self._console.print("  ".join(part for part in parts if part), soft_wrap=True, markup=False)


class _Live:
    """A line of the terminal's live display."""

    def __init__(self, display: Progress, total: int, description: str, unit: str) -> None:
        self._display = display
        self._task = display.add_task(description, total=total, unit=unit, metrics={})

    def advance(self, count: int = 1, **metrics: float) -> None:
        known = self._display.tasks[self._display.task_ids.index(self._task)].fields["metrics"]
        self._display.update(self._task, advance=count, metrics={**known, **metrics})

    def close(self) -> None:
        self._display.stop_task(self._task)


_current: Progress | None = None  # the terminal has one live region; nested bars share it


@contextmanager
def _display() -> Iterator[Progress]:
    global _current
    if _current is not None:
        before = list(_current.task_ids)
        try:
            yield _current
        finally:  # an inner bar leaves when its work is done
            for task in set(_current.task_ids) - set(before):
                _current.remove_task(task)
        return
    bar = BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=6, max_width=30))
    columns = (
        TextColumn("{task.description}", style="bold", markup=False, table_column=Column(no_wrap=True)),
        *((bar,) if console.width >= _NARROW else ()),
        _Count(),
        _Rate(),
        _Time(),
        _Metrics(),
    )
    with Progress(*columns, console=console, expand=True, refresh_per_second=4) as _current:
        try:
            yield _current
        finally:
            _current = None


class _Count(ProgressColumn):
    def get_table_column(self) -> Column:
        return Column(no_wrap=True, justify="right")

    def render(self, task: Task) -> Text:
        return Text(f"{task.completed:,.0f}/{task.total or 0:,.0f}")


class _Rate(ProgressColumn):
    def get_table_column(self) -> Column:
        return Column(no_wrap=True, justify="right")

    def render(self, task: Task) -> Text:
        return Text(_rate(task.completed, task.elapsed or 0, task.fields["unit"]), style="cyan")


class _Time(ProgressColumn):
    def get_table_column(self) -> Column:
        return Column(no_wrap=True, justify="right")

    def render(self, task: Task) -> Text:
        if task.finished or task.stop_time is not None:
            return Text(f"{format_seconds(task.elapsed or 0)} in all", style="dim")
        return Text(f"{_remaining(task.completed, task.total or 0, task.elapsed or 0)} left", style="dim")


class _Metrics(ProgressColumn):
    def get_table_column(self) -> Column:
        return Column(no_wrap=True, overflow="ellipsis", ratio=2)

    def render(self, task: Task) -> Text:
        return Text(_metrics_text(task.fields["metrics"]), style="green")


def _rate(done: float, elapsed: float, unit: str) -> str:
    if not done or not elapsed:
        return ""
    rate = done / elapsed
    singular = unit.removesuffix("s")
    # Slow work reads better as seconds per unit than as 0.03 units per second.
    return f"{format_number(float(f'{rate:.3g}'))} {unit}/s" if rate >= 0.5 else f"{1 / rate:.1f} s/{singular}"


def _remaining(done: float, total: float, elapsed: float) -> str:
    return format_seconds(elapsed / done * (total - done)) if done else "?"


def _metrics_text(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {format_number(value)}" for name, value in metrics.items())
