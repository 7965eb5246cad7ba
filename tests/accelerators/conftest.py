"""Plugins as pip installs them, plugins in this process, and a Gaudi machine without a Gaudi."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import accelerators
from accelerators import discovery
from accelerators.backends.cpu.kernels import dtypes, packed
from tests.accelerators import fake_plugins, nvml
from tests.helpers import LAUNCHER

SOURCES = Path(__file__).parent / "plugins"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def install(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder in which a plugin is installed: its modules, with the metadata that pip writes."""
    root = tmp_path_factory.mktemp("plugins")

    def install(name: str) -> Path:
        site, dashed = root / name, name.replace("_", "-")
        if not site.exists():
            metadata = site / f"rlhf_{name}-1.2.3.dist-info"
            metadata.mkdir(parents=True)
            (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rlhf-{dashed}\nVersion: 1.2.3\n")
            (metadata / "entry_points.txt").write_text(f"[rlhf.accelerators]\n{dashed} = rlhf_{name}\n")
            modules = list(SOURCES.glob(f"rlhf_{name}*.py"))
            (metadata / "top_level.txt").write_text("\n".join(path.stem for path in modules))
            for path in modules:
                shutil.copy(path, site)
            if name in fake_plugins.SOURCES:
                (site / f"rlhf_{name}.py").write_text(fake_plugins.SOURCES[name])
            if name in fake_plugins.IMPORT_TORCH:
                nvml.install_torch(site, "2.13.0+cpu")
                (site / "torch" / "__init__.py").write_text("")
        return site

    return install


@pytest.fixture(scope="session")
def run_python(install: Callable[[str], Path]) -> Run:
    """Run Python with plugins installed: run_python("-m", "rlhf", ..., plugins=["good"], env={...})."""

    def run(
        *arguments: str, plugins: tuple[str, ...] = (), env: dict[str, str] | None = None, seconds: float = 300
    ) -> subprocess.CompletedProcess[str]:
        clean = {key: value for key, value in os.environ.items() if key not in LAUNCHER and not key.startswith("RLHF_")}
        path = os.pathsep.join(map(str, map(install, plugins)))
        return subprocess.run(
            [sys.executable, *arguments],
            env={**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})},
            capture_output=True,
            text=True,
            timeout=seconds,  # long: DeepSpeed, killed while it compiles an operator, leaves a lock that stops others
        )

    return run


@pytest.fixture
def misbehaved(monkeypatch: pytest.MonkeyPatch):
    """Install, in addition to the built-in backends, a plugin that is loaded by calling `load`."""
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
def offered(misbehaved, monkeypatch):
    """Offer the CPU with these methods as a plugin's backend `npu`; the plugin may have other hooks too."""

    def offer(hooks: dict[str, Callable[..., Any]] | None = None, **methods: Any) -> None:
        fake_plugins.npu(monkeypatch, **methods)
        specs = {"rlhf_accelerators": lambda: [accelerators.AcceleratorSpec(**fake_plugins.NPU)]}
        misbehaved(lambda: fake_plugins.plugin(**specs | (hooks or {})))

    return offer


@pytest.fixture
def created(offered):
    """Create that backend; `contributed` are kernels that its plugin's hook offers."""

    def create(contributed: tuple[Any, ...] = (), **methods: Any):
        offered({"rlhf_kernels": lambda: list(contributed)}, **methods)
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


@pytest.fixture
def decode_calls(monkeypatch) -> Counter[str]:
    """How often each function of decode.c was called."""
    import torch

    from accelerators.backends.cpu.kernels import decode

    counts: Counter[str] = Counter()
    known = decode._functions

    def counting(dtype: torch.dtype = torch.bfloat16) -> SimpleNamespace:
        functions = known(dtype)

        def counted(name: str) -> Any:
            def call(*arguments: Any) -> Any:
                counts[name] += 1
                return getattr(functions, name)(*arguments)

            return call

        calls = {name: counted(name) for name in ("pack", "linear", "decode")}
        others = {name: getattr(functions, name) for name in ("amx", "lanes", "heads_at_once", "rows_at_once")}
        return SimpleNamespace(**calls, **others)

    monkeypatch.setattr(decode, "_functions", counting)
    return counts


@pytest.fixture
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let decode.c compute layers in bf16 on processors without bf16 instructions too, where a run refuses bf16."""
    supported = packed.supported(None)
    monkeypatch.setattr(packed, "_dtypes", lambda: tuple(dtypes.DTYPES))
    monkeypatch.setattr(packed, "supported", lambda accelerator: supported)
