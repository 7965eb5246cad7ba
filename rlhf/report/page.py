"""Render a report of one or several runs as one HTML file that refers to nothing outside of itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from rlhf.diagnosis.verdict import SIGNS, ExaminedRun
from rlhf.report.charts import COLORS
from rlhf.report.comparison import comparison_table, differing_settings
from rlhf.report.contents import cost_tables, question_sections
from rlhf.report.origin import describe_origin
from rlhf.report.samples import read_samples
from rlhf.utils.atomic_io import atomic_write
from rlhf.version import __version__

_ASSETS = Path(__file__).with_name("assets")


def render_report(
    runs: Sequence[ExaminedRun], *, title: str = "", notes: Sequence[tuple[str, str]] = (), refresh: int = 0
) -> str:
    """Return the page about these runs.

    Args:
        runs: the runs; several are compared.
        title: the page's title; empty: the names of the runs.
        notes: names of runs, each with a text about it, such as why it has no records.
        refresh: seconds after which an open page loads itself again; 0: never.
    """
    sections = question_sections(runs)
    charts = [chart for section in sections for _, group in section.charts for chart in group]
    names = [run.records.name for run in runs]
    several = len(runs) != 1 or bool(notes)
    # Of one run only: samples of several would be megabytes, and each run has its own report.
    samples = None if several else read_samples(runs[0].records)
    island = {
        "charts": {chart.key: chart.data() for chart in charts},
        "tokens": [sample["numbers"] for sample in samples.rollouts] if samples else [],
        "refresh": refresh,
    }
    page: str = load_template(_ASSETS / "report.html").render(
        title=title or (f"{len(names)} runs: {', '.join(names[:4])}{' …' * (len(names) > 4)}" if several else names[0]),
        runs=runs,
        notes=notes,
        signs=SIGNS,
        colors=COLORS,
        sections=sections,
        svgs={chart.key: Markup(chart.svg()) for chart in charts},
        comparison=comparison_table(runs) if several else None,
        differing=differing_settings(runs) if len(runs) > 1 else [],
        costs=cost_tables(runs),
        samples=samples,
        origins=[(run.records.name, describe_origin(run.records)) for run in runs],
        version=__version__,
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        island=_embed_json(island),
        css=read_asset("report.css"),
        uplot_css=read_asset("uplot.min.css"),
        js=read_asset("report.js"),
        uplot_js=read_asset("uplot.min.js"),
    )
    return page.encode(errors="replace").decode()  # a command line may have bytes that are no text


def write_report(
    runs: Sequence[ExaminedRun], path: Path, *, title: str = "", notes: Sequence[tuple[str, str]] = ()
) -> None:
    """Write the page about these runs to `path`, atomically; see `render_report`.

    Raises:
        OSError: it cannot be written.
    """
    atomic_write(path, render_report(runs, title=title, notes=notes))


@cache
def load_template(path: Path) -> Any:
    """Return the template of a page."""
    # Everything from models and data is escaped; what this package made is marked as safe.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(path.read_text(encoding="utf-8"))


@cache
def read_asset(name: str) -> Markup:
    """Return a style sheet or a script of reports."""
    return Markup((_ASSETS / name).read_text(encoding="utf-8"))


def _embed_json(value: Any) -> Markup:
    """Return JSON that cannot end the script element that it stands in."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))
