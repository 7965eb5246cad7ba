"""Test the judgement of ci/load.py: growth fails, noise and growth that harms nobody pass."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "ci" / "load.py"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Return ci/load.py as a module."""
    monkeypatch.syspath_prepend(str(SCRIPT.parents[1]))
    spec = importlib.util.spec_from_file_location("load", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("load", None)


def noise(seed: int, count: int = 200) -> np.ndarray:
    """Return noise of standard deviation 1 in which neighbours are alike."""
    values = np.random.default_rng(seed).standard_normal(count)
    for index in range(1, count):
        values[index] = 0.7 * values[index - 1] + (1 - 0.7**2) ** 0.5 * values[index]
    return values


def test_interval_contains_the_slope_of_most_series(load) -> None:
    places = np.arange(200) / 20
    slopes = [load.fit_slope(places, 5 + 0.3 * places + noise(seed)) for seed in range(100)]
    assert sum(slope.low <= 0.3 <= slope.high for slope in slopes) >= 85  # ordinary least squares: 60
    assert np.mean([slope.value for slope in slopes]) == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize(
    ("growth", "spread", "grows"),
    [(0.0, 1.0, False), (3.0, 1.0, True), (0.5, 0.01, False), (-3.0, 1.0, False)],
    ids=["noise", "growth", "harmless growth", "shrinks"],
)
def test_only_growth_that_harms_is_a_problem(load, capsys, growth: float, spread: float, grows: bool) -> None:
    series = load.Series()
    for place, value in enumerate(spread * noise(1), 1):
        leak = 100 if place <= 20 else growth * place / 20  # the first tenth is left out
        series.add(place * 50, {"MiB": 500 + leak + value})
    problems = series.judge(1000, "steps", {"MiB": 1.0})
    assert bool(problems) == grows
    assert capsys.readouterr().out.splitlines()[-1].endswith("harmful from 1")


def test_open_files_and_threads_of_a_process_are_counted(load) -> None:
    import os
    import threading

    before = load.measure(os.getpid())
    event = threading.Event()
    thread = threading.Thread(target=event.wait)
    with SCRIPT.open():
        thread.start()
        after = load.measure(os.getpid())
        event.set()
        thread.join()
    assert (after["open files"], after["threads"]) == (before["open files"] + 1, before["threads"] + 1)
