"""Charts as SVG, which needs no script, and their data for the script that makes the curves interactive.

Colours are CSS classes (`s0`, `s1`, ...), so that light and dark pages share one drawing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

from rlhf.diagnosis.records import Curve
from rlhf.utils.units import format_number

COLORS = 8
_WIDTH, _HEIGHT = 340, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 22
_DIGIT = 6.4  # pixels of the widest digits of labels
_MAX_POINTS = 170  # of a curve in SVG: about one for two pixels
_MAX_DATA = 2000  # of a curve for the script


class Series(NamedTuple):
    """One curve of a chart.

    Attributes:
        color: index of its colour.
        margin: half the width of the interval around each value; empty without one.
        dots: values are few: they are drawn as dots, joined by a dashed line.
    """

    label: str
    curve: Curve
    color: int = 0
    margin: Sequence[float] = ()
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves over the steps of a stage.

    Attributes:
        key: identifies the chart on its page.
        group: charts of one group share their cursor.
        about: one sentence for readers.
        scale: `log` for numbers that span orders of magnitude.
    """

    key: str
    title: str
    series: Sequence[Series]
    group: str = ""
    about: str = ""
    scale: str = "linear"

    def data(self) -> dict[str, Any]:
        """Return the chart for the script: one array of steps, and each series' values at them."""
        curves = [thin(series.curve, _MAX_DATA) for series in self.series]
        steps = sorted({step for curve in curves for step in curve.steps})
        result: list[dict[str, Any]] = []
        for series, curve in zip(self.series, curves):
            values = dict(zip(*curve))
            margin = Curve(series.curve.steps, list(series.margin))
            margins = dict(zip(*thin(margin, _MAX_DATA))) if series.margin else {}
            entry: dict[str, Any] = {
                "label": series.label,
                "color": series.color,
                "values": [_shorten(values.get(step)) for step in steps],
            }
            if series.dots:
                entry["dots"] = True
            if margins:
                entry["margin"] = [_shorten(margins.get(step)) for step in steps]
            result.append(entry)
        return {"group": self.group, "scale": self.scale, "x": steps, "series": result}

    def svg(self) -> str:
        """Return the chart as SVG."""
        curves = [thin(series.curve, _MAX_POINTS) for series in self.series]
        x = _Axis.of([step for curve in curves for step in curve.steps], _LEFT, _WIDTH - _RIGHT, is_exact=True)
        values = [value for curve in curves for value in curve.values]
        y = _Axis.of(values, _HEIGHT - _BOTTOM, _TOP, is_log=self.scale == "log" and min(values, default=0) > 0)
        parts = [*_frame(x, y, whole=True)]
        for series, curve in zip(self.series, curves):
            if series.margin:
                margins = thin(Curve(series.curve.steps, list(series.margin)), _MAX_POINTS).values
                upper = [(x(step), y(value + margin)) for step, value, margin in zip(*curve, margins)]
                lower = [(x(step), y(value - margin)) for step, value, margin in zip(*curve, margins)]
                parts.append(f'<path class="band s{series.color}" d="{_path([*upper, *reversed(lower)])}Z"/>')
            points = [(x(step), y(value)) for step, value in zip(*curve)]
            dashed = " dashed" * series.dots
            parts.append(f'<path class="line s{series.color}{dashed}" d="{_path(points)}"/>')
            if series.dots or len(points) == 1:
                parts += [f'<circle class="dot s{series.color}" cx="{a:g}" cy="{b:g}" r="2.5"/>' for a, b in points]
        return _svg(parts, self.title)


class Point(NamedTuple):
    """A point of a plane, with the text that tells what it is."""

    x: float
    y: float
    label: str = ""


def plane(title: str, paths: Sequence[tuple[str, int, Sequence[Point]]], x_title: str, y_title: str) -> str:
    """Return paths in the plane as SVG: each has a label, a colour and its points in order.

    Points with a label are dots. The ends of a path are labelled only if it is the only one: labels would overlap.
    """
    points = [point for _, _, path in paths for point in path]
    x = _Axis.of([point.x for point in points], _LEFT, _WIDTH - _RIGHT - 12)
    y = _Axis.of([point.y for point in points], _HEIGHT + 60 - _BOTTOM - 14, _TOP)
    parts = [*_frame(x, y)]
    for label, color, path in paths:
        places = [(x(point.x), y(point.y)) for point in path]
        parts.append(f'<path class="line s{color}" d="{_path(places)}"/>')
        for point, (a, b) in zip(path, places):
            if not point.label:
                continue
            hint = f"{label} {point.label}: {x_title} {format_number(point.x)}, {y_title} {format_number(point.y)}"
            dot = f'<circle class="dot s{color}" cx="{a:g}" cy="{b:g}" r="3">'
            parts.append(f"{dot}<title>{escape(hint.strip())}</title></circle>")
        if len(paths) == 1 and places:
            (a, b), (c, d) = places[0], places[-1]
            ends = [(path[0], a + 6, b + 3)]
            ends += [(path[-1], c, d - 7 if d > 18 else d + 15)] if len(path) > 1 else []  # beside it runs the path
            for point, a, b in ends:
                anchor = "end" if a > _WIDTH - 90 else "start"
                text = escape(point.label)
                parts.append(f'<text class="name" x="{a:g}" y="{b:g}" text-anchor="{anchor}">{text}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle:g}" y="{_HEIGHT + 56}" text-anchor="middle">{escape(x_title)}</text>')
    return _svg(parts, title, height=_HEIGHT + 60)


