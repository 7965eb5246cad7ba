"""Turns the simulation on in this process: an `hl-smi` on PATH, and a `habana_frameworks` that can be imported.

Nothing is imported or compiled here, torch included. Where the simulation is on when torch is imported, torch loads the
device, as it does Gaudi's own; otherwise the first import of the runtime does.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from accelerators import AcceleratorError
from accelerators.backends.hpu import info as hpu_info
from gaudi_sim import node

_HERE = Path(__file__).parent

VARIABLE = "RLHF_GAUDI_SIM"
NAME = f"rlhf-gaudi-sim {(_HERE / 'VERSION').read_text().strip()}"
RUNTIME = "habana_frameworks"

_BIN = _HERE / "bin"
_SHIM = _HERE / "shim"


class Finder:
    """Finds the shim under the name of Gaudi's bridge; its submodules are then found as those of any package."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of the shim for the bridge's name."""
        if name != RUNTIME:
            return None
        source = _SHIM / "__init__.py"
        return importlib.util.spec_from_file_location(name, source, submodule_search_locations=[str(_SHIM)])

    @staticmethod
    def find_distributions(context: metadata.DistributionFinder.Context) -> Iterator[metadata.Distribution]:
        """Yield the bridge's distribution, if the driver has a version to compare with."""
        if context.name == hpu_info.BRIDGE and os.environ.get(node.DRIVER_VARIABLE):
            yield _Bridge()


class _Bridge(metadata.Distribution):
    """The distribution of the simulated bridge."""

    def read_text(self, filename: str) -> str | None:
        """Return its metadata."""
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {hpu_info.BRIDGE}\nVersion: {node.RELEASE}\n"

    def locate_file(self, path: Any) -> Path:
        """Return where a file of it would be."""
        return Path(_SHIM, path)


def is_wanted() -> bool:
    """Whether the environment asks for the simulation.

    Raises:
        AcceleratorError: the variable has a value that says neither yes nor no.
    """
    wish = os.environ.get(VARIABLE, "0")
    if wish not in ("", "0", "1"):
        raise AcceleratorError(f"{VARIABLE}={wish}: neither 0 nor 1; set it to 1 to simulate a Gaudi on the CPU")
    return wish == "1"


def is_installed() -> bool:
    """Whether this process simulates a Gaudi."""
    return Finder in sys.meta_path


def install() -> None:
    """Simulate a Gaudi in this process, and in those that it starts; torch may have been imported already.

    Raises:
        AcceleratorError: Gaudi's own bridge is installed here.
    """
    if is_installed():
        return
    if real := importlib.util.find_spec(RUNTIME):
        where = real.origin or ", ".join(real.submodule_search_locations or ())
        raise AcceleratorError(
            f"{NAME} will not stand in for the real {RUNTIME} in {where}; "
            f"unset {VARIABLE} to use the Gaudi, or simulate in an environment without {RUNTIME}"
        )
    sys.meta_path.insert(0, Finder)
    os.environ[VARIABLE] = "1"
    node.lay_out()
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join([str(_BIN), *(folder for folder in path if folder != str(_BIN))])


def load_with_torch() -> None:
    """Load the device while torch is imported (entry point group `torch.backends`), where it is wanted.

    PyTorch looks for devices once, in the first backward at the latest, and does not see one that comes later.
    """
    if is_installed() and os.environ.get("RLHF_ACCELERATOR", "hpu") in ("hpu", "auto"):
        # What is wrong (no compiler, ...) is said when the backend imports the runtime, not in place of torch.
        with contextlib.suppress(AcceleratorError):
            importlib.import_module(f"{RUNTIME}.torch")
