"""Render a certificate as one HTML file that refers to nothing outside of itself, in the style of `rlhf report`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.report.page import load_template, read_asset
from rlhf.utils.units import format_seconds

_TEMPLATE = Path(__file__).with_name("assets") / "certificate.html"


def render_certificate(certificate: Mapping[str, Any]) -> str:
    """Return the page of a certificate, as `certificate.json` has it."""
    page: str = load_template(_TEMPLATE).render(
        certificate=certificate,
        css=read_asset("report.css"),
        format_seconds=format_seconds,
        is_table=_is_table,
        show=_show,
    )
    return page.encode(errors="replace").decode()


def _is_table(value: Any) -> bool:
    """Return whether a fact is a list of records with the same names, which becomes a table."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _show(value: Any) -> str:
    """Return a fact in few characters."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(_show, value)) or "none"
    return "none" if value is None else str(value)
