"""The part of the schema that names reward functions: where each is found, what it weighs, what it is called."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer

from rlhf.config import paths
from rlhf.config.loader import TrackedStr
from rlhf.config.types import ConfigModel
from rlhf.config.validation_errors import short_repr

PLUGIN = "plugin"
_PYTHON = ".py"
_PARTS = re.compile(r"(?P<where>[^:]+):(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
_LABEL = re.compile(r"[\w.-]+")


def _function(value: Any) -> Any:
    """`where:name`, the path of a file from the working directory.

    Raises:
        ValueError: it is of another form.
    """
    found = _PARTS.fullmatch(value) if isinstance(value, str) else None
    if not found:
        raise ValueError(f"expected module:function, rewards.py:function or plugin:name, got {short_repr(value)}")
    where = found["where"]
    if where.endswith(_PYTHON):
        where = paths.join_path(value.folder, where) if isinstance(value, TrackedStr) else os.path.expanduser(where)
    return f"{where}:{found['name']}"


def _absolute(function: str) -> str:
    where, _, name = function.rpartition(":")
    return f"{paths.join_path(os.getcwd(), where)}:{name}" if where.endswith(_PYTHON) else function


def _label(value: Any) -> Any:
    """What can be part of a key.

    Raises:
        ValueError: it cannot.
    """
    if isinstance(value, str) and not _LABEL.fullmatch(value):
        raise ValueError(f"expected letters, digits and any of _.-, got {short_repr(value)}")
    return value


# JSON is read from other working directories: there, paths are absolute.
Function = Annotated[str, BeforeValidator(_function), PlainSerializer(_absolute, when_used="json")]


class RewardFunctionConfig(ConfigModel):
    """A Python function that scores completions."""

    function: Function = Field(
        description="module:function, rewards.py:function (a file) or plugin:name; called with prompt, completion, row"
    )
    weight: float = Field(1.0, description="weight of its values in the score; 0: they are recorded alone")
    name: Annotated[str | None, BeforeValidator(_label)] = Field(
        None, description="what its values are recorded as, reward/<name>; empty: the function's own name"
    )

    @property
    def label(self) -> str:
        """What its values are recorded as, after `reward/`."""
        return self.name or self.function.rpartition(":")[2].rpartition(".")[2]
