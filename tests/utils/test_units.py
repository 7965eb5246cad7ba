"""Numbers as people read and write them."""

import pytest

from rlhf.errors import ConfigError
from rlhf.utils.units import format_bytes, format_number, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0.0 KiB"),
        (3_200, "3.1 KiB"),
        (2.5 * 2**20, "2.5 MiB"),
        (612 * 2**20, "612 MiB"),
        (3 << 30, "3.0 GiB"),
        (1 << 40, "1,024.0 GiB"),
    ],
)
def test_format_bytes_takes_binary_units(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "count"), [("80GiB", 80 * 2**30), ("80GB", 80 * 10**9), ("24g", 24 * 10**9), ("1.5 MiB", 3 * 2**19)]
)
def test_parse_bytes_reads_binary_and_decimal_units(text: str, count: int) -> None:
    assert parse_bytes(text, "--memory") == count


@pytest.mark.parametrize(("text", "remedy"), [("lots", "80GiB"), ("0GiB", "80GiB"), ("24", "24GiB")])
def test_parse_bytes_without_a_size_or_unit_is_refused(text: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"--memory: .*got {text}; write .*{remedy}"):
        parse_bytes(text, "--memory")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.042131, "0.04213"), (3.0, "3"), (12345.6, "12,346"), (1e-5, "1e-05"), (float("nan"), "nan"), (-2.5, "-2.5")],
)
def test_format_number_keeps_four_significant_digits(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.04, "0.0 s"), (9.96, "10 s"), (187, "3:07"), (3753, "1:02:33")])
def test_format_seconds_takes_the_shortest_form(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
