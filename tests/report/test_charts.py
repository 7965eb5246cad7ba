"""Drawings place numbers where they belong, and hold nothing but markup of their own."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from rlhf.diagnosis.records import Curve
from rlhf.report.charts import Chart, Point, Series, histogram, plane, stacked_bar, thin


def line(svg: str, number: int = 0) -> list[tuple[float, float]]:
    """Return the points of a chart's n-th line."""
    path = [*re.finditer(r'class="line[^"]*" d="M([^"]*)"', svg)][number][1]
    return [tuple(map(float, point.split())) for point in path.split("L")]  # type: ignore[misc]


def test_curve_is_drawn_to_scale() -> None:
    chart = Chart("a", "loss", [Series("loss", Curve([1, 2, 4], [0.0, 5.0, 10.0]))])
    (x1, y1), (x2, y2), (x3, y3) = line(chart.svg())
    assert (x3 - x1) == pytest.approx(3 * (x2 - x1), abs=0.2), "steps 1, 2 and 4"
    assert (y1 - y3) == pytest.approx(2 * (y1 - y2), abs=0.2) and y3 < y1, "upwards"


def test_logarithmic_curve_has_equal_distances_for_equal_factors() -> None:
    chart = Chart("a", "norm", [Series("norm", Curve([1, 2, 3], [1.0, 10.0, 100.0]))], scale="log")
    (_, first), (_, second), (_, third) = line(chart.svg())
    assert first - second == pytest.approx(second - third, abs=0.2)
    assert {"1", "10", "100"} <= set(re.findall(r'class="tick"[^>]*>([^<]*)<', chart.svg()))


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.2, 8.0], {"2", "4", "6", "8"}), ([2.1, 4.9], {"3", "4", "5"}), ([0.5, 30.0], {"1", "10"})],
)
def test_logarithmic_axis_has_labels_within_a_decade_too(values: list[float], expected: set[str]) -> None:
    svg = Chart("a", "norm", [Series("norm", Curve([1000, 2000], values))], scale="log").svg()
    labels = set(re.findall(r'text-anchor="end">([^<]*)<', svg))
    assert labels == expected


def test_long_curve_is_thinned_by_means() -> None:
    """1,700 values in groups of ten, each with one outlier of 10: every group's mean is 1."""
    values = [10.0 if step % 10 == 0 else 0.0 for step in range(1700)]
    chart = Chart("a", "reward", [Series("reward", Curve(list(range(1700)), values))])
    points = line(chart.svg())
    assert len(points) == 170
    assert thin(Curve(list(range(1700)), values), 170).values == [1.0] * 170
    assert len({y for _, y in points}) == 1
    assert chart.data()["series"][0]["values"] == values, "the script has them all"


def test_data_joins_the_steps_of_all_series() -> None:
    training, heldout = Curve([1, 2, 3], [0.5, 0.25, 0.125]), Curve([0, 3], [9.0, 1 / 3])
    data = Chart(
        "a", "loss", [Series("loss", training, margin=[1, 2, 3]), Series("held-out", heldout, 1, dots=True)]
    ).data()
    assert data["x"] == [0, 1, 2, 3]
    assert [series["values"] for series in data["series"]] == [[None, 0.5, 0.25, 0.125], [9, None, None, 0.33333]]
    assert data["series"][0]["margin"] == [None, 1, 2, 3] and data["series"][1]["dots"] is True


@pytest.mark.parametrize("values", [[3.0], [2.0, 2.0], [0.0, 0.0], [-1e-9, 1e12], []])
def test_any_values_have_a_drawing(values: list[float]) -> None:
    for scale in ("linear", "log"):
        svg = Chart("a", "n", [Series("n", Curve(list(range(len(values))), values))], scale=scale).svg()
        ElementTree.fromstring(svg)
        assert "nan" not in svg and "inf" not in svg


def test_label_of_the_last_step_is_inside_the_drawing() -> None:
    svg = Chart("a", "n", [Series("n", Curve([0, 5000, 10000], [0.0, 1.0, 2.0]))]).svg()
    (center,) = re.findall(r'x="([\d.]+)" y="[\d.]+" text-anchor="middle">10,000<', svg)
    width = float(re.search(r'viewBox="0 0 (\d+)', svg)[1])  # type: ignore[index]
    assert float(center) + 6 * 6 / 2 <= width, "six characters of six pixels"


def test_labels_of_very_small_and_large_numbers_differ() -> None:
    for values, expected in (([3.4e-7, 4.6e-7], {"3.5e-7", "4e-7"}), ([1.0e6, 1.12e6], {"1e6", "1.05e6", "1.1e6"})):
        svg = Chart("a", "n", [Series("n", Curve([0, 1], values))]).svg()
        labels = re.findall(r'text-anchor="end">([^<]*)<', svg)
        assert len(labels) == len(set(labels)) and expected <= set(labels)


def test_steps_are_labelled_with_whole_numbers() -> None:
    svg = Chart("a", "n", [Series("n", Curve([1, 2, 3], [0.0, 1.0, 2.0]))]).svg()
    assert re.findall(r'text-anchor="middle">([^<]*)<', svg) == ["1", "2", "3"]


def test_plane_marks_each_point_with_its_numbers() -> None:
    svg = plane(
        "reward against KL", [("run", 0, [Point(0, -1.5, "step 0"), Point(2.5, 3.0, "step 9")])], "KL", "reward"
    )
    assert re.findall("<title>([^<]*)</title>", svg) == [
        "run step 0: KL 0, reward -1.5",
        "run step 9: KL 2.5, reward 3",
    ]


def test_points_without_a_label_are_a_line_and_only_a_path_alone_names_its_ends() -> None:
    path = [Point(0, 0, "first"), Point(1, 1, "last")]
    alone = plane("p", [("run", 0, path)], "x", "y")
    assert alone.count("<circle") == 2 and alone.count('class="name"') == 2
    two = plane("p", [("run", 0, path), ("fit", 1, [Point(0, 1), Point(1, 0)])], "x", "y")
    assert two.count("<circle") == 2 and 'class="name"' not in two and two.count('class="line') == 2


def test_histogram_shows_shares_of_each_group() -> None:
    """Nine numbers in the first bin and one in the last: heights 9 to 1."""
    svg = histogram("scores", [("scores", 0, [0.0] * 9 + [1.0])])
    bottom, *others = (y for _, y in line(svg))
    heights = {round(bottom - y, 1) for y in others} - {0}
    assert len(heights) == 2 and max(heights) == pytest.approx(9 * min(heights), rel=0.05)


def test_bar_is_divided_by_shares() -> None:
    widths = [
        float(width) for width in re.findall(r'width="([\d.]+)" height', stacked_bar("phases", [("a", 1), ("b", 3)]))
    ]
    assert widths == [25, 75]


def test_texts_are_escaped() -> None:
    bad = '<script>alert("x")</script>'
    for svg in (
        Chart("a", bad, [Series(bad, Curve([1], [1.0]))]).svg(),
        plane(bad, [(bad, 0, [Point(1, 1, bad)])], bad, bad),
        histogram(bad, [(bad, 0, [1.0, 2.0])]),
        stacked_bar(bad, [(bad, 1)]),
    ):
        ElementTree.fromstring(svg)
        assert "<script" not in svg
