"""`make_environment` of ci/environment.sh: which torch it takes, and what it says when it takes none."""

from __future__ import annotations

import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from ci import versions
from tests.installing import places
from tests.installing.standins import wheel

VENDORS = "2.11.0a0+git1234"


class Checkout:
    """A copy of what `make_environment` reads, with a Python below that has some torch or none."""

    def __init__(self, folder: Path, wheels: Path, torch: str | None) -> None:
        self.folder, self.wheels = folder / "checkout", wheels
        (self.folder / "ci").mkdir(parents=True)
        for name in ("ci/environment.sh", "ci/versions.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(places.ROOT / name, self.folder / name)
        for package in ("rlhf", "accelerators/backends/cuda"):
            (self.folder / package).mkdir(parents=True)
            (self.folder / package / "__init__.py").touch()
        (self.folder / "accelerators" / "__init__.py").touch()
        shutil.copy(versions.BUILDS, self.folder / "accelerators" / "backends" / "cuda")
        self.base = folder / "base"
        wheels_below = [wheel(folder / "vendor", "torch", torch)] if torch else []
        self.python = places.interpreter(self.base, wheels_below)
        self.gpus()

    def gpus(self, *lines: str) -> None:
        """Let nvidia-smi list these GPUs; without any it fails, as where no driver is installed."""
        path = self.base / "bin" / "nvidia-smi"
        text = "\n".join(lines)
        path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n" if lines else "#!/bin/sh\nexit 9\n")
        path.chmod(0o755)

    def make(self, arguments: str = '""', **environment: str) -> subprocess.CompletedProcess[str]:
        shell = places.offline(self.wheels, PYTHON=str(self.python), **environment)
        shell["PATH"] = f"{self.base / 'bin'}:{shell['PATH']}"
        script = f"set -euo pipefail; source ci/environment.sh; make_environment {arguments}"
        return subprocess.run(["bash", "-c", script], cwd=self.folder, env=shell, capture_output=True, text=True)

    def refused(self, **environment: str) -> str:
        done = self.make(**environment)
        assert done.returncode == 2, done.stdout + done.stderr
        assert len(done.stderr.splitlines()) == 1
        return done.stderr

    def held(self, environment: str = ".venv") -> dict[str, str]:
        return places.held(self.folder / environment)


@pytest.mark.slow
def test_a_vendors_torch_is_built_upon_and_said_in_one_line(wheels: Path, tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, wheels, VENDORS)
    below = places.held(checkout.base)
    done = checkout.make()
    assert done.returncode == 0, done.stderr
    message = f"torch {VENDORS}: that of {checkout.python}, a vendor's build, known by its version; it stays as it is"
    lines = [line for line in done.stdout.splitlines()[1:] if "gets its own" not in line]  # of what the system has
    assert lines == [message, "installing rlhf"]
    assert checkout.held()["torch"] == VENDORS
    assert places.held(checkout.base) == below
    assert not list(places.site_of(checkout.folder / ".venv").glob("torch*"))
    assert f"torch=={VENDORS}" in (checkout.folder / ".venv" / "constraints").read_text().splitlines()
    again = checkout.make(PIP_FIND_LINKS=str(tmp_path / "nothing"))
    assert (again.stdout, again.returncode) == (message + "\n", 0)


@pytest.mark.parametrize("is_new", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_vendors_torch_that_is_not_admitted_is_refused(wheels: Path, tmp_path: Path, is_new: bool) -> None:
    checkout = Checkout(tmp_path, wheels, "2.7.1a0+git1234")
    if not is_new:  # to unpack pip takes seconds: this environment gets that of the interpreter
        places.interpreter(checkout.folder / ".venv")
        (places.site_of(checkout.folder / ".venv") / "pip").symlink_to(
            str(metadata.distribution("pip").locate_file("pip"))
        )
    assert checkout.refused() == (
        f"error: {checkout.python} has torch 2.7.1a0+git1234, and rlhf needs torch<2.16,>=2.9.0a0; take an image of "
        "the vendor's with such a torch, or name a torch for .venv alone: RLHF_TORCH=torch\n"
    )


def test_environment_with_a_torch_other_than_vendors_is_refused(wheels: Path, tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, wheels, VENDORS)
    places.interpreter(checkout.folder / ".venv", [wheels / "torch-2.13.0+cpu-py3-none-any.whl"])
    line = checkout.refused()
    assert line.startswith(f"error: .venv has torch 2.13.0+cpu, and {checkout.python} has torch {VENDORS}, a vendor's")
    assert "rm -r .venv" in line
    assert "RLHF_TORCH=torch==2.13.0+cpu" in line


@pytest.mark.slow
def test_a_named_torch_goes_into_an_environment_of_its_own(wheels: Path, tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, wheels, VENDORS)
    below = places.held(checkout.base)
    done = checkout.make(RLHF_TORCH="torch==2.9.0")
    assert done.returncode == 0, done.stderr
    assert "torch 2.9.0: RLHF_TORCH names it" in done.stdout.splitlines()
    assert checkout.held()["torch"] == "2.9.0"
    assert places.held(checkout.base) == below


def test_installed_torch_is_refused_if_none_is_installed(wheels: Path, tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, wheels, None)
    assert "RLHF_TORCH=installed, and " in checkout.refused(RLHF_TORCH="installed")
    assert not (checkout.folder / ".venv").exists()


@pytest.mark.slow
def test_a_plain_torch_below_is_left_alone_unless_asked_for(wheels: Path, tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, wheels, "2.9.1+cu128")
    done = checkout.make()
    assert "torch 2.13.0+cpu: the CPU build; no NVIDIA GPU is found" in done.stdout.splitlines(), done.stderr
    assert "torch 2.9.1" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "version", "why"),
    [
        (
            "Tesla V100-SXM2-32GB, 7.0, 535.183.01",
            "2.13.0+cu126",
            "the build for CUDA 12.6; the one for CUDA 13.0 needs",
        ),
        ("NVIDIA H200, 9.0, 580.159.04", "2.13.0", "the build for CUDA 13.0"),
    ],
)
def test_nvidia_gpus_get_the_torch_that_they_and_their_driver_run(
    wheels: Path, tmp_path: Path, gpu: str, version: str, why: str
) -> None:
    checkout = Checkout(tmp_path, wheels, None)
    checkout.gpus(gpu)
    if version != "2.13.0":
        wheel(tmp_path / "more", "torch", version)
    done = checkout.make(PIP_FIND_LINKS=f"{wheels} {tmp_path / 'more'}")
    assert checkout.held()["torch"] == version, done.stderr
    assert f"torch {version}: {why}" in done.stdout


