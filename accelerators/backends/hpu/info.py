"""Facts about this machine's Gaudi cards, read without torch and without opening a card.

They come from the `hl-smi` in PATH, or from the driver's files if there is no such tool.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from accelerators import host
from accelerators.errors import AcceleratorError, HiddenError
from accelerators.types import Probe

RUNTIME = "habana_frameworks"
BRIDGE = "habana-torch-plugin"
VISIBLE_MODULES = "HABANA_VISIBLE_MODULES"
MODULE = "HLS_MODULE_ID"
"""Variable with the module that this process opens."""
DEFAULT_LOGS = "/var/log/habana_logs"
"""Folder of Gaudi's software for its logs if HABANA_LOGS names none; it ends the process if it cannot write there."""
SECONDS = 10.0
"""Time limit of `hl-smi`, which takes about one second, even with eight cards."""
KERNELS = "GC_KERNEL_PATH"
DEFAULT_KERNELS = Path("/usr/lib/habanalabs/libtpc_kernels.so")
"""Library of the vector cores' kernels. Images name it in GC_KERNEL_PATH, which a container may start without."""
RECIPES = "PT_HPU_RECIPE_CACHE_CONFIG"
RECIPES_MB = 16384
"""Maximum size of the compiled graphs on disk; the bridge then removes the oldest."""

ACCEL = Path("/sys/class/accel")
DRIVER = Path("/sys/module/habanalabs")
DEV = Path("/dev")

_QUERY = ("-Q", "module_id,name,driver_version", "-f", "csv,noheader")
# Names of boards from `hl-smi`, and of chips from the driver. Gaudi: HL-200, HL-205; Gaudi2: HL-225, HL-288 (PCIe);
# Gaudi3: HL-325, HL-328, HL-338 (PCIe).
_MODELS = (("Gaudi3", r"HL-3|GAUDI3"), ("Gaudi2", r"HL-2[2-9]|GAUDI2"), ("Gaudi", r"HL-20|GAUDI"))

_PEAKS = {"Gaudi2": 432e12, "Gaudi3": 1835e12}
"""Operations per second of the matrix engines in bf16, according to Intel's white papers."""


@dataclass(frozen=True)
class Cards:
    """The cards that this process may use: how many, which chip, and the version of the driver."""

    count: int
    model: str
    driver: str
    source: str
    """The source of the facts: hl-smi or the driver's files."""
    modules: tuple[str, ...] = field(default=(), compare=False)
    """Their numbers on this machine."""

    @property
    def peak_flops(self) -> dict[str, float]:
        """The maker's maximum (`DeviceInfo.peak_flops`); empty for a simulated driver, which has no version number."""
        return {"bf16": _PEAKS[self.model]} if self.model in _PEAKS and self.driver[:1].isdigit() else {}


class _Card(NamedTuple):
    module: str
    name: str
    driver: str


def release() -> str:
    """Return the release of the vendor's software, the version of its bridge to torch; "" if it is not installed."""
    try:
        return metadata.version(BRIDGE)
    except metadata.PackageNotFoundError:
        return ""


def cards() -> Cards:
    """Return the cards that this process may use.

    Raises:
        AcceleratorError: it may use none; the message has the most fundamental reason.
    """
    tool = shutil.which("hl-smi")
    source, listed = ("hl-smi", _listed_by(tool)) if tool else (str(ACCEL), _listed_by_driver())
    visible = _visible(_openable(listed))
    modules = tuple(card.module for card in visible)
    return Cards(len(visible), _model(visible[0].name), visible[0].driver, source, modules)


def probe() -> Probe:
    """Report whether the hpu backend can run here: whether there is a card, and its runtime is installed."""
    files = _device_files()
    try:
        usable = cards()
    except HiddenError as error:
        return Probe(ok=False, reason=str(error), count=error.count)
    except AcceleratorError as error:
        wish = os.environ.get(VISIBLE_MODULES)
        hint = f" (cards are present: {', '.join(map(str, files))})" if files else ""
        present = bool(files) and not (wish is not None and not wish.strip())
        return Probe(ok=False, reason=f"{error}{hint}", count=len(files), present=present)
    facts: dict[str, Any] = {"count": usable.count, "model": usable.model}
    if importlib.util.find_spec(RUNTIME) is None:
        reason = (
            f"{RUNTIME} (Gaudi's PyTorch bridge) is not installed here; use Intel's container for driver "
            f"{usable.driver}, of release 1.23 or later: nothing else has it"
        )
        return Probe(ok=False, reason=reason, present=usable.source == "hl-smi" or bool(files), **facts)
    reason = f"{usable.source}: driver {usable.driver}"
    return Probe(ok=True, reason=reason, devices=_identities(usable.modules), **facts)


