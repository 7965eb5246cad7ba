"""Check once if the hub has a model or data set, and turn Hugging Face's errors about a model into one sentence.

If the hub cannot be reached and this machine has a copy, libraries use the copy and do not contact the hub, until
another name is requested or `restore_offline_flags` ends. If the user has switched the hub off, it is never contacted.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

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

_switched_off: set[str] = set()  # those of `_MODULES` whose flag is on because of this module


class _UnreachableError(Exception):
    """The hub does not respond; the message says why."""


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
    """Clear the cached responses of the hub after this block, and restore the offline flags of the libraries."""
    try:
        yield
    finally:
        _restore_flags()
        check_available.cache_clear()


def is_cached(name: str, kind: Kind) -> bool:
    """Return True if the hub's `name` was loaded on this machine before."""
    from huggingface_hub import constants

    if kind == "dataset":  # `datasets` stores prepared files in folders with snake_case names
        folder_name = _simplify(name.replace("/", "___"))
        return any(_simplify(folder.name) == folder_name for folder in find_datasets_cache().glob("*/"))
    snapshots = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots")
    return any(path.is_file() for path in snapshots.glob("*/*"))


def find_datasets_cache() -> Path:
    """Return the folder in which `datasets` stores prepared data sets, without importing it."""
    from huggingface_hub import constants

    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))


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
    from huggingface_hub import constants  # noqa: F401

    end = None if kind == "dataset" else -1
    for variable in _VARIABLES[:end]:
        if os.environ.get(variable, "").upper() in {"1", "ON", "YES", "TRUE"}:
            return variable
    for name in _MODULES[:end]:
        if name in sys.modules and name not in _switched_off and sys.modules[name].HF_HUB_OFFLINE:
            return f"{name}.HF_HUB_OFFLINE"
    return None


def _switch_off() -> None:
    """Have the libraries use local copies only; `datasets`, if it is imported later, copies the other's flag."""
    _switched_off.update(_MODULES[:-1] if _find_switch("dataset") else _MODULES)
    _set_flags(True)


def _restore_flags() -> None:
    """Undo `_switch_off`."""
    _set_flags(False)
    _switched_off.clear()


def _set_flags(value: bool) -> None:
    for name in _switched_off & sys.modules.keys():
        sys.modules[name].HF_HUB_OFFLINE = value  # type: ignore[attr-defined]


def _simplify(name: str) -> str:
    return re.sub("(?<!_)_(?!_)", "", name).lower()


# Patterns of libraries' messages -> their meaning; \1 is the first group.
_MEANINGS = (
    (r"model type `(.*?)` but Transformers does not recognize", r"transformers does not know the model type '\1'"),
    (r"Unrecognized model in .*Should have a `model_type`", "config.json names no model_type"),
    (r"config file at '(?:.*/)?(.*?)' is not a valid JSON", r"\1 is not valid JSON"),
    (r"Error no file named (.*?),? found in directory", r"there is no \1"),
    (r"ignore_mismatched_sizes", "the weights have other shapes than config.json says"),
    (r"deserializing header: (.*)", r"a .safetensors file is incomplete or damaged: \1"),
    (r"PytorchStreamReader failed|invalid load key|unexpected EOF", "a .bin file is incomplete or damaged"),
    (r"(?s)instantiate the backend tokenizer from one of.*sentencepiece", "it needs the package sentencepiece"),
    (r"couldn't find them in the cached files", "the copy on this machine is incomplete, and the hub was not reached"),
)
_ADVICE = re.compile(
    r"(?<=[.!?]) +(?=(?:Check|Consider|Example|For|If|Install|Make|Otherwise|Please|See|This could|Try|Use|You) )"
)


def summarize_error(error: BaseException) -> str:
    """Return what is wrong in one sentence, without what to do."""
    text = f"KeyError: {error}" if isinstance(error, KeyError) else str(error).strip()
    if isinstance(error, json.JSONDecodeError):
        return f"one of its files is not valid JSON: {text}"
    for pattern, meaning in _MEANINGS:
        if match := re.search(pattern, text):
            return match.expand(meaning)
    return _ADVICE.split((text or type(error).__name__).splitlines()[0])[0].rstrip(".!")


def load_error(path: str, problem: str, error: BaseException, remedy: str) -> ModelError:
    """Return the error for a folder or hub name that a library could not load."""
    reason = summarize_error(error)
    if not Path(path).exists():
        return ModelError(f"{path}: no folder here, and not loaded from the hub ({reason}); check the name")
    return ModelError(f"{path}: {problem} ({reason}); {remedy}")
