"""Whether a hub has the model or data set of a name: asked once, before a library would ask again and again.

A name flows in; nothing, a note, or an error of one line comes out. Where the hub cannot be reached and this machine
has a copy, libraries take that from then on and leave the hub alone: until it is asked for another name, or
`restore_offline_flags` ends. A hub that is switched off is not asked, and never switched on.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

from rlhf.config.paths import WORLD, is_path
from rlhf.errors import DataError, ModelError

logger = logging.getLogger(__name__)

_SECONDS = 10.0  # for the hub to answer
# What switches a hub off. The last of both is for data sets alone.
_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_MODULES = ("huggingface_hub.constants", "datasets.config")  # in each `HF_HUB_OFFLINE`, looked at whenever they ask
_YES = {"1", "ON", "YES", "TRUE"}


class _Kind(NamedTuple):
    words: str
    place: str
    prefix: str  # of its address
    file: str  # that nearly all of them have
    error: type[ModelError | DataError]


_KINDS = {
    "model": _Kind("model", "folder", "", "config.json", ModelError),
    "dataset": _Kind("data set", "file or folder", "datasets/", ".gitattributes", DataError),
}

_found: dict[str, bool] = {}  # the modules' switches as they were, while they are turned by us


class _Unreachable(Exception):
    """The hub gives no answer; the message says why."""


def find_hub_note(name: str, kind: Literal["model", "dataset"]) -> str | None:
    """Ask the hub whether it gives out `name`, unless that is a path here.

    Returns:
        A note, where it has to be downloaded, or the hub cannot be reached and the copy on this machine is taken.

    Raises:
        ModelError, DataError: the hub does not give it out, or cannot be reached and there is no copy.
    """
    if name == WORLD or is_path(name):
        return None
    what = _KINDS[kind]
    if offline := _switched_off(kind):
        if is_cached(name, kind):
            return None
        found, remedy = f"there is no copy of it on this machine, and {offline} is set", f"unset {offline}"
    else:
        _ask_again()
        try:
            answer = _answer(name, what)
        except _Unreachable as error:
            if is_cached(name, kind):
                _leave_alone()
                return f"{name}: the hub cannot be reached ({error}); the copy on this machine is taken"
            found, remedy = f"the hub cannot be reached ({error})", "check the network"
        else:
            if answer:
                raise what.error(f"{name}: {answer}")
            return None if is_cached(name, kind) else f"{name}: not on this machine yet; it is downloaded from the hub"
    raise what.error(f"{name}: no {what.place} here, and {found}; {remedy}, or name a local {what.place}")


@cache
def check_available(name: str, kind: Literal["model", "dataset"]) -> None:
    """`find_hub_note`, once in this process; the note is logged.

    Raises:
        ModelError, DataError: as `find_hub_note`.
    """
    if note := find_hub_note(name, kind):
        logger.warning("%s", note)


@contextmanager
def restore_offline_flags() -> Iterator[None]:
    """What hubs say is remembered, and libraries leave them alone, no longer than this block: a program may go on."""
    try:
        yield
    finally:
        _ask_again()
        check_available.cache_clear()


def is_cached(name: str, kind: Literal["model", "dataset"]) -> bool:
    """Whether the hub's `name` was loaded on this machine before."""
    from huggingface_hub import constants

    if kind == "dataset":  # the library keeps what it made of the files, in folders whose names are in snake_case
        home = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets")
        wanted = _plain(name.replace("/", "___"))
        return any(_plain(folder.name) == wanted for folder in Path(home).glob("*/"))
    snapshots = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots")
    return any(path.is_file() for path in snapshots.glob("*/*"))


def _answer(name: str, what: _Kind) -> str | None:
    """Why the hub does not give out `name`; None where it does."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session

    address = f"{constants.ENDPOINT}/{what.prefix}{name}/resolve/main/{what.file}"
    try:  # a request as the libraries make it, but for their five repetitions
        response = get_session().head(address, headers=build_hf_headers(), timeout=_SECONDS, follow_redirects=False)
    except Exception as error:  # of the network, of a proxy, of certificates
        if "timeout" in type(error).__name__.lower():
            raise _Unreachable(f"no answer within {_SECONDS:g} s") from error
        raise _Unreachable(re.sub(r"^\[[^]]*\] ", "", str(error)) or type(error).__name__) from error
    status, code = response.status_code, response.headers.get("X-Error-Code")
    if code == "GatedRepo":
        return "gated: accept its terms on its page, and log in (hf auth login)"
    if "Invalid credentials" in response.headers.get("X-Error-Message", ""):
        return "the hub does not accept your token; log in again (hf auth login)"
    if status in (401, 403, 404) and code not in ("EntryNotFound", "RevisionNotFound"):
        return (
            f"no {what.place} here, and the hub has no {what.words} of this name; check the name "
            "(a private one is shown to those who log in: hf auth login)"
        )
    if status == 429 or status >= 500:
        raise _Unreachable(f"it answers {status} {response.reason_phrase}".rstrip())
    return None


def _switched_off(kind: Literal["model", "dataset"]) -> str | None:
    """The variable or module that keeps libraries from asking the hub, where that is not for us."""
    import huggingface_hub.constants  # noqa: F401

    end = None if kind == "dataset" else -1
    variable = next((name for name in _VARIABLES[:end] if _is_on(name)), None)
    return variable or next((f"{name}.HF_HUB_OFFLINE" for name, _ in _imported(_MODULES[:end]) if _before(name)), None)


def _leave_alone() -> None:
    """Let libraries take what is on this machine."""
    for name, module in _imported():
        _found.setdefault(name, module.HF_HUB_OFFLINE)
        module.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def _ask_again() -> None:
    """Let libraries ask the hub, if it was for us that they did not."""
    if _found:
        for name, module in _imported():
            module.HF_HUB_OFFLINE = _before(name)  # type: ignore[attr-defined]
        _found.clear()


def _before(name: str) -> bool:
    """A module's switch as it is without us."""
    if not _found:
        return bool(sys.modules[name].HF_HUB_OFFLINE)
    return _found.get(name, _is_on(_VARIABLES[-1]))  # imported since then, it took over ours


def _imported(names: tuple[str, ...] = _MODULES) -> list[tuple[str, ModuleType]]:
    return [(name, sys.modules[name]) for name in names if name in sys.modules]


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").upper() in _YES


def _plain(name: str) -> str:
    return re.sub("(?<!_)_(?!_)", "", name).lower()
