"""Whose torch an interpreter has, and what must stay as it is when an environment is built on it."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from accelerators.backends.cuda.builds import BUILDS
from ci import versions
from tests.installing import places
from tests.installing.standins import unpacked, wheel

GAUDI = "[torch.backends]\ndevice_backend = habana_frameworks:__autoload\n"


def installed(folder: Path, *distributions: tuple[str, ...]) -> list[metadata.Distribution]:
    """Distributions as (name, version, what it needs ...)."""
    wheels = [wheel(folder, name, version, needs) for name, version, *needs in distributions]
    return list(metadata.distributions(path=[str(unpacked(wheels, folder / "site"))]))


@pytest.mark.parametrize("version", ["2.11.0a0+git1234", "2.9.0+hpu.1.23.0", "2.9.0a0", "2.9.1+rocm6.4", "2.10.0.dev1"])
def test_a_torch_that_no_index_has_is_a_vendors(tmp_path: Path, version: str) -> None:
    assert versions.vendor(installed(tmp_path, ("torch", version))) == (version, "by its version")


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.9.1+cu128", "2.9.1.post1"])
def test_a_plain_build_is_nobodys(tmp_path: Path, version: str) -> None:
    assert versions.vendor(installed(tmp_path, ("torch", version), ("torchvision", "0.25.0"))) is None


def test_without_torch_there_is_no_vendors_torch(tmp_path: Path) -> None:
    assert versions.vendor(installed(tmp_path, ("habana_torch_plugin", "1.24.1.3"))) is None


def test_a_bridge_beside_a_plain_torch_makes_it_a_vendors(tmp_path: Path) -> None:
    bridge = ("habana_torch_plugin", "1.24.1.3", "torch")
    assert versions.vendor(installed(tmp_path, ("torch", "2.9.0"), bridge)) == (
        "2.9.0",
        "by habana-torch-plugin next to it",
    )
    folder = tmp_path / "other"
    unpacked([wheel(folder, "torch-npu", "2.9.0", ["torch"], GAUDI)], folder)
    distributions = [*metadata.distributions(path=[str(folder)]), *installed(folder, ("torch", "2.9.0"))]
    assert versions.vendor(distributions) == ("2.9.0", "by torch-npu next to it")


def test_torch_its_bridge_and_admitted_requirements_stay(tmp_path: Path) -> None:
    distributions = installed(
        tmp_path,
        ("torch", "2.11.0a0+git1234", "numpy", "Typing_Extensions>=4.10", "opt-einsum; extra == 'opt'"),
        ("habana-torch-plugin", "1.24.1.3", "torch", "pybind11"),
        ("pybind11", "2.13.6"),
        ("numpy", "1.26.4"),
        ("typing-extensions", "4.12.2"),
        ("opt-einsum", "3.4.0"),
        ("click", "8.1.7"),
        ("transformers", "5.18.0", "click"),
        ("deepspeed", "0.16.1+hpu.1"),
    )
    pinned, others = versions.constraints(distributions)
    assert pinned == [
        "habana-torch-plugin==1.24.1.3",
        "numpy==1.26.4",
        "pybind11==2.13.6",
        "torch==2.11.0a0+git1234",
        "transformers==5.18.0",
        "typing-extensions==4.12.2",
    ]
    assert others == ["deepspeed (rlhf needs deepspeed<0.20,>=0.19.8, found 0.16.1+hpu.1)"]


def test_a_vendors_torch_that_is_too_old_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rlhf needs torch<2\.16,>=2\.9\.0a0$"):
        versions.constraints(installed(tmp_path, ("torch", "2.7.1a0+git1234")))


def test_the_lowest_of_a_prerelease_is_its_release() -> None:
    assert "torch==2.9.0" in versions.lowest()
    assert all(line.count("==") == 1 for line in versions.lowest())


def test_the_torch_that_is_installed_by_default_has_every_build() -> None:
    script = (places.ROOT / "ci" / "environment.sh").read_text(encoding="utf-8")
    (default,) = re.findall(r"torch=torch==(\d+\.\d+)", script)
    assert [str(build) for build in BUILDS if build.last and Version(build.last) < Version(default)] == []
