"""Devices that are known by name, so that a run can be planned for one that is not here: `known_devices.yaml`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_TABLE = Path(__file__).parent / "known_devices.yaml"


class DevicePrice(NamedTuple):
    """Dollars for one device and hour, on a date (2026-09-25), with the source."""

    dollars: float
    date: str
    source: str


@dataclass(frozen=True)
class KnownDevice:
    """The figures of one device; none of them was measured here.

    Attributes:
        name: the maker's name.
        memory: bytes that torch reports as its total.
        precisions: those that it computes in, the best first.
        peak_flops: the maker's maximum of operations per second, by precision (`DeviceInfo.peak_flops`).
        generation_share: part of the peak that PPO's generation reaches.
        training_share: part of the peak that scoring, updates and the other stages reach.
        price: None if no list price is known.
        sources: the sources of `peak`, `generation` and `training`.
    """

    name: str
    memory: int
    precisions: tuple[str, ...]
    peak_flops: Mapping[str, float]
    generation_share: float
    training_share: float
    price: DevicePrice | None
    sources: Mapping[str, str]


@cache
def known_device_names() -> tuple[str, ...]:
    """Return the names of all known devices, without parsing the table, for the help of a command."""
    return tuple(re.findall(r"^([\w-]+):$", _TABLE.read_text(encoding="utf-8"), re.MULTILINE))


def known_device(name: str) -> KnownDevice:
    """Return the figures of the device with this name.

    Raises:
        KeyError: no device has this name.
    """
    values = _table()[name]
    price = values.get("price")
    return KnownDevice(
        name=values["name"],
        memory=int(float(values["memory"].removesuffix("GiB")) * 2**30),
        precisions=tuple(values["precisions"]),
        peak_flops={precision: peak * 1e12 for precision, peak in values["peak"].items()},
        generation_share=values["share"]["generation"],
        training_share=values["share"]["training"],
        price=DevicePrice(price["dollars"], str(price["date"]), price["source"]) if price else None,
        sources=values["sources"],
    )


@cache
def _table() -> dict[str, Any]:
    from ruamel.yaml import YAML  # takes longer than most commands need to start

    table: dict[str, Any] = YAML(typ="safe", pure=True).load(_TABLE)
    return table
