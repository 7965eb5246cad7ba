"""Render a report of one or several runs as one HTML file that refers to nothing outside of itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from rlhf.report.contents import (
    STATES,
    RunReport,
    comparison_table,
    completion_table,
    cost_tables,
    differing_settings,
    now,
    provenance,
    question_sections,
    text_tables,
    token_samples,
)
from rlhf.utils.atomic_io import atomic_write
from rlhf.version import __version__

_ASSETS = Path(__file__).with_name("assets")


def render_report(
    reports: Sequence[RunReport], *, title: str = "", notes: Sequence[tuple[str, str]] = (), refresh: int = 0
) -> str:
    """Return the page about these runs.

    Args:
        reports: the runs; several are compared.
        title: the page's title; empty: the names of the runs.
        notes: names of runs, each with a text about it, such as why it has no records.
        refresh: seconds after which an open page loads itself again; 0: never.
    """
    sections = question_sections(reports)
    charts = [chart for section in sections for _, group in section.charts for chart in group]
    names = [report.records.name for report in reports]
    several = len(reports) != 1 or bool(notes)
    # Samples and tokens of one run only: those of several would be megabytes, and each run has its own report.
    shown = [] if several else reports
    samples = [
        (report.records.name, completion_table(report), text_tables(report), token_samples(report)) for report in shown
    ]
    tokens = [sample["numbers"] for *_, token_rows in samples for sample in token_rows]
    island = {"charts": {chart.key: chart.data() for chart in charts}, "tokens": tokens, "refresh": refresh}
    page: str = _template().render(
        title=title or (f"{len(names)} runs: {', '.join(names[:4])}{' …' * (len(names) > 4)}" if several else names[0]),
        runs=reports,
        notes=notes,
        signs=STATES,
        sections=sections,
        svgs={chart.key: Markup(chart.svg()) for chart in charts},
        comparison=comparison_table(reports) if several else None,
        differing=differing_settings(reports) if len(reports) > 1 else [],
        costs=cost_tables(reports),
        samples=samples,
        has_samples=any(table or texts or rows for _, table, texts, rows in samples),
        origins=[(report.records.name, provenance(report)) for report in reports],
        version=__version__,
        made=now(),
        island=_embed_json(island),
        css=_asset("report.css"),
        uplot_css=_asset("uplot.min.css"),
        js=_asset("report.js"),
        uplot_js=_asset("uplot.min.js"),
    )
    return page.encode(errors="replace").decode()  # a command line may have bytes that are no text


def write_report(reports: Sequence[RunReport], path: Path) -> None:
    """Write the page about these runs to `path`, atomically.

    Raises:
        OSError: it cannot be written.
    """
    atomic_write(path, render_report(reports))


@cache
def _template() -> Any:
    # Everything from models and data is escaped; what this package made is marked as safe.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((_ASSETS / "report.html").read_text(encoding="utf-8"))


@cache
def _asset(name: str) -> Markup:
    return Markup((_ASSETS / name).read_text(encoding="utf-8"))


def _embed_json(value: Any) -> Markup:
    """Return JSON that cannot end the script element that it stands in."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))
