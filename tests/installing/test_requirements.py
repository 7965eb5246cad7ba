"""What pyproject.toml asks for: it admits vendors' builds, and pip leaves what it admits as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ci import versions
from tests.helpers import mark_slow
from tests.installing import places
from tests.installing.standins import wheel

LOWEST = dict(line.split("==") for line in versions.lowest())
VENDORS = ("2.9.0+hpu.1.23.0", "2.9.0a0+git1234", "2.11.0a0+git1234", "2.13.1+cpu", "2.15.0a0+git1234")
OFTEN = ["2.9.0a0+git1234"]
"""The default suite runs pip on the lowest pre-release alone, and asks the requirement about all."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's own wheel, without its packages."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("rlhf")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_text((places.ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", str(folder), str(source)], check=True)
    return next(folder.glob("*.whl"))


def needs(project: Path) -> list[Requirement]:
    """What the built wheel says it needs, without extras."""
    requirements = map(Requirement, next(iter(metadata.distributions(path=[str(project)]))).requires or ())
    return [need for need in requirements if need.marker is None]


def would_install(project: Path, python: Path, wheels: Path) -> dict[str, str]:
    """What `pip install` of the project puts into an interpreter: names and versions, from pip's dry run."""
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--dry-run", "--quiet", "--report", "-"]
    done = subprocess.run(
        [*command, str(project)], env=places.offline(wheels), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    distributions = (entry["metadata"] for entry in json.loads(done.stdout)["install"])
    return {entry["name"].lower(): entry["version"] for entry in distributions}


def test_every_requirement_admits_its_lowest_version(project: Path) -> None:
    assert {need.name for need in needs(project)} == LOWEST.keys() == places.NEWEST.keys()
    for need in needs(project):
        assert need.specifier.contains(LOWEST[need.name]), need
        assert need.specifier.contains(places.NEWEST[need.name]), need


@pytest.mark.parametrize("version", mark_slow({version: version for version in VENDORS}, except_for=OFTEN))
def test_pip_leaves_a_vendors_torch_and_what_else_is_admitted(
    project: Path, wheels: Path, tmp_path: Path, version: str
) -> None:
    held = {"torch": version, "deepspeed": "0.19.8+hpu.1", "transformers": "5.18.0"}
    vendors = [
        wheel(tmp_path / "vendor", name, held_version, places.NEEDS.get(name, ()))
        for name, held_version in held.items()
    ]
    python = places.interpreter(tmp_path / "base", vendors)
    assert would_install(project, python, wheels) == {
        "rlhf": "0.1.0",
        "numpy": "2.4.6",
        **{name: newest for name, newest in places.NEWEST.items() if name not in held},
    }


def test_pip_replaces_what_is_not_admitted_alone(project: Path, wheels: Path, tmp_path: Path) -> None:
    held = {"torch": "2.11.0a0+git1234", "deepspeed": "0.16.1+hpu.1", "transformers": "4.57.6"}
    vendors = [wheel(tmp_path / "vendor", name, version) for name, version in held.items()]
    installed = would_install(project, places.interpreter(tmp_path / "base", vendors), wheels)
    assert "torch" not in installed
    assert {name: installed[name] for name in ("deepspeed", "transformers")} == {
        "deepspeed": "0.19.8",
        "transformers": "5.23.0",
    }


def test_vendors_torch_is_admitted_and_an_older_or_newer_is_not(project: Path) -> None:
    torch = next(need for need in needs(project) if need.name == "torch")
    assert all(torch.specifier.contains(version, prereleases=True) for version in VENDORS)
    for version in ("2.8.0", "2.8.0+hpu.1", "2.16.0", "2.16.0a0+git1234"):
        assert not torch.specifier.contains(version, prereleases=True)
