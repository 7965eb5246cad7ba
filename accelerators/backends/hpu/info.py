"""Facts about this machine's Gaudi cards, found without torch and without opening one.

They come from `hl-smi`, whichever PATH names, or from the driver's files where there is no such tool. Out come the
hpu backend's probe, the cards that a process may use, and the environment that a run on them wants.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from accelerators.errors import AcceleratorError, HiddenError
from accelerators.types import Probe

RUNTIME = "habana_frameworks"
BRIDGE = "habana-torch-plugin"
VISIBLE_MODULES = "HABANA_VISIBLE_MODULES"
SECONDS = 10.0
"""How long `hl-smi` may take; it answers in about one second, also with eight cards."""

ACCEL = Path("/sys/class/accel")
DRIVER = Path("/sys/module/habanalabs")
DEV = Path("/dev")

_QUERY = ("-Q", "module_id,name,driver_version", "-f", "csv,noheader")
# Boards as `hl-smi` names them, chips as the driver does. Gaudi: HL-200, HL-205; Gaudi2: HL-225, HL-288 (PCIe);
# Gaudi3: HL-325, HL-328, HL-338 (PCIe).
_MODELS = (("Gaudi3", r"HL-3|GAUDI3"), ("Gaudi2", r"HL-2[2-9]|GAUDI2"), ("Gaudi", r"HL-20|GAUDI"))

_PEAKS = {"Gaudi2": 432e12, "Gaudi3": 1835e12}
"""Operations a second of the matrix engines in bf16, by Intel's white papers."""


@dataclass(frozen=True)
class Cards:
    """The cards that this process may use: how many, which chip, and the version of the driver."""

    count: int
    model: str
    driver: str
    source: str
    """Who said so: hl-smi or the driver's files."""
    modules: tuple[str, ...] = field(default=(), compare=False)
    """Their numbers on this machine."""

    @property
    def peak_flops(self) -> dict[str, float]:
        """What their maker states at most (`DeviceInfo.peak_flops`); a driver without a version number is no card's."""
        return {"bf16": _PEAKS[self.model]} if self.model in _PEAKS and self.driver[:1].isdigit() else {}


class _Card(NamedTuple):
    module: str
    name: str
    driver: str


def release() -> str:
    """The release of the vendor's software, which its bridge to torch has as its version; empty where none is found."""
    try:
        return metadata.version(BRIDGE)
    except metadata.PackageNotFoundError:
        return ""


def cards() -> Cards:
    """The cards that this process may use.

    Raises:
        AcceleratorError: there is none; the message carries the most fundamental reason.
    """
    tool = shutil.which("hl-smi")
    source, found = ("hl-smi", _listed_by(tool)) if tool else (str(ACCEL), _listed_by_driver())
    visible = _visible(found)
    modules = tuple(card.module for card in visible)
    return Cards(len(visible), _model(visible[0].name), visible[0].driver, source, modules)


def probe() -> Probe:
    """Whether the hpu backend can run here: there is a card, and the runtime that drives it is installed."""
    files = _device_files()
    try:
        found = cards()
    except HiddenError as error:
        return Probe(ok=False, reason=str(error), count=error.count)
    except AcceleratorError as error:
        wish = os.environ.get(VISIBLE_MODULES)
        shown = f" (cards are there: {', '.join(map(str, files))})" if files else ""
        present = bool(files) and not (wish is not None and not wish.strip())
        return Probe(ok=False, reason=f"{error}{shown}", count=len(files), present=present)
    known: dict[str, Any] = {"count": found.count, "model": found.model}
    if importlib.util.find_spec(RUNTIME) is None:
        reason = (
            f"{RUNTIME} (Gaudi's PyTorch bridge) is not installed here; use Intel's container for driver "
            f"{found.driver}, or install its {BRIDGE} beside its torch"
        )
        return Probe(ok=False, reason=reason, present=found.source == "hl-smi" or bool(files), **known)
    reason = f"{found.source}: driver {found.driver}"
    return Probe(ok=True, reason=reason, devices=_identities(found.modules), **known)