@pytest.mark.slow
def test_gpus_that_no_torch_runs_on_are_refused(wheels: Path, tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, wheels, None)
    checkout.gpus("NVIDIA B200, 10.0, 570.86.15")
    line = checkout.refused()
    assert "update the driver to 580 or later; to use the CPU: RLHF_TORCH=torch==2.13.0+cpu" in line


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
            "version mismatch",
        ),
        pytest.param(
            "echo 'NVIDIA A100-SXM4-80GB, [N/A], 550.54.15'",
            "names no compute capability or driver: NVIDIA A100",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2",
            "is not a valid field to query",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_gpus_that_do_not_answer_are_no_reason_to_take_the_cpus_torch(
    wheels: Path, tmp_path: Path, answer: str, reason: str
) -> None:
    checkout = Checkout(tmp_path, wheels, None)
    (checkout.base / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
    assert reason in checkout.refused()


@pytest.mark.slow
def test_the_lowest_versions_get_an_environment_of_their_own(wheels: Path, tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, wheels, VENDORS)
    done = checkout.make("test --lowest")
    assert done.returncode == 0, done.stderr
    held = checkout.held(".venv-lowest")
    lowest = dict(line.split("==") for line in versions.lowest())
    assert {name: held[name] for name in lowest} == lowest
    assert not (checkout.folder / ".venv").exists()
