"""The table of known devices: complete, equal to what the backends state, and derived as its sources say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from accelerators import known_device, known_device_names
from accelerators.backends.cuda.info import GPU
from accelerators.backends.hpu.info import _PEAKS

NAMES = known_device_names()
REPORTED = {
    "a100-40": "NVIDIA A100-SXM4-40GB",
    "a100-80": "NVIDIA A100-SXM4-80GB",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "v100-16": "Tesla V100-SXM2-16GB",
    "v100-32": "Tesla V100-SXM2-32GB",
    "a6000": "NVIDIA RTX A6000",
    "l40s": "NVIDIA L40S",
    "rtx-4090": "NVIDIA GeForce RTX 4090",
}
"""Names that the driver reports."""


def test_names_are_the_keys_of_the_table() -> None:
    assert len(NAMES) == len(set(NAMES)) == 11
    assert {"a100-40", "a100-80", "h100", "h200", "v100-16", "v100-32", "a6000", "l40s", "rtx-4090"} < set(NAMES)
    assert {"gaudi2", "gaudi3"} < set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_known_device_has_figures_and_sources(name: str) -> None:
    device = known_device(name)
    (stated,) = re.findall(r"(\d+) GB", device.name)
    assert 0.9 * int(stated) < device.memory / 2**30 < int(stated), "torch reports less than the maker"
    assert device.peak_flops.keys() <= set(device.precisions) <= {"bf16", "fp16", "fp32"}
    assert device.precisions[0] in device.peak_flops
    assert 0 < device.generation_share < device.training_share < 0.6
    assert device.sources.keys() == {"peak", "generation", "training"}
    if device.price:
        assert 0.1 < device.price.dollars < 10 and device.price.source
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", device.price.date)


@pytest.mark.parametrize("name", NAMES)
def test_peak_equals_that_of_the_backend(name: str) -> None:
    device = known_device(name)
    if name in REPORTED:
        capability = (7, 0) if name.startswith("v100") else (8, 0)
        assert device.peak_flops == GPU(0, REPORTED[name], "", capability, 0).peak_flops
    else:
        assert device.peak_flops == {"bf16": _PEAKS[name.capitalize()]}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("phase", ["generation", "training"])
def test_share_follows_from_its_source(name: str, phase: str) -> None:
    device = known_device(name)
    share, source = getattr(device, f"{phase}_share"), device.sources[phase]
    if source.startswith("published"):
        return  # tests/memory/test_published_hours.py
    if match := re.match(r"assumed, as the ([\w-]+)$", source):
        assert share == getattr(known_device(match[1]), f"{phase}_share")
    elif match := re.fullmatch(r"([\w-]+)'s x \(([\d.]+) TB/s / ([\d.]+)\) / \(([\d.]+) TB/s / ([\d.]+)\)", source):
        bandwidth, peak, other_bandwidth, other_peak = map(float, match.groups()[1:])
        other = known_device(match[1])
        assert share == pytest.approx(
            getattr(other, f"{phase}_share") * bandwidth / peak / (other_bandwidth / other_peak), abs=0.005
        )
        assert (peak * 1e12, other_peak * 1e12) == tuple(d.peak_flops[d.precisions[0]] for d in (device, other))
    else:
        match = re.match(r"([\w-]+)'s x ([\d.]+),", source)
        assert match, source
        assert share == pytest.approx(getattr(known_device(match[1]), f"{phase}_share") * float(match[2]), abs=0.005)


def test_docs_state_the_figures_of_each_device() -> None:
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
    for name in NAMES:
        device = known_device(name)
        best = device.precisions[0]
        price = f"{device.price.dollars:.2f} ({device.price.source}, {device.price.date})" if device.price else "-"
        fields = [
            f"`{name}`",
            device.name,
            f"{device.memory / 2**30:.1f} GiB",
            f"{device.peak_flops[best] / 1e12:g} ({best})",
            f"{100 * device.generation_share:.0f} %, {100 * device.training_share:.0f} %",
            price,
        ]
        assert f"| {' | '.join(fields)} |" in page
