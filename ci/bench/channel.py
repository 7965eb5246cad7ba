"""The line between `ppo_step.py` and its workers: commands come in on stdin, JSON lines go out on stdout.

Imports nothing but the standard library, because the workers live in two environments.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any


class Channel:
    """A worker's end. Whatever libraries print goes to stderr from here on."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def reply(self, **values: Any) -> None:
        values["peak_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
        print(json.dumps(values), file=self._replies)

    def wait(self) -> bool:
        """Block until the next command; False when there will be none."""
        return sys.stdin.readline() != ""