def histogram(title: str, groups: Sequence[tuple[str, int, Sequence[float]]], bins: int = 24) -> str:
    """Return the distributions of numbers as SVG, each as a share of its group; a group has a label and a colour."""
    values = [value for _, _, numbers in groups for value in numbers]
    x = _Axis.of(values, _LEFT, _WIDTH - _RIGHT)
    width = (x.high - x.low) / bins
    shares = []
    for _, _, numbers in groups:
        counts = [0] * bins
        for number in numbers:
            counts[min(int((number - x.low) / width), bins - 1)] += 1
        shares.append([count / max(len(numbers), 1) for count in counts])
    y = _Axis.of([0.0, *(share for group in shares for share in group)], _HEIGHT - _BOTTOM, _TOP)
    parts = [*_frame(x, y, percent=True)]
    for (_, color, _), group in zip(groups, shares):
        corners: list[tuple[float, float]] = [(x(x.low), y(0))]
        for place, share in enumerate(group):
            corners += [(x(x.low + place * width), y(share)), (x(x.low + (place + 1) * width), y(share))]
        corners.append((x(x.high), y(0)))
        parts.append(
            f'<path class="band s{color}" d="{_path(corners)}Z"/><path class="line s{color}" d="{_path(corners)}"/>'
        )
    return _svg(parts, title)


def stacked_bar(title: str, parts: Sequence[tuple[str, float]]) -> str:
    """Return shares of a whole as one bar of SVG; labels are in the page next to it."""
    total, start, drawn = sum(value for _, value in parts) or 1.0, 0.0, []
    for number, (label, value) in enumerate(parts):
        width = 100 * value / total
        drawn.append(
            f'<rect class="fill s{number % COLORS}" x="{start:.3f}" y="0" width="{max(width, 0):.3f}" height="10">'
            f"<title>{escape(label)}: {width:.0f} %</title></rect>"
        )
        start += width
    return (
        f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f"{''.join(drawn)}</svg>"
    )


class _Axis(NamedTuple):
    """Maps numbers from `low` to `high` to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    @classmethod
    def of(
        cls, values: Sequence[float], start: float, end: float, *, is_log: bool = False, is_exact: bool = False
    ) -> _Axis:
        """Return the axis for these values, with a little room above and below unless `is_exact`."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        if is_log:
            low, high = math.log10(low), math.log10(high)
        if not math.isfinite(high - low) or high - low < 1e-300:
            low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
        room = 0 if is_exact else (high - low) * 0.05
        if low == 0 and not is_log:
            return cls(low, high + room, start, end)
        return cls(low - room, high + room, start, end, is_log)

    def __call__(self, value: float) -> float:
        """Return the pixel of a value, to a tenth; one outside the axis is drawn at its end."""
        if self.is_log:
            value = math.log10(value) if value > 0 else self.low
        share = min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, most: int, *, whole: bool = False) -> Iterator[tuple[float, float]]:
        """Yield (value, pixel) of at most `most` round numbers, which are `whole` if they count steps."""
        if self.is_log:
            powers = range(math.ceil(self.low), math.floor(self.high) + 1)
            numbers: Iterable[float] = (10.0**power for power in powers[:: max(1, -(-len(powers) // most))])
            if len(powers) < 2:
                numbers = _round_numbers(10**self.low, 10**self.high, most)
        else:
            numbers = _round_numbers(self.low, self.high, most, least=1 if whole else 0)
        for number in numbers:
            yield number, self(number)


def _round_numbers(low: float, high: float, most: int, least: float = 0) -> Iterator[float]:
    """Yield equally spaced round numbers between `low` and `high`: about `most`, or fewer, at least `least` apart."""
    step = _round_step(max((high - low) / most, least))
    for count in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
        yield count * step


def _round_step(step: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def _frame(x: _Axis, y: _Axis, *, percent: bool = False, whole: bool = False) -> Iterator[str]:
    bottom = y.start
    for value, pixel in y.ticks(4):
        label = f"{value:.0%}" if percent else _label(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{pixel:g}" y2="{pixel:g}"/>'
        yield f'<text class="tick" x="{_LEFT - 5}" y="{pixel + 3:g}" text-anchor="end">{label}</text>'
    for value, pixel in x.ticks(5, whole=whole):
        label = _label(value)
        center = min(pixel, _WIDTH - _DIGIT * len(label) / 2)
        yield f'<text class="tick" x="{center:g}" y="{bottom + 14:g}" text-anchor="middle">{label}</text>'


def _label(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:,.6g}"


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{a:g} {b:g}" for a, b in points) if points else ""


def _svg(parts: Iterable[str], title: str, height: int = _HEIGHT) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def thin(curve: Curve, most: int) -> Curve:
    """Return at most `most` points: means of neighbours, each at the step in their middle."""
    count = len(curve.steps)
    if count <= most:
        return curve
    parts = list(pairwise(place * count // most for place in range(most + 1)))
    return Curve(
        [curve.steps[(start + end) // 2] for start, end in parts],
        [math.fsum(curve.values[start:end]) / (end - start) for start, end in parts],
    )


def _shorten(value: float | None) -> float | int | None:
    """Return a number with five digits, as an integer if it is one."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.5g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short
