"""The command line that this process was started with: recorded in `run.json`, and printed to start again."""

from __future__ import annotations

import shlex
import sys

_arguments: list[str] | None = None


def set_command_line(arguments: list[str]) -> None:
    """Take these as the arguments of the `rlhf` command."""
    global _arguments
    _arguments = arguments


def get_command_line() -> str:
    """Return the `rlhf` command, or that of the program that calls rlhf from Python."""
    return shlex.join(sys.orig_argv if _arguments is None else ["rlhf", *_arguments])
