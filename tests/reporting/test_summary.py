"""The closing table: every measure of every stage, at any width."""

import io
from typing import Any

import pytest
from rich.console import Console

from rlhf.reporting.summary import print_summary

SUMMARIES: list[dict[str, Any]] = [
    {
        "stage": "sft",
        "before": {"perplexity": 1234.5678},
        "after": {"perplexity": 3.21},
        "seconds": 31.0,
        "peak_memory": 612 * 2**20,
        "steps": 120,
    },
    {
        "stage": "reward",
        "before": {"accuracy": 0.5, "mean_chosen_score": 0.01},
        "after": {"accuracy": 0.913, "mean_chosen_score": 2.5},
        "seconds": 40.0,
    },
    {
        "stage": "ppo",
        "before": {"reward": -0.5},
        "after": {"reward": 1.75, "kl": 4.2},
        "seconds": 75.0,
        "peak_memory": 3 * 2**30,
        "phases": {"generation": 21.0, "scoring": 9.0, "training": 29.8, "other": 0.2},
        "tflops": 0.4123,
        "peak_share": 0.412,
        "samples": [{"prompt": "Where does the [bee] live?", "before": "", "after": "In a [bold]hive[/]."}],
    },
]


def shown(width: int) -> str:
    output = io.StringIO()
    print_summary(SUMMARIES, Console(file=output, width=width, color_system=None))
    return output.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("figure", ["1,235", "3.21", "91.3%", "-0.5", "1.75", "4.2", "612 MiB", "3.0 GiB", "1:15"])
def test_summary_shows_every_figure_at_any_width(width: int, figure: str) -> None:
    assert figure in shown(width)


def test_summary_without_a_value_before_shows_the_other() -> None:
    [line] = [line for line in shown(80).splitlines() if line.strip().startswith("kl")]
    assert line.split() == ["kl", "4.2"]


def test_summary_shows_texts_without_markup() -> None:
    text = shown(80)
    assert "Where does the [bee] live?" in text
    assert "In a [bold]hive[/]." in text
    assert "(empty)" in text


def test_summary_shows_shares_of_phases_and_speed() -> None:
    lines = [line.strip() for line in shown(80).splitlines()]
    assert "generation 35 %, scoring 15 %, training 50 %" in lines
    assert "1:15 · 3.0 GiB peak memory · 0.41 TFLOP/s (41 % of peak)" in lines


def test_summary_lines_fit_the_terminal() -> None:
    assert max(map(len, shown(40).splitlines())) <= 40
