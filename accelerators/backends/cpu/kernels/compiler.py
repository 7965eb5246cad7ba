"""C code of the cpu backend, compiled on first use by the machine's compiler for its processor.

Compiling takes half a second. The user's cache keeps the result by source, compiler, processor and content, and it is
only loaded if nobody else could have written it.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from accelerators import host
from accelerators.backends.cpu import info

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_NOT_PRIVATE = "may hold code of others, because it is a link, another user's, or writable by others"

FLAGS = ("-O3", "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native", "-shared", "-fPIC")

BF16 = "-DBF16"
"""The flag of code for numbers in bf16; without it they are float32."""


class NotCompiled(Exception):
    """The library cannot be compiled or loaded; the message is one line."""


def why_not(load: Callable[..., object], without: str, dtypes: Iterable[torch.dtype] = ()) -> str:
    """Return why the functions that `load` returns cannot be used; "" if they can.

    Args:
        load: loads the library.
        without: the disadvantage if there is no compiler.
        dtypes: arguments of `load`, if there is a library of each dtype.
    """
    calls: list[tuple[torch.dtype, ...]] = [(dtype,) for dtype in dtypes]
    try:
        for arguments in calls or [()]:
            load(*arguments)
    except NotCompiled as error:
        _warn(str(error))
        return f"{error}; without its code, {without}"
    return ""


@cache
def _warn(reason: str) -> None:
    """Print a line, once for all kernels of which this is the reason."""
    logger.warning("the C kernels of this package are not used, which makes runs slower: %s", reason)


@cache
def compiled(name: str, *flags: str) -> ctypes.CDLL:
    """Return the functions in a C file of this package, which run on torch's threads.

    Args:
        name: the file's name.
        *flags: more flags of the compiler, such as `BF16`.

    Raises:
        NotCompiled: there is no compiler, it refuses the file, or torch's threads cannot be shared.
    """
    source = Path(__file__).with_name(name)
    command = find_compiler()
    version = _run([*command, "--version"])
    texts = {path.name: path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))}
    command += [*FLAGS, *flags]
    parts = (*texts.values(), version, *command, *sorted(info.cpu_flags()))
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    place = folder() / f"{source.stem}-{key}"
    try:
        if not host.make_private(place.parent):
            raise NotCompiled(f"{place.parent} {_NOT_PRIVATE}; remove it, or name another cache in XDG_CACHE_HOME")
        functions = ctypes.CDLL(str(_find_library(place) or _compile(command, texts, place)))
    except OSError as error:
        raise NotCompiled(f"{place}.so cannot be written or loaded ({error})") from error
    if hasattr(functions, "use_threads"):
        functions.use_threads(ctypes.byref(_threads()))
    return functions


class _Threads(ctypes.Structure):
    """`Threads` of threads.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("parallel", "barrier", "number", "count", "most")]


@cache
def _threads() -> _Threads:
    """Return the functions of the OpenMP that torch runs on: GCC's, or LLVM's or Intel's, which have GCC's functions.

    Raises:
        NotCompiled: torch has no such functions.
    """
    names = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads")
    functions = torch_functions()
    try:
        return _Threads(*(ctypes.cast(getattr(functions, name), ctypes.c_void_p).value for name in names))
    except AttributeError as error:
        raise NotCompiled(f"torch's threads cannot be shared ({error})") from error


def torch_functions() -> ctypes.CDLL:
    """Return the functions of torch's libraries and of those that they are linked with."""
    import torch

    return ctypes.CDLL(torch._C.__file__)


def folder() -> Path:
    """Return the folder of compiled files, in XDG_CACHE_HOME or ~/.cache.

    Raises:
        NotCompiled: the user has no home.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf" / "compiled"
    except RuntimeError as error:
        raise NotCompiled("there is no home folder for compiled files; XDG_CACHE_HOME can name another") from error


def find_compiler() -> list[str]:
    """Return the command of the C compiler: CC, or the first of gcc, cc and clang in PATH.

    Raises:
        NotCompiled: none is installed.
    """
    if chosen := os.environ.get("CC", "").split():
        return chosen
    for name in ("gcc", "cc", "clang"):
        if path := shutil.which(name):
            return [path]
    raise NotCompiled("there is no C compiler on the PATH (gcc, cc or clang)")


def _find_library(place: Path) -> Path | None:
    """Return the library that was compiled before, if it is what its name says and nobody else could write it."""
    for library in place.parent.glob(f"{place.name}-*.so"):
        if host.is_private(library) and library == _name_by_content(place, library):
            return library
    return None


def _compile(command: list[str], texts: Mapping[str, str], place: Path) -> Path:
    """Write the library in one step: several ranks of a machine may do so at the same time; return its path.

    Args:
        texts: the C file and its headers, by name. Not the files, which an update may change meanwhile.
    """
    with tempfile.TemporaryDirectory(dir=place.parent) as temporary:
        folder = Path(temporary)
        for name, text in texts.items():
            (folder / name).write_text(text)
        output = folder / f"{place.name}.so"
        _run([*command, str(folder / next(iter(texts))), "-o", str(output)])
        output.chmod(0o700)
        return output.replace(_name_by_content(place, output))


def _name_by_content(place: Path, library: Path) -> Path:
    return place.with_name(f"{place.name}-{hashlib.sha256(library.read_bytes()).hexdigest()[:16]}.so")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"{command[0]} does not run ({error})") from error
    if done.returncode:
        lines = (done.stderr.strip() or "no message").splitlines()
        line = next((line for line in lines if "error" in line), lines[0])
        raise NotCompiled(f"{command[0]} fails: {line}")
    return done.stdout
