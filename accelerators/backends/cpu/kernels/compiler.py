"""C code of the cpu backend: compiled by the machine's own compiler, for its own processor, when it is first wanted.

That takes half a second; what comes out is kept among the user's cached files, by its source, compiler and processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from accelerators.backends.cpu import info

NEEDED = "avx512_bf16"
"""What the processor has to have for all of it."""

FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")


class NotCompiled(Exception):
    """Why there is no library, in a line."""


def why_not(load: Callable[[], ctypes.CDLL], without: str) -> str:
    """Why the functions that `load` gives cannot be used; empty where they can.

    Args:
        without: what is worse if there is no compiler.
    """
    import torch

    if NEEDED not in info.cpu_flags():
        return f"this processor has no {NEEDED}"
    try:
        functions = load()
    except NotCompiled as error:
        return f"{error}; without its code, {without}"
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        shared = functions.omp_get_max_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    return "" if shared else "the compiler's OpenMP is not that of torch: threads of both would stall each other"


@cache
def compiled(name: str) -> ctypes.CDLL:
    """The functions in a C file of this package; OpenMP is that of torch, and so are its threads.

    Raises:
        NotCompiled: there is no compiler, or it does not take the file.
    """
    import torch  # noqa: F401  its OpenMP is loaded first: one of another name would bring threads of its own

    source = Path(__file__).with_name(name)
    command = find_compiler()
    version = _run([*command, "--version"])
    texts = [each.read_text() for each in (source, *sorted(source.parent.glob("*.h")))]
    known = (*texts, version, *command, *FLAGS, *sorted(info.cpu_flags()))
    key = hashlib.sha256("\n".join(known).encode()).hexdigest()[:16]
    kept = folder() / f"{source.stem}-{key}.so"
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        if not kept.exists():
            _compile(command, source, kept)
        return ctypes.CDLL(str(kept))
    except OSError as error:
        raise NotCompiled(f"{kept} cannot be written or loaded ({error})") from error


def folder() -> Path:
    """Where compiled files are kept: XDG_CACHE_HOME, or ~/.cache.

    Raises:
        NotCompiled: the user has no home.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf" / "compiled"
    except RuntimeError as error:
        raise NotCompiled("there is no home folder for compiled files; XDG_CACHE_HOME can name another") from error


def find_compiler() -> list[str]:
    """The command of the C compiler: CC, or the first there is.

    Raises:
        NotCompiled: there is none.
    """
    if chosen := os.environ.get("CC", "").split():
        return chosen
    for name in ("gcc", "cc", "clang"):
        if found := shutil.which(name):
            return [found]
    raise NotCompiled("there is no C compiler on the PATH (gcc, cc or clang)")


def _compile(command: list[str], source: Path, target: Path) -> None:
    """Whole or not at all: ranks of one machine may do it at a time."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        _run([*command, *FLAGS, str(source), "-o", str(made)])
        made.replace(target)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"{command[0]} does not run ({error})") from error
    if done.returncode:
        said = (done.stderr.strip() or "no word of why").splitlines()
        line = next((line for line in said if "error" in line), said[0])
        raise NotCompiled(f"{command[0]} fails: {line}")
    return done.stdout