def environment(run: Mapping[str, Any]) -> dict[str, str]:
    """Return variables for every run on Gaudi, set before torch is imported; PT_HPU_LAZY_MODE is the user's choice.

    A HABANA_LOGS that cannot be written is removed, since variables that are set already keep their values.
    """
    variables = {}
    if (version := release()) and RECIPES not in os.environ:
        # Compiled graphs, which the bridge calls recipes: one rank compiles, the others and later runs read its result.
        variables[RECIPES] = f"{_recipe_folder(version)},false,{RECIPES_MB}"
    if asks_for_lazy():
        variables |= {
            # Token ids, positions and the indices of gather are int64; without this they are cut to int32 on the card.
            # Eager mode has int64 anyway.
            "PT_ENABLE_INT64_SUPPORT": "1",
            # Collectives become part of the graphs; HPU graphs on several cards need it.
            "PT_HPU_ENABLE_LAZY_COLLECTIVES": "true",
            # Otherwise the bridge keeps every parameter and its gradient until the process ends: after each stage of a
            # run its models would stay on the card.
            "PT_HPU_WEIGHT_SHARING": "0",
        }
    if not os.environ.get(KERNELS) and os.path.isfile(DEFAULT_KERNELS):
        variables[KERNELS] = str(DEFAULT_KERNELS)
    logs = Path(os.environ.get("HABANA_LOGS") or DEFAULT_LOGS)
    # Not `Path.exists`, which raises an error below a folder that this user may not enter.
    existing = next(folder for folder in (logs, *logs.absolute().parents) if os.path.exists(folder))
    if not (os.path.isdir(existing) and os.access(existing, os.W_OK)):
        os.environ.pop("HABANA_LOGS", None)  # the image's own, which would stay
        variables["HABANA_LOGS"] = str(Path(tempfile.gettempdir(), f"habana_logs-{os.getuid()}"))
    return variables


def _recipe_folder(version: str) -> Path:
    """Return a folder for compiled graphs of a release that no other user can write.

    It is a temporary one: homes are often on NFS, where the bridge's locks need another setting.
    """
    folder = Path(tempfile.gettempdir(), f"rlhf-gaudi-recipes-{os.getuid()}-{version}")
    if host.make_private(folder):
        return folder
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))  # another user has taken the name


def asks_for_lazy() -> bool:
    """Return whether PT_HPU_LAZY_MODE asks for lazy mode; without it, current releases run eagerly."""
    return os.environ.get("PT_HPU_LAZY_MODE", "0").strip() not in ("", "0")


def describe_mismatch(driver: str) -> str:
    """Return `; ...` if driver and bridge are of different releases, which fails at the first operator, else ""."""
    pattern = re.compile(r"\d+\.\d+")
    theirs, ours = pattern.match(driver), pattern.match(release())
    if theirs is None or ours is None or theirs[0] == ours[0]:
        return ""
    return f"; this container is of release {ours[0]}, and the driver of {theirs[0]}: use the container of {theirs[0]}"


def describe_opening_remedy(error: BaseException) -> str:
    """Return what to do if a card cannot be opened."""
    if "ibv" in str(error).lower():  # "g_ibv.init", with the same status as a card in use
        return (
            "the ports of the card cannot be opened: start the container with --runtime=habana, and with "
            "--device=/dev/infiniband if there is such a folder"
        )
    return "hl-smi shows who uses it, and one process has a card for itself"


def environment_report() -> dict[str, str]:
    """Return facts about cards, driver and software (`Accelerator.environment_report`)."""
    logs = os.environ.get("HABANA_LOGS") or DEFAULT_LOGS
    driver = _read(DRIVER / "version")
    return {
        "hl-smi": host.read_command("hl-smi", "-Q", "module_id,name,driver_version,bus_id", "-f", "csv"),
        "driver": driver or "not loaded",
        "bridge": f"{BRIDGE} {release() or 'is not installed'}{describe_mismatch(driver)}",
        "device files": host.describe_files([*_device_files(), *DEV.glob("infiniband/*")]),
        "logs": f"{logs}, {'writable' if os.access(logs, os.W_OK) else 'not writable'}",
        "kernels": _describe_kernels(os.environ.get(KERNELS) or str(DEFAULT_KERNELS)),
    }


def _describe_kernels(libraries: str) -> str:
    missing = [path for path in libraries.split(":") if not os.path.isfile(path)]
    return f"{libraries}{'; missing: ' if missing else ''}{', '.join(missing)}"


