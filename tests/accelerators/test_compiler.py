"""C compiled on first use: kept, shared, whole or not at all; and where it cannot be, one line and the next best."""

from __future__ import annotations

import hashlib
import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerators.backends.cpu import info as cpu_info
from accelerators.backends.cpu import kernels
from accelerators.backends.cpu.backend import CPU
from accelerators.backends.cpu.kernels import compiler, decode, dtypes, invariant, layers, packed, sampling, softmax

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler here")

COUNTING = """
#include "threads.h"
static void count(void *to) { if (!threads.number()) *(int *)to = threads.count(); }
int number(void) { int threads_used = 0; threads.parallel(count, &threads_used, 0, 0); return threads_used; }
"""
LOGGED = """#!/bin/sh
echo "$@" >> {log}
exec {compiler} "$@"
"""
ANOTHER = """
import sys, types
sys.modules["torch"] = types.ModuleType("torch")
from accelerators.backends.cpu.kernels import compiler
compiler.__file__ = sys.argv[1]
print(compiler.compiled("number.c").number())
"""


@pytest.fixture(autouse=True)
def compiled_folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """Where compiled files go; nothing is known yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _forget()
    yield tmp_path / "cache" / "rlhf" / "compiled"
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    for name in [module.name for module in pkgutil.iter_modules(kernels.__path__)]:
        for value in vars(importlib.import_module(f"{kernels.__name__}.{name}")).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    """A file to compile, quickly."""
    path = tmp_path / "number.c"
    path.write_text("int number(void) { return 42; }\n")
    monkeypatch.setattr(compiler, "__file__", str(tmp_path / "native.py"))
    return path


@pytest.fixture
def compiling(tmp_path, monkeypatch) -> Callable[[], int]:
    """How many files were compiled since it was last asked."""
    log, script = tmp_path / "log", tmp_path / "compiler"
    script.write_text(LOGGED.format(log=log, compiler=compiler.find_compiler()[0]))
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))

    def count() -> int:
        lines = log.read_text().splitlines()
        log.write_text("")
        return sum("-shared" in line for line in lines)

    return count


def a_compiler(folder: Path, script: str) -> str:
    path = folder / "cc-that-fails"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


# what is kept


@needs_compiler
def test_a_file_is_compiled_once(source, compiling, compiled_folder):
    for compiled in (1, 0, 0):
        compiler.compiled.cache_clear()
        assert compiler.compiled("number.c").number() == 42
        assert compiling() == compiled
    assert len(list(compiled_folder.iterdir())) == 1


@needs_compiler
def test_another_source_header_or_compiler_is_compiled_again(source, compiling, compiled_folder, monkeypatch, tmp_path):
    def number() -> int:
        compiler.compiled.cache_clear()
        return compiler.compiled("number.c").number()

    header = source.with_suffix(".h")
    header.write_text("#ifndef NUMBER\n#define NUMBER 43\n#endif\n")
    assert number() == 42
    source.write_text('#include "number.h"\nint number(void) { return NUMBER; }\n')
    assert number() == 43
    header.write_text(header.read_text().replace("43", "45"))
    assert number() == 45
    chosen = compiler.find_compiler()
    monkeypatch.setenv("CC", f"{chosen[0]} -DNUMBER=44")
    assert number() == 44
    script = Path(chosen[0])
    script.write_text(script.read_text().replace("exec", 'case "$*" in *--version) echo newer;; esac\nexec'))
    assert number() == 44
    monkeypatch.setattr(cpu_info, "cpu_flags", lambda: frozenset({"of", "another", "machine"}))
    assert number() == 44
    assert compiling() == len(list(compiled_folder.iterdir())) == 6


@needs_compiler
def test_processes_that_compile_at_a_time_all_have_it(source, tmp_path, compiled_folder, monkeypatch):
    """Each is in the middle of it when the other begins."""
    real = compiler.find_compiler()[0]
    wait = f"touch {tmp_path}/there.$$\nwhile [ $(ls {tmp_path}/there.* | wc -l) -lt 2 ]; do sleep 0.02; done\n"
    script = f'#!/bin/sh\nif [ "$1" != --version ]; then\n{wait}fi\nexec {real} "$@"\n'
    path = tmp_path / "together"
    path.write_text(script)
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))
    command = [sys.executable, "-c", ANOTHER, compiler.__file__]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=60)[0] for process in started] == ["42\n"] * 2
    assert [path.suffix for path in compiled_folder.iterdir()] == [".so"]


PLANTED = """
#include <stdio.h>
__attribute__((constructor)) static void run(void) {{ fclose(fopen("{mark}", "w")); }}
int number(void) {{ return 42; }}
"""


@needs_compiler
@pytest.mark.parametrize("how", ["content", "writable", "owner", "link"])
def test_library_that_another_may_have_written_is_not_loaded(source, compiled_folder, tmp_path, how):
    """It is compiled again; the planted one would run code as soon as it is loaded."""
    if how == "owner" and os.getuid():
        pytest.skip("only root can give a file to another user")
    assert compiler.compiled("number.c").number() == 42
    (library,) = compiled_folder.iterdir()
    mark, code = tmp_path / "ran", tmp_path / "planted.c"
    code.write_text(PLANTED.format(mark=mark))
    planted = tmp_path / "planted.so"
    subprocess.run([*compiler.find_compiler(), "-shared", "-fPIC", str(code), "-o", str(planted)], check=True)
    planted.chmod(0o700)
    name = library.name
    if how != "content":  # the name fits
        digest = hashlib.sha256(planted.read_bytes()).hexdigest()[:16]
        name = f"{library.stem.rpartition('-')[0]}-{digest}.so"
    library.unlink()
    library = compiled_folder / name
    library.symlink_to(planted) if how == "link" else shutil.copy(planted, library)
    if how == "writable":
        library.chmod(0o777)
    if how == "owner":
        os.chown(library, 65534, 65534)
    _forget()
    assert compiler.compiled("number.c").number() == 42
    assert not mark.exists()


@needs_compiler
@pytest.mark.parametrize("how", ["writable", "link"])
def test_folder_that_others_can_write_is_not_used(source, compiled_folder, tmp_path, how):
    if how == "link":
        compiled_folder.parent.mkdir(parents=True)
        compiled_folder.symlink_to(tmp_path)
    else:
        compiled_folder.mkdir(parents=True)
        compiled_folder.chmod(0o777)
    with pytest.raises(compiler.NotCompiled, match=f"{compiled_folder} may hold code of others"):
        compiler.compiled("number.c")


@needs_compiler
def test_code_of_this_package_compiles_and_is_right(compiled_folder):
    """Otherwise all tests of it would be skipped."""
    for module in (decode, layers, sampling):
        support = module.supported(None)
        assert support, support.reason
    assert not softmax.why_not()
    invariant._functions()
    found = sorted(path.name.partition("-")[0] for path in compiled_folder.iterdir())
    of_dtypes = ["decode", "sample", "softmax"] * len(dtypes.DTYPES)
    assert found == sorted([*of_dtypes, "invariant", "layers"])
    assert set(found) == {path.stem for path in Path(decode.__file__).parent.glob("*.c")}


def test_compiler_is_the_named_one_or_the_first_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    for name in ("clang", "cc", "gcc"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
        assert compiler.find_compiler() == [str(tmp_path / name)]
    monkeypatch.setenv("CC", "ccache clang-18")
    assert compiler.find_compiler() == ["ccache", "clang-18"]


# what cannot be


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CC": "", "PATH": "/nowhere"}, "there is no C compiler on the PATH (gcc, cc or clang)"),
        ({"CC": "/no/such/compiler"}, "/no/such/compiler does not run ([Errno 2] No such file or directory"),
        ({"CC": "fails"}, "cc-that-fails fails: number.c:3: error: no such instruction"),
        ({"CC": "says nothing"}, "cc-that-fails fails: no message"),
        ({"CC": "stops halfway"}, "cc-that-fails fails: no message"),
        ({"CC": "makes nothing"}, ".so cannot be written or loaded ([Errno 2] No such file or directory"),
        ({"CC": "makes rubbish"}, ".so cannot be written or loaded ("),
        ({"XDG_CACHE_HOME": "/dev/null"}, ".so cannot be written or loaded ([Errno 20] Not a directory: "),
        ({"XDG_CACHE_HOME": "", "HOME": "none"}, "there is no home folder for compiled files"),
    ],
)
def test_what_cannot_be_compiled_is_one_line_and_leaves_nothing(
    environment, reason, compiled_folder, tmp_path, monkeypatch
):
    scripts = {
        "fails": "[ $1 = --version ] || { echo 'In file number.c:'; echo 'number.c:3: error: no such instruction'; "
        "echo 'note: more'; exit 1; } >&2",
        "says nothing": "[ $1 = --version ]",
        "stops halfway": 'for last; do :; done; [ $1 = --version ] || { echo half > "$last"; exit 1; }',
        "makes nothing": "true",
        "makes rubbish": 'for last; do :; done; [ $1 = --version ] || echo rubbish > "$last"',
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, a_compiler(tmp_path, scripts[value]) if value in scripts else value)
    if environment.get("HOME") == "none":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", lambda user: {}[user])  # a user that the machine does not know
    support = decode.supported(None)
    assert not support
    assert reason in support.reason
    assert support.reason.endswith("; without its code, generation takes about twice as long")
    assert "\n" not in support.reason and "Traceback" not in support.reason
    if "rubbish" not in environment.get("CC", ""):
        assert not compiled_folder.exists() or not list(compiled_folder.iterdir())


@pytest.mark.parametrize("module", [decode, layers])
def test_being_asked_draws_no_random_numbers(monkeypatch, module):
    monkeypatch.delenv("XDG_CACHE_HOME")  # what is compiled already
    before = torch.get_rng_state()
    module.supported.__wrapped__(None)
    assert torch.equal(torch.get_rng_state(), before)


@needs_compiler
def test_threads_are_those_of_torch(source):
    shutil.copy(Path(decode.__file__).with_name("threads.h"), source.parent)
    source.write_text(COUNTING)
    functions, threads = compiler.compiled("number.c"), torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert functions.number() == count
    finally:
        torch.set_num_threads(threads)


@needs_compiler
def test_torch_without_such_threads_is_refused(monkeypatch):
    monkeypatch.setattr(compiler, "torch_functions", SimpleNamespace)
    compiler._threads.cache_clear()
    support = decode.supported(None)
    compiler._threads.cache_clear()
    assert not support
    assert support.reason.startswith("torch's threads cannot be shared (")
    assert support.reason.endswith("; without its code, generation takes about twice as long")


@needs_compiler
def test_wrong_products_are_not_taken(monkeypatch):
    def packed_wrongly(*weights: Any, **options: Any) -> Any:
        packed = packing(*weights, **options)
        packed.weight.copy_(packed.weight.roll(1, 1))
        return packed

    packing = decode._Packed
    monkeypatch.setattr(decode, "_Packed", packed_wrongly)
    monkeypatch.delenv("XDG_CACHE_HOME")  # the one that is there
    support = decode.supported(None)
    assert (support.ok, support.reason) == (False, "the compiled products of torch.float32 are wrong here")


def test_the_backend_takes_the_next_best_and_says_so(monkeypatch):
    monkeypatch.setenv("CC", "/no/such/compiler")
    accelerator = CPU()  # not that of other tests: it remembers what it has
    chosen = accelerator.kernels.capabilities()["inference_weights"]
    assert (chosen.ok, chosen.implementation) == (True, "onednn")
    assert accelerator.kernels.get("inference_weights") is packed.prepare
    candidates = [
        (implementation.name, support)
        for implementation, support in accelerator.kernels.candidates("inference_weights")
    ]
    assert [(name, support.ok) for name, support in candidates] == [("onednn", True), ("native", False)]
    assert candidates[1][1].reason.startswith("/no/such/compiler does not run (")


@needs_compiler
def test_file_that_changes_meanwhile_is_not_compiled(tmp_path, monkeypatch):
    """The library is found by the text that was read, so it is compiled from this text."""
    monkeypatch.setattr(compiler, "__file__", str(tmp_path / "compiler.py"))
    (source := tmp_path / "answer.c").write_text("int answer(void) { return 1; }")
    run = compiler._run

    def update(command: list[str]) -> str:
        source.write_text("int answer(void) { return 2; }")
        return run(command)

    monkeypatch.setattr(compiler, "_run", lambda command: update(command) if "-o" in command else run(command))
    assert compiler.compiled("answer.c").answer() == 1


def test_missing_compiler_is_named_once(monkeypatch, caplog):
    monkeypatch.setenv("CC", "/absent/gcc")
    for kernel in (decode, sampling):
        assert not kernel.supported(None)
    (line,) = caplog.messages
    assert line.startswith("the C kernels of this package are not used, which makes runs slower: /absent/gcc ")
