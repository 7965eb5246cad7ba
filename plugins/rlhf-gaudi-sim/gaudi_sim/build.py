"""Compiles the simulated device on first use, and loads it.

The sources in `csrc` go in; what comes out is a Python extension in a cache folder whose name holds the versions of
torch and Python and a hash of the sources, so that a change of any of them compiles again. Processes that start at the
same time compile once: the others wait.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import site
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from accelerators import AcceleratorError
from accelerators.host import is_private, make_private

CACHE_VARIABLE = "RLHF_GAUDI_SIM_CACHE"
TESTED = "2.13"
"""The torch release that the device was tested with; it uses parts of PyTorch that change between releases.

On 2.9 it compiles and loads, but the build for CUDA takes no other device ("Cannot have both HPU and cuda").
"""

NAME = "gaudi_sim_device"
SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O2", "-g0")
FRAMEWORKS = ("torch", "transformers", "deepspeed", "accelerate", "peft", "safetensors")
"""Packages whose lines are never named as the cause of something."""


@functools.cache
def load() -> ModuleType:
    """Load the C++ module; from then on `torch.device("hpu")` works in this process.

    Raises:
        AcceleratorError: torch is another release than the tested one, no compiler, a cache that cannot be written,
            or sources that do not compile.
    """
    import torch

    release = ".".join(torch.__version__.split(".")[:2])
    if release != TESTED:
        raise AcceleratorError(
            f"gaudi-sim: works with torch {TESTED}, found torch {torch.__version__}; install torch=={TESTED}.*"
        )
    library = _folder(torch.__version__) / f"{NAME}{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    module = _imported(library) if is_private(library) else _compiled(library, torch.__version__)
    module.set_library_paths(*_library_paths())
    atexit.register(module.drain_autograd)
    return module


def progress(torch_version: str) -> str:
    """Return the line that is printed on first use."""
    return f"gaudi-sim: compiling the simulated device for torch {torch_version}, about a minute, once"


def _folder(torch_version: str) -> Path:
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in _sources("*.cpp", "*.h"):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return _cache() / f"torch-{torch_version}-{sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"


def _cache() -> Path:
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rlhf-gaudi-sim"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf-gaudi-sim"


def _sources(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in SOURCES.glob(pattern))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        if not make_private(folder):
            raise AcceleratorError(
                f"gaudi-sim: {folder} is a link, another user's, or writable by others; "
                f"remove it, or set {CACHE_VARIABLE}"
            )
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise AcceleratorError(
            f"gaudi-sim: the compiled device cannot be kept in {folder} ({error.strerror}); "
            f"set {CACHE_VARIABLE} to a folder that can be written"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compiled(library: Path, torch_version: str) -> ModuleType:
    with _locked(library.parent):
        if is_private(library):  # another process has compiled it meanwhile
            return _imported(library)
        compiler = os.environ.get("CXX") or "g++"
        with _path_with_scripts():
            for tool, remedy in ((compiler, "install g++ or set CXX"), ("ninja", "pip install ninja")):
                if shutil.which(tool) is None:
                    raise AcceleratorError(
                        f"gaudi-sim: the simulated device has to be compiled once, and {tool} is not found; {remedy}"
                    )
            print(progress(torch_version), file=sys.stderr, flush=True)
            return _compile(library, compiler)


def _compile(library: Path, compiler: str) -> ModuleType:
    from torch.utils import cpp_extension

    # Compiled beside its place and moved there when it has been loaded, so that what is there is whole.
    with tempfile.TemporaryDirectory(dir=library.parent) as build:
        try:
            module: ModuleType = cpp_extension.load(
                NAME, [str(path) for path in _sources("*.cpp")], extra_cflags=list(FLAGS), build_directory=build
            )
        except (ImportError, OSError, RuntimeError) as error:
            raise AcceleratorError(
                f"gaudi-sim: {compiler} cannot compile the simulated device ({_cause(error)}); g++ 12 is known to"
            ) from error
        compiled = Path(build) / f"{NAME}.so"
        compiled.chmod(0o700)
        compiled.replace(library)
    return module


def _imported(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _cause(error: Exception) -> str:
    lines = str(error).splitlines()
    return next((line.strip() for line in lines if "error:" in line), lines[0] if lines else type(error).__name__)


@contextmanager
def _path_with_scripts() -> Iterator[None]:
    """PATH with the scripts of this Python's environment, where pip puts ninja."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join((before, sysconfig.get_path("scripts")))
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _library_paths() -> tuple[list[str], list[str]]:
    """Folders of code that is never named as a cause, and of installed packages, named where nothing else is."""
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    unnamed = [str(SOURCES.parent), sysconfig.get_path("stdlib"), sysconfig.get_path("scripts")]
    frameworks = [os.path.join(folder, name) for folder in packages for name in FRAMEWORKS]
    return [path + os.sep for path in (*unnamed, *frameworks)], [path + os.sep for path in packages]
