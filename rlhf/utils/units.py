"""Format and parse numbers for people: bytes in binary units, durations, four significant digits."""

from __future__ import annotations

import re

from rlhf.errors import ConfigError

_UNITS = {"k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def format_bytes(count: float) -> str:
    """Return a size in GiB, MiB, or KiB below 0.1 MiB: `1,024.0 GiB`, `512 MiB`, `2.5 MiB`, `3.1 KiB`."""
    if count >= 2**30:
        return f"{count / 2**30:,.1f} GiB"
    unit, size = ("MiB", count / 2**20) if count >= 0.1 * 2**20 else ("KiB", count / 2**10)
    return f"{size:,.0f} {unit}" if size >= 10 else f"{size:.1f} {unit}"


def parse_bytes(text: str, option: str) -> int:
    """Return the bytes of a size such as `80GiB`, `80GB` or `24g`.

    Args:
        option: names the place of `text` in messages.

    Raises:
        ConfigError: the text is not a size, or has no unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if not match or not float(match[1]):
        raise ConfigError(f"{option}: must be a size, got {text}; write e.g. 80GiB or 24GB")
    if not match[2]:
        raise ConfigError(f"{option}: needs a unit, got {text}; write {match[1]}GiB, or {match[1]}MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def format_number(value: float) -> str:
    """Return four significant digits, with an exponent only if needed: `0.04213`, `12.5`, `1,234,567`, `1.2e+13`."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if abs(value) >= 1e12:
        return f"{value:.4g}"
    if value == int(value):
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def format_count(count: int, unit: str) -> str:
    """Return `1 step`, `1,000 steps`: the unit is a noun in the plural."""
    return f"{count:,} {unit.removesuffix('s') if count == 1 else unit}"


def format_seconds(seconds: float) -> str:
    """Return a duration as `8.2 s`, `3:07` (minutes and seconds) or `1:02:33`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
