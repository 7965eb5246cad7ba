"""The Containerfiles: what they name is here, and what they run leaves the image's torch as it is.

No registry is asked: COPY and RUN are carried out in a folder, on a stand-in for the image's Python.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ci import versions
from tests.installing import places
from tests.installing.standins import wheel

FOLDER = places.ROOT / "ci" / "containers"
FILES = sorted(FOLDER.glob("Containerfile.*"))

IMAGES = {
    "gaudi": {"torch": "2.11.0a0+git1234", "habana-torch-plugin": "1.24.1.3", "numpy": "1.26.4"},
    "cuda": {"torch": "2.9.1+cu128", "numpy": "2.3.0"},
    "cpu": {},
}
"""What the Python of each base image has."""


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, the rest of its line), with continued lines put together and without comments."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line]


def copied(path: Path, image: Path) -> Path:
    """The image's folder after the COPY instructions."""
    image.mkdir()
    for instruction, rest in instructions(path):
        if instruction == "COPY":
            *sources, target = rest.split()
            for source in sources:
                if (places.ROOT / source).is_dir():
                    shutil.copytree(places.ROOT / source, image / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    assert target.endswith("/"), rest
                    (image / target).mkdir(exist_ok=True)
                    shutil.copy(places.ROOT / source, image / target)
    return image


def test_there_is_one_for_each_kind_of_machine() -> None:
    assert [path.suffix.removeprefix(".") for path in FILES] == sorted(IMAGES)
    assert all(f"`{path.name}`" in (FOLDER / "README.md").read_text(encoding="utf-8") for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.suffix)
def test_build_commands_name_existing_files_and_arguments(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    arguments = re.findall(r"^ARG (\w+)", text, re.MULTILINE)
    assert set(re.findall(r"--build-arg (\w+)=", text)) <= set(arguments)
    assert set(re.findall(r"\$\{(\w+)\}", text)) <= set(arguments)
    named = re.findall(r"build -f (\S+)", text)
    assert named and set(named) == {str(path.relative_to(places.ROOT))}
    settings = (places.ROOT / "ci" / "environment.sh").read_text(encoding="utf-8")
    assert all(name in settings for name in re.findall(r"\bRLHF_\w+", text))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.suffix)
def test_it_ends_in_the_projects_command(path: Path) -> None:
    named = dict(instructions(path))
    assert instructions(path)[-1] == ("ENTRYPOINT", '["rlhf"]')
    assert named["ENV"] == f"PATH={named['WORKDIR']}/.venv/bin:$PATH"
    assert "rlhf =" in versions.PYPROJECT.read_text(encoding="utf-8").partition("[project.scripts]")[2]


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.suffix)
def test_image_gets_the_project_and_retains_its_torch(path: Path, wheels: Path, tmp_path: Path) -> None:
    held = IMAGES[path.suffix.removeprefix(".")]
    vendors = [wheel(tmp_path / "vendor", name, version, places.NEEDS.get(name, ())) for name, version in held.items()]
    base = places.interpreter(tmp_path / "base", vendors)
    (tmp_path / "base" / "bin" / "apt-get").symlink_to("/bin/false")
    no_gpu = tmp_path / "base" / "bin" / "nvidia-smi"
    no_gpu.write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    no_gpu.chmod(0o755)
    image = copied(path, tmp_path / "image")
    environment = places.offline(wheels)
    environment["PATH"] = f"{base.parent}:{environment['PATH']}"
    before = places.held(tmp_path / "base")
    output = ""
    for instruction, rest in instructions(path):
        if instruction == "RUN":
            done = subprocess.run(["sh", "-euc", rest], cwd=image, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            output += done.stdout
    installed = places.held(image / ".venv")
    assert places.held(tmp_path / "base") == before
    assert (image / ".venv" / "bin" / "rlhf").is_file()
    assert {name: installed[name] for name in held} == held
    assert installed["deepspeed"] == places.NEWEST["deepspeed"]
    if held:
        assert f"torch {held['torch']}: that of python3, " in output
        assert not list(places.site_of(image / ".venv").glob("torch-*"))
    else:
        assert "torch 2.13.0+cpu: the CPU build; no NVIDIA GPU is found" in output


def test_named_gaudi_releases_carry_an_admitted_torch() -> None:
    from packaging.specifiers import SpecifierSet

    text = (FOLDER / "Containerfile.gaudi").read_text(encoding="utf-8")
    admitted = SpecifierSet(re.search(r'"torch([^"]+)"', versions.PYPROJECT.read_text(encoding="utf-8"))[1])
    releases = dict(zip(re.findall(r"RELEASE=(\S+)", text), re.findall(r"TORCH=(\S+)", text), strict=True))
    assert releases == {"1.23.0": "2.9.0", "1.24.1": "2.11.0"}
    assert all(admitted.contains(f"{torch}+hpu.1") for torch in releases.values())
