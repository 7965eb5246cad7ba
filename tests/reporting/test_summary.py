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
        "set_up_seconds": 8.0,
        "peak_memory": 3 * 2**30,
        "phases": {"generation": 21.0, "scoring": 9.0, "training": 29.8, "other": 0.2},
        "tflops": 0.4123,
        "peak_share": 0.412,
        "title": "GRPO",
        "warnings": ["step 4: the policy [has] left its reference"],
        "samples": [{"prompt": "Where does the [bee] live?", "before": "", "after": "In a [bold]hive[/]."}],
    },
]


def shown(width: int) -> str:
    output = io.StringIO()
    print_summary(SUMMARIES, Console(file=output, width=width, color_system=None))
    return output.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_summary_shows_every_figure_at_any_width(width: int) -> None:
    text = shown(width)
    for figure in ("1,235", "3.21", "91.3%", "-0.5", "1.75", "4.2", "612 MiB", "3.0 GiB", "1:15"):
        assert figure in text
    assert max(map(len, text.splitlines())) <= width


def test_summary_shows_values_phases_speed_and_texts() -> None:
    lines = [line.strip() for line in shown(80).splitlines()]
    assert ["kl", "4.2"] in [line.split() for line in lines], "a value without one before"
    assert "8.0 s of set-up" in lines and "generation 35 %, scoring 15 %, training 50 %" in lines
    assert "1:15 · 3.0 GiB peak memory · 0.41 TFLOP/s (41 % of peak)" in lines
    assert lines.index("ppo warning  step 4: the policy [has] left its reference") == len(lines) - 2
    assert lines[-1].startswith("docs/reading-a-run.md") and "GRPO" in lines
    assert any("the same prompts, before and after GRPO" in line for line in lines)
    for text in ("Where does the [bee] live?", "In a [bold]hive[/].", "(empty)"):
        assert any(text in line for line in lines), "brackets are not markup"
