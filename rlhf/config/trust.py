"""Code that a recipe names, and the user's consent to run it if the recipe belongs to somebody else.

The recipe of a run's folder is read by every command that continues the run, so a folder can bring code. Consent is
recorded among the user's own settings, for the recipe's path and a digest of what it names.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pwd
import stat
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rlhf.config.schema import Config, Stage
from rlhf.errors import ConfigError, RunError
from rlhf.utils.atomic_io import atomic_write_json, read_json
from rlhf.utils.process_info import current_process


def admit_code(
    configs: Sequence[Config],
    files: Sequence[Path],
    stages: Sequence[Stage],
    *,
    trust: bool = False,
    dry_run: bool = False,
) -> None:
    """Print which code of the settings `stages` will run, and refuse code of other users without consent.

    Args:
        configs: the settings; those of all points of a sweep.
        files: the files that the settings come from: a recipe, and the grid of a sweep.
        stages: the stages to run; without PPO no reward function is called.
        trust: the user consents to running it.
        dry_run: run no code without consent. It calls no reward function, but it loads tokenizers.

    Raises:
        ConfigError: another user could have written a file or the code, and this user has not consented; or a dry run
            would run code that comes with models.
    """
    if dry_run and not trust and any(config.model.trust_remote_code for config in configs):
        raise ConfigError(
            "--dry-run runs no code, but model.trust_remote_code is true; add --trust to let it run the model's code"
        )
    code = list(dict.fromkeys(line for config in configs for line in _describe_code(config, stages)))
    if not code:
        return
    process = current_process()
    for file in files:
        stranger = _find_stranger(file, configs)
        if not stranger:
            continue
        digest, path = _digest(configs), str(file.resolve())
        if not trust and _read_consents().get(path) != digest:
            raise ConfigError(
                f"{file}: runs {' and '.join(code)}, and {stranger}; "
                "read that code, then repeat the command with --trust"
            )
        if trust and process.local_rank == 0:  # ranks of one machine would write one file
            _record_consent(path, digest)
    if process.rank == 0 and process.launcher != "rlhf":  # our launcher has printed it
        named_in = " or ".join([*map(str, files), "options"])
        _print_once(f"rlhf: note: runs {' and '.join(code)}, named in {named_in}")


def consents_path() -> Path:
    """Return the file with the user's consents."""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(folder, "rlhf", "trusted.json")


@cache  # the points of a sweep run the same code
def _print_once(line: str) -> None:
    print(line, file=sys.stderr)


def _describe_code(config: Config, stages: Sequence[Stage]) -> Iterator[str]:
    if "ppo" in stages and config.ppo.reward_functions:
        yield f"reward functions {', '.join(item.function for item in config.ppo.reward_functions)}"
    if config.model.trust_remote_code:
        yield "code that comes with models (model.trust_remote_code)"


def _find_stranger(recipe: Path, configs: Sequence[Config]) -> str | None:
    """Return who else could have written a recipe, its folder, the run in it or the code that it names; None: nobody.

    A recipe that is missing in a run's folder is written from run.json.
    """
    code = [Path(file) for file in _list_code(_list_names(configs))]
    for path in (recipe, recipe.absolute().parent, recipe.with_name("run.json"), *code):
        try:
            status = path.stat()
        except OSError:  # there is no run.json
            continue
        name = path if path in code else "it"
        if status.st_uid not in (os.geteuid(), 0):
            return f"{name} belongs to user {_find_user_name(status.st_uid)}"
        if path in code and status.st_mode & stat.S_IWOTH:
            return f"{name} can be written by every user"
    return None


def _find_user_name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _digest(configs: Sequence[Config]) -> str:
    """Return a digest of all names in the settings, and of the Python files among them and in folders among them."""
    names = _list_names(configs)
    digest = hashlib.sha256(json.dumps(names).encode())
    for file in _list_code(names):
        digest.update(f"{file}\0".encode() + hashlib.sha256(Path(file).read_bytes()).digest())
    return digest.hexdigest()


def _list_names(configs: Sequence[Config]) -> list[str]:
    return sorted({text for config in configs for text in _texts(config.model_dump(mode="json"))})


def _list_code(names: Sequence[str]) -> Iterator[str]:
    """Yield the Python files among `names`, and in folders among them."""
    for name in names:
        path = name.rpartition(":")[0] if ".py:" in name else name
        # In contrast to Path.is_dir, os.path.isdir accepts any text, such as a long template.
        files = sorted(map(str, Path(path).glob("*.py"))) if os.path.isdir(path) else [path]
        yield from (file for file in files if file.endswith(".py") and os.path.isfile(file))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(inner)


def _read_consents() -> dict[str, Any]:
    return read_json(consents_path()) if consents_path().is_file() else {}


def _record_consent(path: str, digest: str) -> None:
    if _read_consents().get(path) == digest:
        return
    file = consents_path()
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another command may record one at the same time
            atomic_write_json(file, _read_consents() | {path: digest})
    except OSError as error:
        raise RunError(f"{file}: cannot be written ({error.strerror}); check its permissions") from error
