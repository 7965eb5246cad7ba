"""The entry point: finds Intel GPUs in the kernel's files, without torch and without opening a device.

Sources, each named where it is used:
[pytorch] docs.pytorch.org/docs/2.15/notes/get_start_xpu.html: the GPUs that PyTorch is validated on
[ids] github.com/intel/compute-runtime, shared/source/dll/devices/devices_base.inl: their PCI device ids and names
[order] github.com/intel/compute-runtime, `sortNeoDevices`: ZE_ENABLE_PCI_ID_DEVICE_ORDER sorts devices by PCI address
[tiles] Linux, drivers/gpu/drm/xe/xe_tile_sysfs.c: a folder `tile<n>` for each tile of a GPU
[torch] torch/xpu/__init__.py, `_parse_visible_devices` and `_enum_zes_device_infos`: how torch numbers devices
[health] Linux, drivers/gpu/drm/xe/xe_gt_throttle.c and drivers/gpu/drm/i915/gt/intel_gt_sysfs_pm.c
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerators import AcceleratorSpec, Health, Probe, describe_files, hookimpl, read_command, read_text, torch_build

DRM, DEV = Path("/sys/class/drm"), Path("/dev/dri")
VENDOR = "0x8086"
MASK, HIERARCHY = "ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY"

FAMILIES = (  # [pytorch], with the ids of these names in [ids]
    ("Intel Data Center GPU Max", r"0bd[04-9ab]|0b6[9e]", False),
    ("Intel Arc B-Series", r"e2[0-2][0-9a-f]", False),
    ("Intel Arc A-Series", r"4f8[0-8]|56[9ab][0-9a-f]", False),
    ("Intel Core Ultra with Arc graphics", r"7d55|7d51|64a0|b08[0-3]", True),
)
"""Name of a family, its device ids, and whether it is a part of the processor."""


@dataclass(frozen=True)
class GPU:
    """A GPU that PyTorch supports; `address` is that of the PCI bus, as in "0000:19:00.0"."""

    address: str
    family: str
    integrated: bool
    tiles: int
    driver: str
    file: Path


def gpus() -> list[GPU]:
    """Return the GPUs of this machine that PyTorch supports, by PCI address."""
    found = []
    for node in DRM.glob("renderD*"):
        facts = node / "device"
        if read_text(facts / "vendor").strip() != VENDOR:
            continue
        number = read_text(facts / "device").strip().removeprefix("0x")
        for family, numbers, integrated in FAMILIES:
            if re.fullmatch(numbers, number):
                address, driver = facts.resolve().name, (facts / "driver").resolve().name
                tiles = len(list(facts.glob("tile[0-9]*"))) or 1  # [tiles]; the older driver, i915, does not tell
                found.append(GPU(address, family, integrated, tiles, driver, DEV / node.name))
    return sorted(found, key=lambda gpu: gpu.address)


def shown(present: list[GPU]) -> list[GPU]:
    """Return the GPUs of torch's devices 0, 1, ...: one with two tiles is two devices by default [torch]."""
    flat = os.environ.get(HIERARCHY) != "COMPOSITE"
    devices = [gpu for gpu in present for _ in range(gpu.tiles if flat else 1)]
    if (mask := os.environ.get(MASK)) is not None:
        chosen = {int(number) for number in re.findall(r"(?:^|,)\s*(\d+)", mask)}
        devices = [gpu for index, gpu in enumerate(devices) if index in chosen]
    return [gpu for gpu in devices if not gpu.integrated] or devices  # integrated ones only if there are no others


def probe() -> Probe:
    """Report whether torch can use an Intel GPU here; if not, the most fundamental reason."""
    present = gpus()
    if not present:
        return Probe(False, f"{DRM} has no Intel GPU that PyTorch supports")
    devices = shown(present)
    if not devices:
        return Probe(False, f"{MASK}={os.environ[MASK]} hides all {len(present)} GPUs", count=len(present))
    model = " / ".join(dict.fromkeys(gpu.family for gpu in devices))
    facts: dict[str, Any] = {"count": len(devices), "model": model}
    facts["present"] = not devices[0].integrated  # users with a processor's graphics alone may want the CPU
    if closed := [str(gpu.file) for gpu in devices if not os.access(gpu.file, os.R_OK | os.W_OK)]:
        remedy = "join the group of the file (render), or start the container with --device /dev/dri"
        return Probe(False, f"this user may not open {', '.join(dict.fromkeys(closed))}; {remedy}", **facts)
    build = torch_build()
    if build is None or build.xpu is None:
        here = f"torch {build.version} is built without XPU" if build else "torch is not installed"
        return Probe(False, f"{here}; install PyTorch's build for XPU", **facts)
    drivers = ", ".join(sorted({gpu.driver for gpu in devices}))
    identities = tuple(dict.fromkeys(f"pci:{gpu.address}" for gpu in devices))
    return Probe(True, f"kernel driver {drivers}, torch {build.version}", devices=identities, **facts)


def environment(run: Mapping[str, Any]) -> dict[str, str]:
    """Let Level Zero number the GPUs by PCI address, as the probe does [order]."""
    return {"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"}


def health(index: int) -> Health:
    """Return the clock of a device of torch, and the kernel's reasons for a lower one [health]."""
    devices = shown(gpus())
    if index >= len(devices):
        return Health()
    facts = DRM / devices[index].file.name / "device"
    units = [*facts.glob("tile*/gt*/freq*"), *facts.glob("drm/card*/gt/gt*")]  # of the drivers xe and i915
    clocks = [int(read_text(file)) for unit in units for file in unit.glob("*act_freq*")]
    limits = {file.name.rpartition("reason_")[2] for unit in units for file in unit.rglob("*reason_*") if _is_set(file)}
    reasons = ", ".join(sorted(limits - {"status"}))
    problems = (f"its clock is limited ({reasons})",) if reasons else ()
    return Health({"clock": f"{max(clocks):,} MHz"} if clocks else {}, problems)


def _is_set(file: Path) -> bool:
    return read_text(file).strip() == "1"


def environment_report() -> dict[str, str]:
    """Return facts about GPUs and drivers (`Accelerator.environment_report`)."""
    return {
        "xpu-smi": read_command("xpu-smi", "discovery"),
        "GPUs": "\n".join(map(str, gpus())) or "none",
        "device files": describe_files(DEV.glob("renderD*")),
    }


@hookimpl
def rlhf_accelerators() -> Iterable[AcceleratorSpec]:
    """Offer the backend, below NVIDIA's: a machine with both has an Intel GPU for its screen."""
    factory = "rlhf_xpu.backend:XPU"
    return [AcceleratorSpec(name="xpu", api_version=3, factory=factory, probe=probe, env=environment, priority=90)]
