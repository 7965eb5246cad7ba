"""decode.c, sample.c and softmax.c against plain loops in double, random shapes.

They run under sanitizers, and on ARM by an emulator.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from accelerators.backends.cpu import info
from accelerators.backends.cpu.kernels import compiler, decode, dtypes

KERNELS = Path(decode.__file__).parent
CHECK = Path(__file__).with_name("decode_check.c")
ARM, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"

AVX2 = "avx2" in info.cpu_flags()
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler here")
needs_emulator = pytest.mark.skipif(
    not (shutil.which(ARM) and shutil.which(EMULATOR)), reason=f"no {ARM} and {EMULATOR} here"
)
both_dtypes = pytest.mark.parametrize("flags", dtypes.DTYPES.values(), ids=("float32", "bfloat16"))


def build(folder: Path, *command: str) -> str:
    program = str(folder / "check")
    options = ["-Wall", "-Wextra", "-Werror", "-I", str(KERNELS), str(CHECK), "-lpthread", "-lm", "-o", program]
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


@needs_compiler
@both_dtypes
@pytest.mark.parametrize(
    "instructions",
    [compiler.FLAGS[1], pytest.param("-march=haswell", marks=pytest.mark.skipif(not AVX2, reason="no AVX2 here"))],
)
def test_numbers_are_right_and_memory_is_only_used_where_it_exists(tmp_path, flags, instructions):
    """For this processor, and with sixteen registers."""
    sanitizers = "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"
    program = build(tmp_path, *compiler.find_compiler(), "-O1", "-g", instructions, *sanitizers, *flags)
    run("env", "ASAN_OPTIONS=detect_leaks=0", program, seeds=12)


@needs_compiler
def test_threads_wait_for_each_other(tmp_path):
    program = build(tmp_path, *compiler.find_compiler(), "-O1", "-g", compiler.FLAGS[1], "-fsanitize=thread")
    fixed = ["setarch", platform.machine(), "-R"] if shutil.which("setarch") else []  # the layout of memory
    run(*fixed, program, seeds=3)


@needs_emulator
@both_dtypes
@pytest.mark.parametrize("instructions", [pytest.param("armv8-a", marks=pytest.mark.slow), "armv8.6-a+bf16"])
def test_arm_computes_the_same(tmp_path, flags, instructions):
    program = build(tmp_path, ARM, "-O2", "-static", f"-march={instructions}", *flags)
    run(EMULATOR, "-cpu", "max", program, seeds=8)
