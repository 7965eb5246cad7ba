"""Runs cells of Python in one namespace, as a notebook does, in a separate process.

    echo '["a = 1", "print(a)"]' | python -m tests.cells      [["", null], ["1\\n", null]]

Each result is the output of a cell and, if the cell failed, its error in one line; then no more cells are run. The
cells may also come from a file: `python -m tests.cells FILE`.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.forks import Forks
from tests.helpers import user_environment

ROOT = Path(__file__).parents[1]


def run_cells(
    cells: Sequence[str], folder: Path, *, timeout: float = 300, forks: Forks | None = None
) -> list[tuple[str, str | None]]:
    """Run cells in `folder`, in a new interpreter or in a fork.

    Returns:
        (output, error) of each cell that was run.
    """
    if forks:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(list(cells), file)
            file.flush()
            return _read(forks.python("-m", "tests.cells", file.name, timeout=timeout, cwd=folder))
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
    return _read(done)


def _read(done: subprocess.CompletedProcess[str]) -> list[tuple[str, str | None]]:
    assert done.returncode == 0, done.stderr[-4000:]
    return [(output, error) for output, error in json.loads(done.stdout.splitlines()[-1])]


def _main() -> None:
    outputs = []
    cells = json.loads(Path(sys.argv[1]).read_text()) if sys.argv[1:] else json.load(sys.stdin)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        printed, error = io.StringIO(), None
        with contextlib.redirect_stdout(printed):
            try:
                exec(compile(cell, f"<cell {number}>", "exec"), namespace)
            except BaseException as raised:
                error = f"{type(raised).__name__}: {raised}"
        outputs.append((printed.getvalue(), error))
        if error:
            break
    print(f"\n{json.dumps(outputs)}", flush=True)


if __name__ == "__main__":
    _main()