def _listed_by(tool: str) -> list[_Card]:
    try:
        done = host.run_tool(tool, *_QUERY, seconds=SECONDS)
    except OSError as error:
        raise AcceleratorError(f"hl-smi cannot be started ({error})") from error
    except subprocess.TimeoutExpired as error:
        raise AcceleratorError(
            f"hl-smi gave no answer in {SECONDS:g} s: the driver may hang; look at dmesg, reload it or reboot"
        ) from error
    output, errors = done.stdout, done.stderr
    first_line = next((line.strip() for line in (errors + "\n" + output).splitlines() if line.strip()), "no output")
    if done.returncode:
        raise AcceleratorError(f"hl-smi failed with exit code {done.returncode}: {first_line}")
    rows = [[field.strip() for field in line.split(",")] for line in output.splitlines()]
    listed = [_Card(*row) for row in rows if len(row) == len(_Card._fields) and row[0].isdigit()]
    return _some(listed, f"hl-smi lists no card: {first_line}")


def _listed_by_driver() -> list[_Card]:
    if not DRIVER.exists():
        raise AcceleratorError(f"no Gaudi driver: no hl-smi on PATH, no {DRIVER}")
    driver = _read(DRIVER / "version")
    listed = [
        _Card(_read(path / "device" / "module_id"), _read(path / "device" / "device_type"), driver)
        for path in _listed_files()
    ]
    return _some(listed, f"the Gaudi driver is loaded, but {ACCEL} has no card")


def _listed_files() -> list[Path]:
    """Return the driver's folder of each card; the parent folder contains accelerators of other vendors too."""
    paths = sorted(ACCEL.glob("accel[0-9]*"))
    return [path for path in paths if "GAUDI" in _read(path / "device" / "device_type")]


def _device_files() -> list[Path]:
    """Return the files that a process would open. The driver's folders also exist in containers without a card."""
    current = [DEV / "accel" / path.name for path in _listed_files()]
    return [path for path in current if path.exists()] or sorted(DEV.glob("hl[0-9]*"))


def _identities(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Return the PCI addresses, or else files, of the cards with these numbers, from the driver's folders."""
    folders = [path for path in _listed_files() if _read(path / "device" / "module_id") in modules]
    addresses = {path: (path / "device").resolve().name for path in folders}
    return tuple(
        f"pci:{address}" if re.fullmatch(r"[0-9a-f]{4}(:[0-9a-f]{2}){2}\.[0-7]", address) else f"/dev/accel/{path.name}"
        for path, address in addresses.items()
    )


def _some(listed: list[_Card], reason: str) -> list[_Card]:
    if not listed:
        container_wish = os.environ.get("HABANA_VISIBLE_DEVICES")
        hint = (
            ""
            if container_wish is None
            else f" (HABANA_VISIBLE_DEVICES={container_wish} chose the cards of this container)"
        )
        raise AcceleratorError(reason + hint)
    return listed


def _openable(listed: list[_Card]) -> list[_Card]:
    """Return the cards whose files this process may open; all if the driver's folders do not tell whose file is whose.

    hl-smi and the driver's folders list all cards of a machine, and a container may have been given a few of them.
    """
    files = {_read(path / "device" / "module_id"): DEV / "accel" / path.name for path in _listed_files()}
    if not any(file.exists() for file in files.values()):
        return listed
    openable = [card for card in listed if card.module not in files or os.access(files[card.module], os.R_OK | os.W_OK)]
    if not openable:
        raise AcceleratorError(
            f"this user may not open any of the {len(listed)} cards (in {DEV / 'accel'}); join the group of these "
            "files, or start the container with --runtime=habana"
        )
    return openable


def _visible(listed: list[_Card]) -> list[_Card]:
    wish = os.environ.get(VISIBLE_MODULES)
    if wish is None:
        return listed
    if wish.strip().lower() == "all":  # the bridge makes numbers of the parts
        raise AcceleratorError(f"{VISIBLE_MODULES}={wish}: Gaudi's bridge accepts module numbers only; unset it")
    modules = {part.strip() for part in wish.split(",")}
    visible = [card for card in listed if card.module in modules]
    if not visible:
        names = ", ".join(card.module for card in listed)
        raise HiddenError(f"{VISIBLE_MODULES}={wish} hides every card; their modules are {names}", len(listed))
    return visible


def _model(name: str) -> str:
    return next((model for model, pattern in _MODELS if re.match(pattern, name.upper())), name)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
