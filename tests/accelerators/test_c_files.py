"""All C files of the CPU against plain loops in double, random shapes: under sanitizers, and on ARM by an emulator."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from accelerators.backends.cpu import info
from accelerators.backends.cpu.kernels import compiler, decode, dtypes

KERNELS = Path(decode.__file__).parent
FLOAT32, BF16 = dtypes.DTYPES.values()  # options of the compiler
CHECKS = {  # programs, and whether a program has one dtype or all
    "decode-float32": ("decode_check.c", *FLOAT32),
    "decode-bf16": ("decode_check.c", *BF16),
    "layers-float32": ("layers_check.c", *FLOAT32),
    "layers-bf16": ("layers_check.c", *BF16),
    "invariant": ("invariant_check.c",),
}
ARM, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"

INCLUDED = re.compile(r'^#include "(\w+\.c)"$', re.MULTILINE)
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler here")
needs_emulator = pytest.mark.skipif(
    not (shutil.which(ARM) and shutil.which(EMULATOR)), reason=f"no {ARM} and {EMULATOR} here"
)
all_checks = pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)


def processors() -> list[Any]:
    """Options for each kind of registers that this processor can use: all of its own, and those of older ones."""
    flags = info.cpu_flags()
    older = {
        "without AMX": (compiler.FLAGS[1], *("-mno-amx-tile", "-mno-amx-bf16")) if "amx_bf16" in flags else None,
        "AVX2": ("-march=haswell",) if "avx2" in flags else None,
        "SSE": ("-march=x86-64",) if platform.machine() == "x86_64" else None,
    }
    missing = pytest.mark.skip(reason="this processor has none of these, or no others")
    return [
        pytest.param((compiler.FLAGS[1],), id="native"),
        *(
            pytest.param(options or (), id=name, marks=[pytest.mark.slow] if options else [missing])
            for name, options in older.items()
        ),
    ]


def build(folder: Path, check: tuple[str, ...], *command: str) -> str:
    program, (name, *flags) = str(folder / "check"), check
    options = ["-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-I", str(KERNELS), *flags]
    options += [str(Path(__file__).with_name(name)), "-lpthread", "-lm", "-o", program]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if "cannot find" in done.stderr:  # a library of sanitizers
        pytest.skip(done.stderr.splitlines()[0])
    assert not done.returncode, done.stderr
    return program


def run(*command: str, seeds: int) -> None:
    done = subprocess.run([*command, "1", str(seeds)], capture_output=True, text=True, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run with this system's layout of memory")
    assert not done.returncode, done.stdout + done.stderr[:4000]
    assert done.stdout.count("seed") == seeds


def test_every_file_of_the_package_is_checked() -> None:
    checked = {
        name for check in CHECKS.values() for name in INCLUDED.findall(Path(__file__).with_name(check[0]).read_text())
    }
    assert {path.name for path in KERNELS.glob("*.c")} <= checked


@needs_compiler
@all_checks
@pytest.mark.parametrize("instructions", processors())
def test_numbers_are_right_and_memory_is_only_used_where_it_exists(tmp_path, check, instructions):
    sanitizers = "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"
    program = build(tmp_path, check, *compiler.find_compiler(), "-O1", "-g", *instructions, *sanitizers)
    run("env", "ASAN_OPTIONS=detect_leaks=0", program, seeds=12)


@needs_compiler
@pytest.mark.parametrize(("name", "seeds"), [("decode-float32", 3), ("layers-float32", 3), ("invariant", 1)])
def test_threads_wait_for_each_other(tmp_path, name, seeds):
    program = build(
        tmp_path, CHECKS[name], *compiler.find_compiler(), "-O1", "-g", compiler.FLAGS[1], "-fsanitize=thread"
    )
    fixed = ["setarch", platform.machine(), "-R"] if shutil.which("setarch") else []  # the layout of memory
    run(*fixed, program, seeds=seeds)


@needs_emulator
@all_checks
@pytest.mark.parametrize("instructions", [pytest.param("armv8-a", marks=pytest.mark.slow), "armv8.6-a+bf16"])
def test_arm_computes_the_same(tmp_path, check, instructions):
    program = build(tmp_path, check, ARM, "-O2", "-static", f"-march={instructions}")
    run(EMULATOR, "-cpu", "max", program, seeds=8)
