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
_FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst", ".gguf")


def is_path(name: str) -> bool:
    """Whether a name is that of a file or folder here, there or not; else it is `world`, or one of a hub."""
    return name != WORLD and (_only_a_path(name) or os.path.exists(name))


def absolute(name: str) -> str:
    """A path as it is from any working directory; another name as it stands."""
    return _tidy(os.path.join(os.getcwd(), os.path.expanduser(name))) if is_path(name) else name


def beside(name: str, folder: str) -> str:
    """A name that stands in a file of `folder`: joined to that where it is a path by its form, or exists there."""
    name = os.path.expanduser(name)
    joined = os.path.join(folder, name)
    return _tidy(joined) if name != WORLD and (_only_a_path(name) or os.path.exists(joined)) else name


def hint(path: str) -> str:
    """What to add to the error that `path` is not there; empty where nothing is known that helps.

    Paths in a recipe start from its folder. Who meant the working directory is told what is found there.
    """
    parts = Path(path).parts
    ends = (os.path.join(*parts[start:]) for start in range(1, len(parts)))
    found = next((end for end in ends if os.path.exists(end)), None)
    return (
        f"; {found} is in the working directory, but a recipe's paths start from the recipe's folder" if found else ""
    )


def _only_a_path(name: str) -> bool:
    return name.startswith((".", "~")) or name.lower().endswith(_FILES) or not _HUB.fullmatch(name)


def _tidy(path: str) -> str:
    """`path` without `.` and `a/..`, where that leads to the same place; behind a link it may not."""
    short = os.path.normpath(path)
    return short if os.path.realpath(short) == os.path.realpath(path) else path
