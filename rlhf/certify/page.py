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
        list_rows=_list_rows,
        show=_show,
    )
    return page.encode(errors="replace").decode()


def _list_rows(value: Any) -> list[dict[str, Any]]:
    """Return the rows of a fact that becomes a table: a list of records, or several flat records by their names."""
    if isinstance(value, Mapping) and len(value) > 1:
        flat = all(isinstance(item, Mapping) and not any(map(_is_record, item.values())) for item in value.values())
        rows = [{"": name, **item} for name, item in value.items()] if flat else []
    else:
        rows = value if isinstance(value, list) and all(isinstance(item, Mapping) for item in value) else []
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name, "") for name in names} for row in rows]


def _is_record(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(map(_is_record, value)))


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
