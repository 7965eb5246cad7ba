"""What `ci/environment.sh` asks about versions: whose torch is installed, what must stay as it is, what is lowest.

    python ci/versions.py vendor              a vendor's torch in this interpreter: its version, a tab, how it is known
    python ci/versions.py constraints FILE    writes pip's constraints for an environment that is built on that torch
    python ci/versions.py lowest              the lowest admitted version of each of the project's requirements
    python ci/versions.py nvidia              the tag of the torch for this machine's NVIDIA GPUs (cu126; - for PyPI's),
                                              a tab, and why; nothing if nvidia-smi lists no GPU

Nothing is imported but metadata, so a torch whose driver is absent is seen too. `constraints` and `lowest` parse
requirements with `packaging`, or with pip's copy if it is not installed. A process that imports pip loses setuptools'
distutils, which DeepSpeed needs to build its operators.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
BUILDS = Path(__file__).parents[1] / "accelerators" / "backends" / "cuda" / "builds.py"
WITHOUT_GPU = {6, 9, 12}
"""Exit codes of nvidia-smi if it finds no GPU, no driver, or no library of the driver."""
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
_PLAIN = re.compile(r"[\d.]+(\.post\d+)?(\+(cpu|cu\d+))?")
"""Versions of PyPI's and PyTorch's own builds for the CPU and NVIDIA's GPUs, which can be had again anywhere."""


def vendor(installed: Iterable[metadata.Distribution]) -> tuple[str, str] | None:
    """(version, how it is known) of a torch that only its vendor can give back; None: there is none, or a plain one."""
    distributions = list(installed)
    version = next((found.version for found in distributions if _name(found) == "torch"), None)
    if version is None:
        return None
    if not _PLAIN.fullmatch(version):
        return version, "by its version"
    bridge = next((_name(found) for found in distributions if _is_bridge(found)), None)
    return (version, f"by {bridge} next to it") if bridge else None


def constraints(installed: Iterable[metadata.Distribution]) -> tuple[list[str], list[str]]:
    """(pip's constraints, what the new environment holds in another version) on top of what is installed.

    Kept are torch, its bridges to devices and all that these need, and each requirement of the project whose version
    is admitted. pip may install another version of the rest next to it if something needs one.

    Raises:
        ValueError: the project does not admit this torch.
    """
    found = {_name(distribution): distribution for distribution in reversed(list(installed))}  # the first one counts
    refused = [
        need
        for need in requirements(extras=True)
        if need.name in found and not need.specifier.contains(found[need.name].version, prereleases=True)
    ]
    own = {need.name for need in requirements()}
    others = [
        f"{need.name} (rlhf needs {need}, found {found[need.name].version})" for need in refused if need.name in own
    ]
    if "torch" in (need.name for need in refused):
        raise ValueError(f"rlhf needs {next(need for need in refused if need.name == 'torch')}")
    kept = _closure(["torch", *(name for name, distribution in found.items() if _is_bridge(distribution))], found)
    kept = (kept | own & found.keys()) - {need.name for need in refused}
    return [f"{name}=={found[name].version}" for name in sorted(kept)], others


def lowest() -> list[str]:
    """The lower bound of each requirement, as `name==version`; a pre-release's stands for the release."""
    bounds = {
        need.name: next(part.version for part in need.specifier if part.operator == ">=") for need in requirements()
    }
    return [f"{name}==" + re.sub(r"(a|b|rc|\.dev)\d+$", "", bound) for name, bound in bounds.items()]


def list_gpus() -> str:
    """What `nvidia-smi` answers to `NVIDIA_SMI`; empty if there is no GPU.

    Raises:
        ValueError: it fails for another reason, such as a library of another version than the driver, or a lost GPU.
    """
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return ""
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"nvidia-smi does not answer ({error})") from error
    if done.returncode and done.returncode not in WITHOUT_GPU:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise ValueError(f"nvidia-smi fails with exit code {done.returncode}: {lines[0] if lines else 'no output'}")
    return "" if done.returncode else done.stdout.strip()


def nvidia(listed: str) -> tuple[str | None, str]:
    """(tag of the torch for these GPUs, empty for PyPI's build and None if there is none; why).

    Args:
        listed: what `nvidia-smi` answers to `NVIDIA_SMI`: a line for each GPU.

    Raises:
        ValueError: a line is something else.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines() if line.strip()]
    gpus = []
    for row in rows:
        if not (len(row) == 3 and re.fullmatch(r"\d+\.\d+", row[1]) and row[2][:1].isdigit()):
            raise ValueError(f"nvidia-smi names no compute capability or driver: {', '.join(row)}")
        major, _, minor = row[1].partition(".")
        gpus.append((row[0], (int(major), int(minor))))
    choice = runpy.run_path(str(BUILDS))["choose"](gpus, rows[0][2])
    return (choice.build.tag if choice.build else None), choice.why


def requirements(extras: bool = False) -> list[Any]:
    """The project's requirements, and those of all its extras, parsed."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        from pip._vendor import tomli as tomllib
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    groups = project["optional-dependencies"].values() if extras else ()
    return [_parse_requirement(line) for line in sum(groups, project["dependencies"])]


def _parse_requirement(line: str) -> Any:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]
    return Requirement(line)


def _closure(names: list[str], found: dict[str, metadata.Distribution]) -> set[str]:
    kept: set[str] = set()
    while names:
        name = names.pop()
        if name not in found or name in kept:
            continue
        kept.add(name)
        for need in map(_parse_requirement, found[name].requires or ()):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                names.append(_canonical(need.name))
    return kept


def _is_bridge(found: metadata.Distribution) -> bool:
    """Is this a device of torch's that torch imports with itself, or Gaudi's, which did so later than it was there?"""
    return _name(found) == "habana-torch-plugin" or any(e.group == "torch.backends" for e in found.entry_points)


def _is_own(found: metadata.Distribution) -> bool:
    """Is it in this virtual environment itself, and not in the interpreter below?"""
    return Path(str(found.locate_file(""))).resolve().is_relative_to(Path(sys.prefix).resolve())


def _name(found: metadata.Distribution) -> str:
    return _canonical(found.metadata["Name"] or "")


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(arguments: list[str]) -> int:
    command, *rest = arguments
    if command == "vendor":
        if known := vendor(metadata.distributions()):
            print("\t".join(known))
    elif command == "nvidia":
        try:
            if listed := list_gpus():
                tag, why = nvidia(listed)
                print(*((why,) if tag is None else (tag or "-", why)), sep="\t")
                return 2 if tag is None else 0
        except ValueError as error:
            print(error)
            return 2
    elif command == "lowest":
        print("\n".join(lowest()))
    elif command == "constraints":
        try:
            kept, others = constraints(found for found in metadata.distributions() if not _is_own(found))
        except ValueError as error:
            print(error)
            return 2
        Path(rest[0]).write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        print("\n".join(f".venv gets its own {other}" for other in others), end="\n" if others else "")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
