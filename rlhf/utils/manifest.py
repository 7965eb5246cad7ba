"""The manifest of a folder: size and SHA-256 of each of its files, written last, and the check against it.

SHA-256 is the fastest cryptographic digest of the standard library on processors with instructions for it, and the
digest that the hub and `sha256sum` use. Files are read in parallel: hashing releases the interpreter's lock.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.utils.full_disk import open_waiting

MANIFEST = "manifest.json"
"""The manifest's name in its folder."""

_FOR_PEOPLE = "README.md"  # no program reads it, so its changes are no damage
_CHUNK = 2**20
_THREADS = 8
_LONG = 2**11  # chunks that take a second or more


class FileDigest(NamedTuple):
    """The size of a file in bytes, and the SHA-256 of its content."""

    size: int
    sha256: str


_known: dict[tuple[int, ...], str] = {}  # state of a file -> SHA-256
_SECONDS_TO_SETTLE = 1.0  # a file that changed later may change again without another time of change


Observer = Callable[[Path, int], AbstractContextManager[Callable[[], object]]]
"""Called with a folder and the MiB to be read there; what it yields is called after each MiB, in any thread."""

_observer: ContextVar[Observer | None] = ContextVar("_observer", default=None)


@contextmanager
def observe_hashing(observer: Observer) -> Iterator[None]:
    """Show `observer` what `hash_files` reads while the block runs, if it takes long."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def hash_file(path: Path, advance: Callable[[], object] = lambda: None) -> str:
    """Return the SHA-256 of a file's bytes; call `advance` after each MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            advance()
    return digest.hexdigest()


def hash_files(paths: Iterable[Path]) -> list[str]:
    """Return the SHA-256 of each file, in order; a file is read once in a process, unless it changes."""
    paths, observer = list(paths), _observer.get()
    unknown = [path.stat().st_size for path in paths if _state(path.stat()) not in _known]
    chunks = sum(-(-size // _CHUNK) for size in unknown)
    with (
        observer(paths[0].parent, chunks) if observer and chunks >= _LONG else nullcontext(lambda: None) as advance,
        ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads,
    ):
        return list(threads.map(lambda path: _hash_once(path, advance), paths))


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _hash_once(path: Path, advance: Callable[[], object]) -> str:
    status = path.stat()
    state = _state(status)
    if state not in _known:
        digest = hash_file(path, advance)
        if time.time() - max(status.st_mtime, status.st_ctime) < _SECONDS_TO_SETTLE:
            return digest
        _known[state] = digest
    return _known[state]


def get_known_digests() -> dict[tuple[int, ...], str]:
    """Return the digests of the files that this process has read, by the files' states on this machine."""
    return dict(_known)


def add_known_digests(digests: Mapping[tuple[int, ...], str]) -> None:
    """Take digests that another process has read, so that this one need not read the files."""
    _known.update(digests)


def hash_json(value: Any) -> str:
    """Return the SHA-256 of a value that JSON can express; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def digest_folder(folder: Path, select: Callable[[str], bool] = lambda name: True) -> dict[str, FileDigest]:
    """Return the digests of the files below `folder` whose names, relative to it, `select` accepts."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    paths = {name: folder / name for name in names if name != MANIFEST and select(name)}
    sizes = [path.stat().st_size for path in paths.values()]
    return dict(zip(paths, map(FileDigest, sizes, hash_files(paths.values()))))


def write_manifest(folder: Path, digests: Mapping[str, FileDigest] | None = None) -> None:
    """Write the manifest of a folder that is complete; `digests` are those of all files if they are known."""
    files = {name: digest._asdict() for name, digest in sorted((digests or digest_folder(folder)).items())}
    content = {"files": files, "sha256": hash_json(files)}
    with open_waiting(folder / MANIFEST) as file:
        file.write(f"{json.dumps(content, indent=2, ensure_ascii=False)}\n".encode())


def read_manifest(folder: Path) -> dict[str, FileDigest]:
    """Return what the manifest of a folder says about its files.

    Raises:
        OSError: there is none, or it cannot be read.
        ValueError: it is damaged.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {name: FileDigest(**digest) for name, digest in content["files"].items()}
        intact = content == {"files": content["files"], "sha256": hash_json(content["files"])}
        typed = all(isinstance(size, int) and isinstance(digest, str) for size, digest in files.values())
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("not a manifest") from error
    if not (intact and typed):
        raise ValueError("its own digest differs")
    return files


def find_damage(folder: Path, select: Callable[[str], bool] = lambda name: True) -> str | None:
    """Return how a folder differs from its manifest: the file, and what differs; None if it does not.

    Sizes of all files are compared, and contents of those whose names `select` accepts. Files that the manifest does
    not name are ignored.
    """
    try:
        expected = read_manifest(folder)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, IsADirectoryError):
        return f"{MANIFEST} is damaged"
    return find_difference(folder, expected, MANIFEST, select)


def find_difference(
    folder: Path, expected: Mapping[str, FileDigest], source: str, select: Callable[[str], bool] = lambda name: True
) -> str | None:
    """Return how files of a folder differ from what the file `source` says about them, as `find_damage` does."""
    names = [name for name in expected if name != _FOR_PEOPLE]
    for name in names:
        if not (folder / name).is_file():
            return f"{name} is missing"
        if (size := (folder / name).stat().st_size) != expected[name].size:
            return f"{name} has {size:,} bytes, and {expected[name].size:,} in {source}"
    selected = [name for name in names if select(name)]
    for name, digest in zip(selected, hash_files(folder / name for name in selected)):
        if digest != expected[name].sha256:
            return f"{name} has other content than when it was written: its SHA-256 differs from {source}"
    return None