def environment(run: Mapping[str, Any]) -> dict[str, str]:
    """What every run on Gaudi wants set before torch is imported; PT_HPU_LAZY_MODE is left to the user."""
    return {
        # Token ids, positions and the indices of gather are int64; without this they are cut to int32 on the device.
        "PT_ENABLE_INT64_SUPPORT": "1",
        # Lazy mode: collectives become part of the graphs; HPU graphs on several cards need it. Eager mode ignores it.
        "PT_HPU_ENABLE_LAZY_COLLECTIVES": "true",
    }


def _listed_by(tool: str) -> list[_Card]:
    try:
        process = subprocess.Popen(
            [tool, *_QUERY], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        raise AcceleratorError(f"hl-smi cannot be started ({error})") from error
    try:
        output, complaint = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        process.kill()  # without waiting for its end: stuck in a broken driver, it could not die
        raise AcceleratorError(
            f"hl-smi gave no answer in {SECONDS:g} s: the driver may hang; look at dmesg, reload it or reboot"
        ) from error
    said = next((line.strip() for line in (complaint + "\n" + output).splitlines() if line.strip()), "it said nothing")
    if process.returncode:
        raise AcceleratorError(f"hl-smi failed with exit code {process.returncode}: {said}")
    rows = [[field.strip() for field in line.split(",")] for line in output.splitlines()]
    found = [_Card(*row) for row in rows if len(row) == len(_Card._fields) and row[0].isdigit()]
    return _some(found, f"hl-smi lists no card: {said}")


def _listed_by_driver() -> list[_Card]:
    if not DRIVER.exists():
        raise AcceleratorError(f"no Gaudi driver: no hl-smi on PATH, no {DRIVER}")
    driver = _read(DRIVER / "version")
    found = [
        _Card(_read(path / "device" / "module_id"), _read(path / "device" / "device_type"), driver)
        for path in _listed_files()
    ]
    return _some(found, f"the Gaudi driver is loaded, but {ACCEL} has no card")


def _listed_files() -> list[Path]:
    """The driver's folder of each card; accelerators of other vendors have theirs beside them."""
    paths = sorted(ACCEL.glob("accel[0-9]*"))
    return [path for path in paths if "GAUDI" in _read(path / "device" / "device_type")]


def _device_files() -> list[Path]:
    """What a process would open. The driver's folders alone are no card: containers without one show them too."""
    current = [DEV / "accel" / path.name for path in _listed_files()]
    return [path for path in current if path.exists()] or sorted(DEV.glob("hl[0-9]*"))


def _identities(modules: tuple[str, ...]) -> tuple[str, ...]:
    """PCI addresses, else files, of the cards with these numbers, as far as the driver's folders tell."""
    found = [path for path in _listed_files() if _read(path / "device" / "module_id") in modules]
    addresses = {path: (path / "device").resolve().name for path in found}
    return tuple(
        f"pci:{address}" if re.fullmatch(r"[0-9a-f]{4}(:[0-9a-f]{2}){2}\.[0-7]", address) else f"/dev/accel/{path.name}"
        for path, address in addresses.items()
    )


def _some(found: list[_Card], otherwise: str) -> list[_Card]:
    if not found:
        given = os.environ.get("HABANA_VISIBLE_DEVICES")
        hint = "" if given is None else f" (HABANA_VISIBLE_DEVICES={given} chose the cards of this container)"
        raise AcceleratorError(otherwise + hint)
    return found


def _visible(found: list[_Card]) -> list[_Card]:
    wish = os.environ.get(VISIBLE_MODULES)
    if wish is None or wish.strip().lower() == "all":
        return found
    wanted = {part.strip() for part in wish.split(",")}
    visible = [card for card in found if card.module in wanted]
    if not visible:
        listed = ", ".join(card.module for card in found)
        raise HiddenError(f"{VISIBLE_MODULES}={wish} hides every card; their modules are {listed}", len(found))
    return visible


def _model(name: str) -> str:
    return next((model for model, pattern in _MODELS if re.match(pattern, name.upper())), name)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
