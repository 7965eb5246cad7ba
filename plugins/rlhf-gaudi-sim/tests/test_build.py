"""The device is compiled once into a cache; what stands in the way is said in one line."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gaudi_sim import build

from accelerators import AcceleratorError

first_use = build.load.__wrapped__
"""`load` as it is in a process that has not called it."""


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache"


def no_tools(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PATH", str(tmp_path))
    patch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))


def only_a_compiler(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    no_tools(tmp_path, patch)
    (tmp_path / "g++").touch(mode=0o755)


def a_compiler_that_fails(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\nfor a in "$@"; do [ "$a" = -c ] && echo "device.h:1: error: too old" >&2 && exit 1; done\n'
    )
    compiler.chmod(0o755)
    patch.setenv("CXX", str(compiler))


REFUSED: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], object], str]] = {
    "an older torch": (
        lambda _, patch: patch.setattr(torch, "__version__", "2.12.1+cpu"),
        "works with torch 2.13, found torch 2.12.1+cpu; install torch==2.13.*",
    ),
    "a newer torch": (
        lambda _, patch: patch.setattr(torch, "__version__", "2.14.0"),
        "works with torch 2.13, found torch 2.14.0; install torch==2.13.*",
    ),
    "no compiler": (no_tools, "compiled once, and g++ is not found; install g++ or set CXX"),
    "another compiler that is not there": (
        lambda _, patch: patch.setenv("CXX", "clang++-99"),
        "clang++-99 is not found; install g++ or set CXX",
    ),
    "no ninja": (only_a_compiler, "compiled once, and ninja is not found; pip install ninja"),
    "a compiler that fails": (a_compiler_that_fails, "device.h:1: error: too old"),
    "a cache that cannot be written": (
        lambda tmp_path, patch: patch.setenv(build.CACHE_VARIABLE, "/proc/cache"),
        f"cannot be kept in /proc/cache/torch-{torch.__version__}",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_in_one_line(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, message = REFUSED[case]
    prepare(tmp_path, monkeypatch)
    with pytest.raises(AcceleratorError) as error:
        first_use()
    assert message in str(error.value)
    assert str(error.value).startswith("gaudi-sim: ")
    assert "\n" not in str(error.value)


def test_nothing_is_left_of_a_compilation_that_fails(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_compiler_that_fails(tmp_path, monkeypatch)
    with pytest.raises(AcceleratorError):
        first_use()
    assert [path.name for path in empty_cache.rglob("*") if path.is_file()] == ["lock"]


def test_the_cache_depends_on_the_sources_and_on_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build._folder("2.13.0")
    assert build._folder("2.13.0") == before
    assert build._folder("2.13.1") != before
    for source in build.SOURCES.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build._folder("2.13.0") == before
    with (tmp_path / "device.h").open("a") as header:
        header.write("\n")
    assert build._folder("2.13.0") != before


@pytest.mark.slow
def test_processes_that_start_together_compile_once(empty_cache: Path) -> None:
    script = "from gaudi_sim.build import load; import torch; load(); print(torch.ones(3, device='hpu').sum().item())"
    root = Path(__file__).parents[1]
    begun = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=root,
            env=os.environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(3)
    ]
    ended = [process.communicate() for process in begun]
    assert [out for out, _ in ended] == ["3.0\n"] * 3
    assert sorted(error for _, error in ended) == ["", "", build.progress(torch.__version__) + "\n"]
    (folder,) = empty_cache.iterdir()
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".so"]
