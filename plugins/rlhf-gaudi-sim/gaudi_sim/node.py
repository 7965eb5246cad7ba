"""The simulated machine: which cards the driver lists, which of them this container may open, and who has them open.

RLHF_GAUDI_SIM_NODE=FOLDER holds the driver's files; processes that name the same folder are on one machine, and one at
a time opens a card. Without it, every process has a machine to itself. Imports no torch.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from accelerators.backends.hpu import info as hpu_info
from gaudi_sim.behaviours import is_simulated

NODE_VARIABLE = "RLHF_GAUDI_SIM_NODE"
CLOSED_VARIABLE = "RLHF_GAUDI_SIM_CLOSED"
DRIVER_VARIABLE = "RLHF_GAUDI_SIM_DRIVER"
RELEASE = "1.24.1"
"""The release of the simulated bridge, if there is a version of the driver to compare it with."""

_open_card: int | None = None  # file descriptor


def lay_out() -> None:
    """Write the driver's files into the folder of RLHF_GAUDI_SIM_NODE, and let the backend read them there.

    The real driver's folders list all cards of a machine, as `hl-smi` does, and /dev/accel those of the container.
    """
    if not (folder := os.environ.get(NODE_VARIABLE)):
        return
    hpu_info.ACCEL, hpu_info.DEV = Path(folder, "class"), Path(folder, "dev")
    (hpu_info.DEV / "accel").mkdir(parents=True, exist_ok=True)
    closed = os.environ.get(CLOSED_VARIABLE, "").split(",")
    for module in range(int(os.environ.get("RLHF_GAUDI_SIM_CARDS", "8"))):
        facts = hpu_info.ACCEL / f"accel{module}" / "device"
        facts.mkdir(parents=True, exist_ok=True)
        (facts / "module_id").write_text(f"{module}\n")
        (facts / "device_type").write_text("GAUDI2\n")
        if str(module) not in closed:
            _file_of(module).touch()


def named_modules() -> list[int] | None:
    """Return the modules of HABANA_VISIBLE_MODULES; the bridge makes an int of each part (`_utils.py`)."""
    wish = os.environ.get(hpu_info.VISIBLE_MODULES)
    return None if wish is None else [int(part) for part in wish.split(",")]


def choose_module(local_rank: int) -> None:
    """Write the module of a rank to HLS_MODULE_ID, unless it is there already.

    Raises:
        ValueError: HABANA_VISIBLE_MODULES has something else than numbers.
    """
    modules = named_modules()
    os.environ.setdefault(hpu_info.MODULE, str(local_rank if modules is None else modules[local_rank]))


def acquire_card() -> None:
    """Open the card of this process: the one in HLS_MODULE_ID, otherwise any free one.

    Raises:
        RuntimeError: another process has it open, or the container has no such card (logs in verl-gaudi: "synStatus=8
            Device acquire failed").
    """
    global _open_card
    if _open_card is not None or not os.environ.get(NODE_VARIABLE):
        return
    candidates = list(range(int(os.environ.get("RLHF_GAUDI_SIM_CARDS", "8"))))
    if hpu_info.MODULE in os.environ and is_simulated("modules"):
        candidates = [int(os.environ[hpu_info.MODULE])]
    elif (modules := named_modules()) is not None:
        candidates = modules
    for module in candidates:
        try:
            descriptor = os.open(_file_of(module), os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            continue
        _open_card = descriptor
        return
    raise RuntimeError("synStatus=8 [Device not found] Device acquire failed.")


def error_of_operators() -> str:
    """Return the error of every operator if bridge and driver are of different releases, else "".

    "A 1.22/1.23 userspace against a 1.24 driver fails even (x@x).sum() with synStatus 26" (verl-gaudi).
    """
    driver = os.environ.get(DRIVER_VARIABLE, RELEASE)
    same = re.match(r"\d+\.\d+", driver), re.match(r"\d+\.\d+", RELEASE)
    if all(same) and len({match[0] for match in same if match}) == 1:
        return ""
    return "Graph compile failed. synStatus=synStatus 26 [Generic failure]."


def check_logs() -> None:
    """End the process if HABANA_LOGS cannot be written, as the libraries of the bridge do in C++ (logs in verl-gaudi).

    Without the variable, the real folder is one that the image has.
    """
    if (folder := os.environ.get("HABANA_LOGS")) and is_simulated("logs"):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / ".written").touch()
        except OSError:
            os.abort()


def _file_of(module: int) -> Path:
    return hpu_info.DEV / "accel" / f"accel{module}"
