"""Finding Intel GPUs from copies of the kernel's files, as drivers of real machines write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rlhf_xpu import plugin

from accelerators import Health, TorchBuild

MAX_1550, B580, A770, CORE_ULTRA = "0x0bd5", "0xe20b", "0x56a0", "0x7d55"
FLEX_170, UHD_770 = "0x56c0", "0x4680"
XPU_BUILD = TorchBuild("2.13.0+xpu", None, None, "20260000")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write the files of a machine: machine(("0000:03:00.0", B580), ...), each GPU with its driver and tiles."""
    monkeypatch.setattr(plugin, "DRM", tmp_path / "drm")
    monkeypatch.setattr(plugin, "DEV", tmp_path / "dri")
    for variable in (plugin.MASK, plugin.HIERARCHY):
        monkeypatch.delenv(variable, raising=False)

    def write(*gpus: tuple[str, str], build: Any = XPU_BUILD, vendor: str = "0x8086", tiles: int = 0, files=True):
        monkeypatch.setattr(plugin, "torch_build", lambda: build)
        for number, (address, identity) in enumerate(gpus, start=128):
            device = tmp_path / "devices" / address
            (tmp_path / "drivers" / "xe").mkdir(parents=True, exist_ok=True)
            device.mkdir(parents=True)
            (device / "vendor").write_text(f"{vendor}\n")
            (device / "device").write_text(f"{identity}\n")
            (device / "driver").symlink_to(tmp_path / "drivers" / "xe")
            for tile in range(tiles):
                (device / f"tile{tile}").mkdir()
            node = plugin.DRM / f"renderD{number}"
            node.mkdir(parents=True)
            (node / "device").symlink_to(device)
            plugin.DEV.mkdir(exist_ok=True)
            if files:
                (plugin.DEV / node.name).touch()

    return write


def test_supported_gpus_are_counted_with_family_driver_and_address(machine):
    machine(("0000:05:00.0", B580), ("0000:03:00.0", B580))
    found = plugin.probe()
    assert (found.ok, found.count, found.model) == (True, 2, "Intel Arc B-Series")
    assert found.devices == ("pci:0000:03:00.0", "pci:0000:05:00.0")
    assert found.reason == "kernel driver xe, torch 2.13.0+xpu"


@pytest.mark.parametrize(
    ("identity", "family"),
    [
        (MAX_1550, "Intel Data Center GPU Max"),
        (A770, "Intel Arc A-Series"),
        (CORE_ULTRA, "Intel Core Ultra with Arc graphics"),
        (FLEX_170, None),
        (UHD_770, None),
    ],
)
def test_gpus_that_pytorch_does_not_list_are_no_devices(machine, identity, family):
    machine(("0000:03:00.0", identity))
    found = plugin.probe()
    assert (found.ok, found.model) == (family is not None, family or "")


def test_gpus_of_other_vendors_are_none(machine):
    machine(("0000:03:00.0", B580), vendor="0x10de")
    assert plugin.probe().count == 0


def test_tiles_are_devices_unless_the_hierarchy_is_composite(machine, monkeypatch):
    machine(("0000:03:00.0", MAX_1550), ("0000:05:00.0", MAX_1550), tiles=2)
    assert plugin.probe().count == 4
    monkeypatch.setenv(plugin.HIERARCHY, "COMPOSITE")
    assert plugin.probe().count == 2


@pytest.mark.parametrize(
    ("mask", "devices"),
    [
        ("1,2", ("pci:0000:03:00.0", "pci:0000:05:00.0")),  # a tile of each GPU
        ("3", ("pci:0000:05:00.0",)),
        ("3,3", ("pci:0000:05:00.0",)),
    ],
)
def test_mask_shows_devices_by_number(machine, monkeypatch, mask, devices):
    machine(("0000:03:00.0", MAX_1550), ("0000:05:00.0", MAX_1550), tiles=2)
    monkeypatch.setenv(plugin.MASK, mask)
    found = plugin.probe()
    assert (found.count, found.devices) == (len(set(mask.split(","))), devices)


@pytest.mark.parametrize("mask", ["", "7"])
def test_gpus_that_the_user_has_hidden_are_not_present(machine, monkeypatch, mask):
    machine(("0000:03:00.0", B580))
    monkeypatch.setenv(plugin.MASK, mask)
    found = plugin.probe()
    assert (found.ok, found.present, found.count) == (False, False, 1)
    assert found.reason == f"ZE_AFFINITY_MASK={mask} hides all 1 GPUs"


def test_graphics_of_the_processor_count_only_without_other_gpus(machine):
    machine(("0000:00:02.0", CORE_ULTRA), ("0000:03:00.0", B580))
    found = plugin.probe()
    assert (found.count, found.devices) == (1, ("pci:0000:03:00.0",))


@pytest.mark.parametrize(("identity", "present"), [(B580, True), (CORE_ULTRA, False)])
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (TorchBuild("2.13.0+cpu", None, None), "torch 2.13.0+cpu is built without XPU"),
        (None, "torch is not installed"),
    ],
)
def test_gpu_without_its_build_of_torch_is_present_if_it_is_a_card(machine, identity, present, build, words):
    machine(("0000:03:00.0", identity), build=build)
    found = plugin.probe()
    assert (found.ok, found.present) == (False, present)
    assert found.reason == f"{words}; install PyTorch's build for XPU"


def test_gpu_whose_file_cannot_be_opened_names_file_and_remedy(machine):
    machine(("0000:03:00.0", B580), files=False)
    found = plugin.probe()
    assert (found.ok, found.present) == (False, True)
    assert "renderD128; join the group of the file (render)" in found.reason


@pytest.mark.parametrize(
    ("folder", "clock", "reason"),
    [
        ("tile0/gt0/freq0", "act_freq", "throttle/reason_"),
        ("drm/card1/gt/gt0", "rps_act_freq_mhz", "throttle_reason_"),
    ],
    ids=["xe", "i915"],
)
def test_health_is_the_clock_and_what_limits_it(machine, folder, clock, reason):
    machine(("0000:03:00.0", B580))
    unit = plugin.DRM / "renderD128" / "device" / folder
    for name, value in {clock: "2400", f"{reason}status": "1", f"{reason}thermal": "1", f"{reason}pl1": "0"}.items():
        (unit / name).parent.mkdir(parents=True, exist_ok=True)
        (unit / name).write_text(f"{value}\n")
    assert plugin.health(0) == Health({"clock": "2,400 MHz"}, ("its clock is limited (thermal)",))
    assert plugin.health(1) == Health()


def test_driver_that_tells_no_clock_has_no_readings(machine):
    machine(("0000:03:00.0", B580))
    assert plugin.health(0) == Health()


def test_report_has_gpus_and_files(machine):
    machine(("0000:03:00.0", B580))
    report = plugin.environment_report()
    assert "0000:03:00.0" in report["GPUs"]
    assert "renderD128" in report["device files"]


def test_level_zero_numbers_gpus_as_the_probe_does():
    assert plugin.environment({}) == {"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"}
