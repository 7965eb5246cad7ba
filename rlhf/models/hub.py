"""Check once if a hub has a model or data set, before libraries would ask it again and again.

If the hub cannot be reached and this machine has a copy, libraries use the copy and do not contact the hub, until it is
asked for another name or `restore_offline_flags` ends. A hub that is switched off is not asked, and never switched on.
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
from typing import Any, Literal, NamedTuple

from rlhf.config.paths import WORLD, is_path
from rlhf.errors import DataError, ModelError

logger = logging.getLogger(__name__)

Kind = Literal["model", "dataset"]

_TIMEOUT = 10.0  # seconds
# These switch a hub off. The last of both is for data sets alone.
_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_MODULES = ("huggingface_hub.constants", "datasets.config")  # each reads its `HF_HUB_OFFLINE` before every request


class _Repository(NamedTuple):
    noun: str
    place: str
    file: str  # one that nearly all of them have
    error: type[ModelError | DataError]


_REPOSITORIES = {
    "model": _Repository("model", "folder", "config.json", ModelError),
    "dataset": _Repository("data set", "file or folder", ".gitattributes", DataError),
}

_saved_flags: dict[str, bool] = {}  # the modules' `HF_HUB_OFFLINE` from before this module has changed them


class _UnreachableError(Exception):
    """The hub gives no answer; the message says why."""


@cache
def check_available(name: str, kind: Kind) -> None:
    """Check once in this process that `name` can be loaded, and log what `describe_availability` says.

    Raises:
        ModelError, DataError: as `describe_availability`.
    """
    if note := describe_availability(name, kind):
        logger.warning("%s", note)


def describe_availability(name: str, kind: Kind) -> str | None:
    """Ask the hub if it provides `name`, unless that is a local path.

    Returns:
        A note if `name` must be downloaded, or if the hub cannot be reached and the local copy is used.

    Raises:
        ModelError, DataError: the hub does not provide it, or cannot be reached and there is no copy.
    """
    if name == WORLD or is_path(name):
        return None
    repository = _REPOSITORIES[kind]
    if switch := _find_switch(kind):
        if is_cached(name, kind):
            return None
        problem, remedy = f"there is no copy of it on this machine, and {switch} is set", f"unset {switch}"
    else:
        _restore_flags()
        try:
            _request(name, kind)
        except _UnreachableError as error:
            if is_cached(name, kind):
                _switch_off()
                return f"{name}: the hub cannot be reached ({error}); the copy on this machine is used"
            problem, remedy = f"the hub cannot be reached ({error})", "check the network"
        else:
            return None if is_cached(name, kind) else f"{name}: not on this machine yet; downloading it from the hub"
    raise repository.error(
        f"{name}: no {repository.place} here, and {problem}; {remedy}, or name a local {repository.place}"
    )


@contextmanager
def restore_offline_flags() -> Iterator[None]:
    """Forget the hub's answers after this block, and restore the offline flags of the libraries."""
    try:
        yield
    finally:
        _restore_flags()
        check_available.cache_clear()


def is_cached(name: str, kind: Kind) -> bool:
    """Return True if the hub's `name` was loaded on this machine before."""
    from huggingface_hub import constants

    if kind == "dataset":  # `datasets` stores prepared files in folders with snake_case names
        home = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets")
        folder_name = _simplify(name.replace("/", "___"))
        return any(_simplify(folder.name) == folder_name for folder in Path(home).glob("*/"))
    snapshots = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots")
    return any(path.is_file() for path in snapshots.glob("*/*"))


def _request(name: str, kind: Kind) -> None:
    """Ask the hub for one file of a repository, without the libraries' five retries.

    A mirror answers this request too, in contrast to `HfApi.auth_check` and `HfApi.repo_info`.

    Raises:
        ModelError, DataError: the hub does not provide the repository.
        _UnreachableError: it gives no answer.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError, RevisionNotFoundError

    repository = _REPOSITORIES[kind]
    try:
        get_hf_file_metadata(hf_hub_url(name, repository.file, repo_type=kind), timeout=_TIMEOUT)
    except (EntryNotFoundError, RevisionNotFoundError):
        return  # the repository exists
    except GatedRepoError as error:
        raise repository.error(f"{name}: gated: accept its terms on its page, and log in (hf auth login)") from error
    except HfHubHTTPError as error:
        response = error.response
        if "Invalid credentials" in response.headers.get("X-Error-Message", ""):
            raise repository.error(
                f"{name}: the hub does not accept your token; log in again (hf auth login)"
            ) from error
        if response.status_code in (401, 403, 404):
            raise repository.error(
                f"{name}: no {repository.place} here, and the hub has no {repository.noun} of this name; check the "
                "name (private ones require a login: hf auth login)"
            ) from error
        if response.status_code == 429 or response.status_code >= 500:
            raise _UnreachableError(f"it answers {response.status_code} {response.reason_phrase}".rstrip()) from error
    except Exception as error:  # of the network, of a proxy, of certificates
        if "timeout" in type(error).__name__.lower():
            raise _UnreachableError(f"no answer within {_TIMEOUT:g} s") from error
        raise _UnreachableError(re.sub(r"^\[[^]]*\] ", "", str(error)) or type(error).__name__) from error


def _find_switch(kind: Kind) -> str | None:
    """Return the variable or module that switches the hub off; None if nothing does, or only this module."""
    import huggingface_hub.constants  # noqa: F401

    end = None if kind == "dataset" else -1
    for variable in _VARIABLES[:end]:
        if _is_on(variable):
            return variable
    for name in _find_imported(_MODULES[:end]):
        if _get_user_flag(name):
            return f"{name}.HF_HUB_OFFLINE"
    return None


def _switch_off() -> None:
    """Have the libraries use local copies only."""
    for name, module in _find_imported().items():
        _saved_flags.setdefault(name, module.HF_HUB_OFFLINE)
        module.HF_HUB_OFFLINE = True


def _restore_flags() -> None:
    """Undo `_switch_off`."""
    if _saved_flags:
        for name, module in _find_imported().items():
            module.HF_HUB_OFFLINE = _get_user_flag(name)
        _saved_flags.clear()


def _get_user_flag(name: str) -> bool:
    """Return a module's `HF_HUB_OFFLINE` as it would be without `_switch_off`."""
    if not _saved_flags:
        return bool(sys.modules[name].HF_HUB_OFFLINE)
    return _saved_flags.get(name, _is_on(_VARIABLES[-1]))  # a module imported later has copied the changed flag


def _find_imported(names: tuple[str, ...] = _MODULES) -> dict[str, Any]:
    return {name: sys.modules[name] for name in names if name in sys.modules}


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").upper() in {"1", "ON", "YES", "TRUE"}


def _simplify(name: str) -> str:
    return re.sub("(?<!_)_(?!_)", "", name).lower()
