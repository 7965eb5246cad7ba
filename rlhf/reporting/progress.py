"""Progress of long work: a live bar on a terminal, a few plain lines elsewhere, nothing on ranks other than 0.

It shows counts, rates, the remaining time and the latest metrics. Text that is printed through `console` appears above
a bar. A copy of the terminal gets the plain lines (`rlhf.reporting.console`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from rlhf.reporting.console import console
from rlhf.utils import manifest, signals
from rlhf.utils.process_info import current_process
from rlhf.utils.units import format_count, format_number, format_seconds

_SECONDS_BETWEEN_LINES = 10.0
_NARROW = 75  # columns of a terminal; below, there is no bar, and no time of later stages


@contextmanager
def progress(
    total: int, description: str, *, unit: str = "rows", enabled: bool = True, later: float = 0.0
) -> Iterator[Bar]:
    """Show the progress of `total` units of work. Bars may be nested.

    Args:
        unit: noun in the plural; the rate is shown in units per second.
        enabled: True on the one rank that prints.
        later: the work after this, in the same units; the time for all of it is shown, too.
    """
    with ExitStack() as stack:
        display = (
            stack.enter_context(_live_display()) if enabled and console.is_terminal and not console.quiet else None
        )
        lines = console.copy if display else console
        bar = Bar(total, description, unit, lines if enabled else None, display, later)
        yield bar
        bar.finish()


@contextmanager
def show_hashing() -> Iterator[None]:
    """Show the progress of hashing large files (`rlhf.utils.manifest`) while the block runs."""

    @contextmanager
    def show(folder: Path, mebibytes: int) -> Iterator[Callable[[], None]]:
        enabled, lock = current_process().rank == 0, threading.Lock()
        with progress(mebibytes, f"hashing {folder}", unit="MiB", enabled=enabled) as bar:

            def advance() -> None:
                with lock:
                    bar.advance()

            yield advance

    with manifest.observe_hashing(show):
        yield


class Bar:
    """Progress of one piece of work, shown in plain lines, on a live display, on both or nowhere.

    Lines are printed at the start, at most every ten seconds, and at the end.
    """

    def __init__(
        self, total: int, description: str, unit: str, lines: Console | None, display: Progress | None, later: float
    ) -> None:
        self._total, self._description, self._unit, self._later = total, description, unit, later
        self._lines, self._display = lines, display
        self._done = 0
        self._metrics: dict[str, float] = {}
        self._started = self._printed = time.monotonic()
        self._print(f"{description}: {format_count(total, unit)}")
        if display:
            self._task = display.add_task(description, total=total, unit=unit, metrics=self._metrics, later=later)

    def advance(self, count: int = 1, **metrics: float) -> None:
        """Count finished units, and show the latest metrics.

        Raises:
            KeyboardInterrupt: a signal arrived; see `signals.interrupt_on_signals`.
        """
        signals.raise_if_interrupted()
        self._done += count
        self._metrics.update(metrics)
        if self._display:
            self._display.update(self._task, advance=count)
        now = time.monotonic()
        if now - self._printed >= _SECONDS_BETWEEN_LINES and self._done < self._total:
            self._printed, elapsed = now, now - self._started
            self._print_state(elapsed, _remaining(self._done, self._total, elapsed, self._later))

    def finish(self) -> None:
        """Show the time that all units have taken."""
        if self._display:
            self._display.stop_task(self._task)
        elapsed = time.monotonic() - self._started
        self._print_state(elapsed, f"{format_seconds(elapsed)} in total")

    def _print_state(self, elapsed: float, duration: str) -> None:
        percent = f"{100 * self._done / self._total:.0f}%" if self._total else ""
        count = f"{self._description}: {self._done:,}/{self._total:,} {self._unit}"
        parts = [count, percent, _rate(self._done, elapsed, self._unit), duration, _format_metrics(self._metrics)]
        self._print("  ".join(part for part in parts if part))

    def _print(self, line: str) -> None:
        if self._lines:
            self._lines.print(line, soft_wrap=True, markup=False)


@contextmanager
def _live_display() -> Iterator[Progress]:
    """Return the terminal's live display, which nested bars share; a nested bar disappears when it is done."""
    if display := console.display:
        outer = list(display.task_ids)
        try:
            yield display
        finally:
            for task in set(display.task_ids) - set(outer):
                display.remove_task(task)
        return
    bar = BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=6, max_width=30))
    columns = [
        _TextColumn(lambda task: task.description, "bold"),
        *([bar] if console.width >= _NARROW else []),
        _TextColumn(lambda task: f"{task.completed:,.0f}/{task.total or 0:,.0f}", justify="right"),
        _TextColumn(
            lambda task: _rate(task.completed, task.elapsed or 0, task.fields["unit"]), "cyan", justify="right"
        ),
        _TextColumn(_duration, "dim", justify="right"),
        _TextColumn(lambda task: _format_metrics(task.fields["metrics"]), "green", ratio=2),
    ]
    with Progress(*columns, console=console, expand=True, refresh_per_second=4) as console.display:
        try:
            yield console.display
        finally:
            console.display = None


class _TextColumn(ProgressColumn):
    """A column whose text is computed from a task at each refresh."""

    def __init__(self, text: Callable[[Task], str], style: str = "", **column: Any) -> None:
        super().__init__(Column(no_wrap=True, **column))
        self._text, self._style = text, style

    def render(self, task: Task) -> Text:
        return Text(self._text(task), style=self._style)


def _duration(task: Task) -> str:
    elapsed = task.elapsed or 0
    if task.finished or task.stop_time is not None:
        return f"{format_seconds(elapsed)} in total"
    return _remaining(task.completed, task.total or 0, elapsed, task.fields["later"] if console.width >= _NARROW else 0)


def _rate(done: float, elapsed: float, unit: str) -> str:
    """Return units per second, or seconds per unit of slow work."""
    if not done or not elapsed:
        return ""
    rate = done / elapsed
    if rate < 0.5:
        return f"{1 / rate:.1f} s/{unit.removesuffix('s')}"
    return f"{format_number(float(f'{rate:.3g}'))} {unit}/s"


def _remaining(done: float, total: float, elapsed: float, later: float) -> str:
    if not done:
        return "? left"
    left, in_all = (format_seconds(elapsed / done * (total - done + more)) for more in (0, later))
    return f"{left} left" + (f", ~{in_all} for all stages" if later else "")


def _format_metrics(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {format_number(value)}" for name, value in metrics.items())
