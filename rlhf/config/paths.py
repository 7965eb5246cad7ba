"""Tell paths from hub ids and from `world`, the embedded data, and resolve paths.

A name is a path if it exists, or if no hub id can have its form. A file or folder that looks like a hub id and may not
exist yet is written `./like-this`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

WORLD = "world"
"""The data that rlhf generates. A folder of this name is `./world`."""

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_FILE_EXTENSIONS = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst")


def is_path(name: str) -> bool:
    """Return whether a name is a path, existing or not; else it is `world` or a hub id."""
    return name != WORLD and (_has_form_of_path(name) or os.path.exists(name))


def make_absolute(name: str) -> str:
    """Return a path as an absolute path, and another name unchanged."""
    return join_path(os.getcwd(), name) if is_path(name) else name


def resolve_relative_to(folder: str, name: str) -> str:
    """Resolve a name in a file of `folder`: join it to the folder if it has the form of a path, or exists there.

    The result always has the form of a path: `recipes/model` becomes `./recipes/model`.
    """
    path = join_path(folder, name)
    if name == WORLD or not (_has_form_of_path(name) or os.path.exists(path)):
        return name
    return path if _has_form_of_path(path) else os.path.join(os.curdir, path)


def is_local_only(name: str) -> bool:
    """Return whether a name has the form of a hub id, and is a path only because it exists here."""
    return is_path(name) and not _has_form_of_path(name)


def join_path(folder: str, path: str) -> str:
    """Join a path to `folder`, and remove `.` and `a/..` if the result leads to the same place."""
    whole = os.path.join(folder, os.path.expanduser(path))
    short = os.path.normpath(whole)
    return short if os.path.realpath(short) == os.path.realpath(whole) else whole  # behind a link, `..` is elsewhere


def missing_path_hint(path: str) -> str:
    """Return a hint for the error that `path` does not exist; empty if nothing helps.

    If the path exists relative to the working directory, say so. If the name looks like a hub id, say that no hub is
    asked.
    """
    parts = Path(path).parts
    ends = (os.path.join(*parts[start:]) for start in range(1, len(parts)))
    existing = next((end for end in ends if os.path.exists(end)), None)
    if existing:
        return f"; {existing} is in the working directory (a recipe's paths are relative to its own folder)"
    looks_like_hub_id = len(parts) == 2 and _HUB_ID.fullmatch(path) and not os.path.exists(parts[0])
    return "; its file extension makes it a path, so no hub is asked" if looks_like_hub_id else ""


def _has_form_of_path(name: str) -> bool:
    return name.startswith((".", "~")) or name.lower().endswith(_FILE_EXTENSIONS) or not _HUB_ID.fullmatch(name)
