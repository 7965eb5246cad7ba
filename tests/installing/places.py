"""Interpreters and folders to install in, with no network: a vendor's Python, a checkout, an index of stand-ins."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from ci import versions
from tests.installing.standins import unpacked, wheel

ROOT = Path(__file__).parents[2]

NEWEST = {
    "torch": "2.13.0",
    "deepspeed": "0.19.8",
    "transformers": "5.23.0",
    "peft": "0.21.2",
    "datasets": "5.2.0",
    "nvidia-ml-py": "13.615.71",
    "pluggy": "1.7.0",
    "filelock": "4.2.11",
    "pydantic": "2.14.3",
    "typer": "0.29.2",
    "rich": "15.0.0",
    "tensorboard": "2.21.0",
    "jinja2": "3.1.6",
    "ruamel.yaml": "0.19.1",
}
"""What a package index offers; a requirement that is not here fails the tests."""

NEEDS = {"deepspeed": ["torch", "numpy"], "peft": ["torch>=1.13"], "torch": ["numpy"]}


def index(folder: Path) -> Path:
    """A folder of wheels: the newest and the lowest version of each requirement, numpy, and setuptools itself.

    Of what only the extras require it has version 99.
    """
    lowest = dict(line.split("==") for line in versions.lowest())
    for need in versions.requirements(extras=True):
        if need.name not in {*lowest, "rlhf", "setuptools"} and not str(need.specifier).startswith("=="):
            wheel(folder, need.name, "99")
    for name, version in [*NEWEST.items(), *lowest.items()]:
        wheel(folder, name, version, NEEDS.get(name, ()))
    wheel(folder, "torch", "2.13.0+cpu", NEEDS["torch"])
    wheel(folder, "numpy", "2.4.6")
    setuptools = metadata.distribution("setuptools")
    with zipfile.ZipFile(folder / f"setuptools-{setuptools.version}-py3-none-any.whl", "w") as archive:
        for path in setuptools.files or ():
            if path.suffix != ".pyc" and ".." not in path.parts and setuptools.locate_file(path).is_file():  # type: ignore[attr-defined]
                archive.write(str(setuptools.locate_file(path)), str(path))
    return folder


def interpreter(folder: Path, wheels: Sequence[Path] = ()) -> Path:
    """A Python with these distributions, as a vendor's image has one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    unpacked(wheels, site_of(folder))
    return folder / "bin" / "python3"


def site_of(environment: Path) -> Path:
    """The folder of packages of a virtual environment."""
    return environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def held(environment: Path) -> dict[str, str]:
    """The versions that an environment's Python finds."""
    code = "import importlib.metadata as m\nfor d in m.distributions(): print(d.metadata['Name'].lower(), d.version)"
    done = subprocess.run([environment / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
    held_versions: dict[str, str] = {}
    for line in done.stdout.splitlines():
        held_versions.setdefault(*line.split())  # the first one counts
    return held_versions


def offline(wheels: Path, **more: str) -> dict[str, str]:
    """The environment of a shell whose pip knows this index alone."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "RLHF_", "PYTHON"))}
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    return inherited | pip | {"PIP_ROOT_USER_ACTION": "ignore"} | more
