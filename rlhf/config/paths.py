"""What a name in the settings is: a path here, the embedded `world`, or something to ask of a hub.

A name is a path where it exists here, or where no hub could know it: by its form alone. A file or folder whose name
could be a hub's too, and that may not be there, is named `./like-this`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

WORLD = "world"
"""The data that rlhf makes itself. A folder of this name is `./world`."""

_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst")


def is_path(name: str) -> bool:
    """Whether a name is that of a file or folder here, there or not; else it is `world`, or one of a hub."""
    return name != WORLD and (_is_path_by_form(name) or os.path.exists(name))


def make_absolute(name: str) -> str:
    """A path as it is from any working directory; another name as it stands."""
    return join_path(os.getcwd(), name) if is_path(name) else name


def resolve_relative_to(folder: str, name: str) -> str:
    """A name that stands in a file of `folder`: joined to that where it is a path by its form, or exists there.

    What is joined is a path by its form, there or not: `recipes/model` comes back as `./recipes/model`.
    """
    path = join_path(folder, name)
    if name == WORLD or not (_is_path_by_form(name) or os.path.exists(path)):
        return name
    return path if _is_path_by_form(path) else os.path.join(os.curdir, path)


def is_local_only(name: str) -> bool:
    """Whether a name is a hub's by its form, and a path only because something here is called so."""
    return is_path(name) and not _is_path_by_form(name)


def join_path(folder: str, path: str) -> str:
    """A path that starts from `folder`, without `.` and `a/..` where that leads to the same place."""
    whole = os.path.join(folder, os.path.expanduser(path))
    short = os.path.normpath(whole)
    return short if os.path.realpath(short) == os.path.realpath(whole) else whole  # behind a link, `..` is elsewhere


def missing_path_hint(path: str) -> str:
    """What to add to the error that `path` is not there; empty where nothing is known that helps.

    Paths in a recipe start from its folder. Who meant the working directory is told what is found there, and who
    meant a hub that it is not asked.
    """
    parts = Path(path).parts
    ends = (os.path.join(*parts[start:]) for start in range(1, len(parts)))
    found = next((end for end in ends if os.path.exists(end)), None)
    if found:
        return f"; {found} is in the working directory (a recipe's paths start from its own folder)"
    may_be_a_hubs = len(parts) == 2 and _HUB.fullmatch(path) and not os.path.exists(parts[0])
    return "; by its ending it is a path, never a hub's name" if may_be_a_hubs else ""


def _is_path_by_form(name: str) -> bool:
    return name.startswith((".", "~")) or name.lower().endswith(_FILES) or not _HUB.fullmatch(name)
