"""Identify a model by the content of its files, not by its path; check the files that rlhf wrote or the hub sent.

A model is a folder, or a hub name that was downloaded to this machine before. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.errors import ModelError
from rlhf.utils.atomic_io import read_json
from rlhf.utils.manifest import MANIFEST, find_damage, hash_files, hash_json

ADAPTER_CONFIG = "adapter_config.json"
"""The file by which peft's folder of an adapter names the model that it was trained on."""

_PARTS = {
    "weights": ("*.safetensors", "*.bin", "*.gguf", "*.index.json"),
    "adapter": (ADAPTER_CONFIG,),
    "configuration": ("config.json",),
    "generation settings": ("generation_config.json",),
    "tokenizer": (
        *("tokenizer*", "vocab.*", "merges.txt", "spiece.model", "sentencepiece*", "special_tokens_map.json"),
        *("added_tokens.json", "chat_template*"),
    ),
    "code": ("*.py",),
}
"""The parts of a model, and the files of each, which stand in the model's folder itself."""

# Keys of a configuration that no model reads: they say where and with what it was saved.
_NOTES = {"_name_or_path", "transformers_version", "use_cache"}
# The hub's cache names a large file by its SHA-256, and another by git's digest of it.
_BLOB = re.compile(r"blobs/([0-9a-f]{64}|[0-9a-f]{40})$")
_SHA256_DIGITS = 64

Identity = dict[str, str]
"""Digests of a model's parts by name; of a hub name also its `commit`."""


class StartModel(NamedTuple):
    """A model that a stage starts from: its folder or hub name, and its content."""

    path: str
    identity: Identity


def identify_model(model: str) -> dict[str, str]:
    """Return the digest of each part that a model has, and the commit of a hub name; {} if it is not on this machine.

    A digest covers all bytes of the part's files and their names; configurations count by their keys and values.
    """
    folder = _find_folder(model)
    if folder is None:
        return {}
    files = sorted(path for path in folder.iterdir() if path.is_file())
    identity = {}
    for part, patterns in _PARTS.items():
        named = {path.name: path for path in files if any(fnmatch(path.name, pattern) for pattern in patterns)}
        if named:
            identity[part] = hash_json(dict(zip(named, _hash_contents(list(named.values())))))
    if folder != Path(model):
        identity["commit"] = folder.name
    return identity


def read_adapter_base(folder: str | Path) -> str | None:
    """Return the model that the adapter in a folder was trained on; None if the folder holds no adapter.

    Raises:
        ModelError: the adapter names no model.
    """
    file = Path(folder) / ADAPTER_CONFIG
    if not file.is_file():
        return None
    base = str(read_json(file).get("base_model_name_or_path") or "")
    if not base:
        raise ModelError(f"{folder}: this adapter names no base model; set base_model_name_or_path in {file.name}")
    return base


def fingerprint_model(model: str) -> str | None:
    """Return one digest of a model's weights and configuration, code included; None without weights.

    It decides if two models compute the same: their tokenizers, generation settings and places may differ.
    """
    identity = identify_model(model)
    parts = {part: identity.get(part) for part in ("weights", "adapter", "configuration", "code")}
    return hash_json(parts) if parts["weights"] else None


def check_model_files(model: str | Path, *, whole: bool = True) -> None:
    """Raise `ModelError` if a folder that rlhf wrote differs from its manifest, or one of the hub's cache from the hub.

    Other folders pass. `whole` compares all contents; False compares those of small files, and of weights only the
    sizes.
    """
    folder = _find_folder(str(model))
    if folder is None:
        return
    select: Callable[[str], bool] = (lambda name: True) if whole else lambda name: not _is_weight_file(name)
    if (folder / MANIFEST).is_file() and (damage := find_damage(folder, select)):
        raise ModelError(
            f"{folder}: is damaged: {damage}; restore it, or delete {folder / MANIFEST} if the change is intended"
        )
    if changed := _find_changed_blob([path for path in sorted(folder.iterdir()) if select(path.name)]):
        raise ModelError(
            f"{changed}: has other content than on the hub; delete {os.path.realpath(changed)} to have it downloaded "
            "again, or name a copy of the folder if the change is intended"
        )


def describe_change(then: Identity, now: Identity) -> str | None:
    """Return which parts of a model differ; None if none does.

    Models of one commit are equal, since `check_model_files` compares files with the hub's digests: the files that one
    of them lacks had not been downloaded yet.
    """
    commits = then.get("commit"), now.get("commit")
    if all(commits) and commits[0] == commits[1]:
        return None
    digests = [part for part in _PARTS if then.get(part) != now.get(part)]
    if not digests:
        return None
    suffix = f": commit {commits[0]} there, {commits[1]} now" if all(commits) else ""
    return f"other {' and '.join(digests)}{suffix}"


def _is_weight_file(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _PARTS["weights"][:3])


def _find_folder(model: str) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # a path that does not exist
        return None
    return Path(file).parent if isinstance(file, str) else None


def _hash_contents(paths: list[Path]) -> list[str]:
    """Return a digest of the content of each file, in order."""
    names = {path: _find_blob(path) or "" for path in paths}
    known = {path: name for path, name in names.items() if len(name) == _SHA256_DIGITS}
    digests = {path: _read_settings(path) or known.get(path) for path in paths}
    unknown = [path for path, digest in digests.items() if digest is None]
    digests |= dict(zip(unknown, hash_files(unknown)))
    return [str(digests[path]) for path in paths]


def _find_changed_blob(paths: list[Path]) -> Path | None:
    """Return the first of the files that does not have the content by which the hub's cache names it."""
    names = {path: name for path in paths if path.is_file() and (name := _find_blob(path))}
    large = [path for path, name in names.items() if len(name) == _SHA256_DIGITS]
    digests = dict(zip(large, hash_files(large)))
    return next((path for path, name in names.items() if (digests.get(path) or _hash_as_git(path)) != name), None)


def _hash_as_git(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _find_blob(path: Path) -> str | None:
    """Return the digest by which the hub's cache names a file; None if the file is elsewhere."""
    match = _BLOB.search(os.path.realpath(path)) if path.is_symlink() else None
    return match[1] if match else None


def _read_settings(path: Path) -> str | None:
    """Return a digest of a configuration without `_NOTES`; None if the file is none, or is no JSON object."""
    if not fnmatch(path.name, "*config.json"):
        return None
    try:
        settings: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(settings, dict):
        return None
    return hash_json({key: value for key, value in settings.items() if key not in _NOTES})
