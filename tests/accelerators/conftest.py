"""Installs the distributions of `plugins/` for real: built by setuptools, unpacked by pip, found through metadata."""

from __future__ import annotations

import fcntl
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import accelerators
from accelerators import discovery
from tests.accelerators import fake_plugins

SOURCES = Path(__file__).parent / "plugins"

PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "rlhf-{dashed}"
version = "1.2.3"

[project.entry-points."rlhf.accelerators"]
{dashed} = "rlhf_{name}"

[tool.setuptools]
py-modules = {modules}
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def install(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str], Path]:
    """The folder in which a plugin is installed; made on first use, once for all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    shared = (base if worker_id == "master" else base.parent) / "plugins"
    shared.mkdir(exist_ok=True)

    def installed(name: str) -> Path:
        target = shared / name / "site"
        with open(shared / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _pip_install(SOURCES / name, shared / name / "source", target)
        return target

    return installed


@pytest.fixture(scope="session")
def run_python(install: Callable[[str], Path]) -> Run:
    """Run Python with plugins installed: run_python("-m", "rlhf", ..., plugins=["good"], env={...})."""

    def run(
        *arguments: str, plugins: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("RLHF_", "DS_ACCELERATOR"))}
        path = os.pathsep.join(map(str, map(install, plugins)))
        return subprocess.run(
            [sys.executable, *arguments],
            env={**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})},
            capture_output=True,
            text=True,
            timeout=300,  # DeepSpeed compiles an operator once; killed in it, it leaves a lock that stops all others
        )

    return run


@pytest.fixture
def misbehaved(monkeypatch: pytest.MonkeyPatch):
    """Install, beside the built-in backends, a plugin that is loaded by calling `load`."""
    for variable in ("RLHF_ACCELERATOR", "RLHF_PLUGINS", "RLHF_PROBE_TIMEOUT"):
        monkeypatch.delenv(variable, raising=False)
    fake_plugins.ENDLESS.clear()

    def install(load: Callable[[], Any], dist: Any = fake_plugins.BAD) -> None:
        builtin, rlhf = "accelerators.backends.plugin", SimpleNamespace(name="rlhf", version="2.0")
        points = [
            SimpleNamespace(name="builtin", value=builtin, dist=rlhf, load=lambda: importlib.import_module(builtin)),
            SimpleNamespace(name="bad_entry", value="bad", dist=dist, load=load),
        ]
        monkeypatch.setattr(discovery, "entry_points", lambda group: points)

    yield install
    fake_plugins.ENDLESS.set()  # what hangs may end


@pytest.fixture
def created(misbehaved, monkeypatch):
    """The CPU with these methods, as a plugin's backend; `contributed` are kernels that its plugin's hook offers."""

    def create(contributed: tuple[Any, ...] = (), **methods: Any):
        fake_plugins.npu(monkeypatch, __module__="npu_backend", __qualname__="NPU", **methods)
        hooks = {
            "rlhf_accelerators": lambda: [accelerators.AcceleratorSpec(**fake_plugins.NPU)],
            "rlhf_kernels": lambda: list(contributed),
        }
        misbehaved(lambda: fake_plugins.plugin(**hooks))
        return accelerators.select("npu").create()

    return create


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """A Gaudi machine with these cards and this bridge; its backend, bound, with tensors that stay on the CPU."""
    import torch

    from accelerators.backends.hpu import info as hpu_info
    from accelerators.backends.hpu.backend import HPU
    from tests.accelerators.habana import DRIVER, Bridge

    def make(chip: str = "Gaudi2", count: int = 8, **bridge: Any) -> HPU:
        monkeypatch.setattr(hpu_info, "cards", lambda: hpu_info.Cards(count, chip, DRIVER, "hl-smi"))
        hpu = HPU()
        hpu.bridge = Bridge(**bridge).install(monkeypatch)
        hpu._device = torch.device("cpu")
        return hpu

    return make


def _pip_install(source: Path, copy: Path, target: Path) -> None:
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    modules = sorted(path.stem for path in copy.glob("*.py"))
    name = source.name
    text = PYPROJECT.format(name=name, dashed=name.replace("_", "-"), modules=modules)
    (copy / "pyproject.toml").write_text(text)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    command = [*pip, "--no-deps", "--no-build-isolation", "--target", str(target), str(copy)]
    subprocess.run(command, check=True, env={**os.environ, "PIP_ROOT_USER_ACTION": "ignore"})
