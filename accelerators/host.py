"""The host of this process: its memory, read from the operating system without torch, and its output streams."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import re
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

STATUS, MEMORY_INFO = Path("/proc/self/status"), Path("/proc/meminfo")
MEMBERSHIP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""The control groups of this process, and where the system shows them."""

_WRITE_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def total_memory() -> int:
    """Return the bytes that this process may use: the machine's, or the least limit of its control groups."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _group_memory())])


def available_memory() -> int | None:
    """Return the bytes, swap included, that this process can still get before the system ends it; None if not known.

    Files that the system caches count as available, because it drops them first.
    """
    values = _read_numbers(MEMORY_INFO)
    if "MemAvailable" not in values:
        return None
    machine = (values["MemAvailable"] + values.get("SwapFree", 0)) * 1024
    return max(0, min([machine, *(limit - used for limit, used in _group_memory())]))


def make_private(folder: Path) -> bool:
    """Create a folder that only this user can write; return False if it exists and is another one, or a link.

    Raises:
        OSError: it cannot be created.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    owned = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return owned and not status.st_mode & _WRITE_OF_OTHERS


def is_private(file: Path) -> bool:
    """Return whether a file exists and only this user, who owns it, could have written it."""
    try:
        status = file.lstat()
    except OSError:
        return False
    owned = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
    return owned and not status.st_mode & _WRITE_OF_OTHERS


def processor_quota() -> float | None:
    """Return the processor time that this process may use, in cores: the least quota of its groups; None without one.

    A container of Kubernetes or of `docker --cpus` sees all cores of the machine, and is stopped when its time is used.
    """
    quotas = []
    for folder in _group_folders("cpu"):
        old = [read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        texts = [text.strip() for text in old] if all(old) else read_text(folder / "cpu.max").split()
        if len(texts) == 2 and all(text.isdigit() for text in texts):  # else `max`, or -1
            quotas.append(int(texts[0]) / int(texts[1]))
    return min(quotas, default=None)


def _group_memory() -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group that this process is in, and the bytes in use without cached files."""
    for folder in _group_folders("memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            if (text := read_text(folder / limit).strip()).isdigit():
                cached = _read_numbers(folder / "memory.stat")
                prefix = "" if limit == "memory.max" else "total_"
                files = sum(cached.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
                yield int(text), int(read_text(folder / used).strip() or 0) - files


def _group_folders(controller: str) -> Iterator[Path]:
    """Yield the folder of each control group that this process is in and that may limit it, the innermost first."""
    folders = {GROUPS: "/", GROUPS / controller: "/"}  # versions 2 and 1; in a container, the container's group
    for line in read_text(MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            folders[GROUPS / controller if controllers else GROUPS] = path
    for root, path in folders.items():
        inner = root / path.strip("/")
        yield from (inner, *(outer for outer in inner.parents if outer.is_relative_to(root)))


def _read_numbers(path: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line; empty if it cannot be read."""
    pairs = (line.replace(":", " ").split() for line in read_text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}


def resident_memory() -> tuple[int, int]:
    """Return the bytes that this process uses: now, and the maximum since the last reset.

    On a system without /proc, both are the maximum since the process started.
    """
    status = read_text(STATUS)
    now, peak = (re.search(rf"^{key}:\s*(\d+) kB$", status, re.MULTILINE) for key in ("VmRSS", "VmHWM"))
    if now and peak:
        return int(now.group(1)) * 1024, int(peak.group(1)) * 1024
    import resource

    maximum = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bytes_used = maximum if sys.platform == "darwin" else maximum * 1024  # macOS counts bytes, others kB
    return bytes_used, bytes_used


def reset_peak_memory() -> bool:
    """Reset the maximum of `resident_memory`; return whether the system allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # no /proc, or a container that forbids it: the maximum stays
        return False
    return True


@functools.cache
def glibc() -> ctypes.CDLL | None:
    """Return the C library; None if it is not glibc."""
    is_glibc = sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc"
    return ctypes.CDLL(None) if is_glibc else None


def return_freed_memory() -> None:
    """Return freed memory, which the C library keeps, to the system."""
    if library := glibc():
        library.malloc_trim(0)


def read_text(path: Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def run_tool(*command: str, seconds: float = 10.0) -> subprocess.CompletedProcess[str]:
    """Run a vendor's tool, which may hang in a broken driver, and return its output.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it has not ended in time.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()  # without waiting for its end, as `subprocess.run` does: one that hangs in a driver has none
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def read_command(*command: str) -> str:
    """Return the output of a command, or in parentheses why there is none."""
    try:
        done = run_tool(*command)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"({error})"
    return (done.stdout.strip() or done.stderr.strip()) + (f" (exit code {done.returncode})" if done.returncode else "")


def describe_files(paths: Iterable[Path]) -> str:
    """Return the paths with their permissions, and if this process may open them."""
    lines = []
    for path in sorted(paths):
        access = "".join(letter if os.access(path, mode) else "-" for letter, mode in (("r", os.R_OK), ("w", os.W_OK)))
        with contextlib.suppress(OSError):  # a file that has gone, or a link to nothing
            lines.append(f"{path} {path.stat().st_mode & 0o777:o} {access}")
    return "\n".join(lines) or "none"


@contextlib.contextmanager
def redirect_fd(source: int, target: int) -> Iterator[None]:
    """Send to file descriptor `target` what is written to `source` in this block.

    A process that lacks one of them, such as one without standard output, is left unchanged.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            saved = os.dup(source)
            stack.callback(os.close, saved)
            _flush()
            os.dup2(target, source)
            stack.callback(os.dup2, saved, source)
            stack.callback(_flush)
        yield


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send to standard error what Python, libraries and child processes print in this block.

    Standard output is for a command's result, which other programs may read.
    """
    with redirect_fd(1, 2), contextlib.redirect_stdout(sys.stderr):
        yield


def _flush() -> None:
    """Flush the buffers of Python and of the C library."""
    for stream in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none at all
            stream.flush()  # type: ignore[union-attr]
    ctypes.CDLL(None).fflush(None)
