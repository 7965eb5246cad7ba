"""Runs cells of Python in one namespace, as a notebook does, in a separate process.

    echo '["a = 1", "print(a)"]' | python -m tests.cells      [["", null], ["1\\n", null]]

What a cell printed and, where it failed, the error in one line; nothing after that is run.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.helpers import user_environment

ROOT = Path(__file__).parents[1]


def run_cells(cells: Sequence[str], folder: Path, *, timeout: float = 300) -> list[tuple[str, str | None]]:
    """(what was printed, error) of each cell that was run in `folder`."""
    environment = user_environment() | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.cells"]
    done = subprocess.run(
        command,
        input=json.dumps(list(cells)),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [tuple(found) for found in json.loads(done.stdout.splitlines()[-1])]


def _main() -> None:
    found = []
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(json.load(sys.stdin)):
        printed, error = io.StringIO(), None
        with contextlib.redirect_stdout(printed):
            try:
                exec(compile(cell, f"<cell {number}>", "exec"), namespace)
            except BaseException as raised:
                error = f"{type(raised).__name__}: {raised}"
        found.append((printed.getvalue(), error))
        if error:
            break
    print(f"\n{json.dumps(found)}", flush=True)


if __name__ == "__main__":
    _main()
