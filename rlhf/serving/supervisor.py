"""Run a command until it ends or its parent does, however that ends, and then delete its folder.

    python supervisor.py FOLDER COMMAND [ARGUMENTS]

The parent holds the other end of stdin. When that closes, the command and its children are ended, and the folder is
deleted, unless the parent has written something: then it needs the folder for the next command.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys

GRACE = 30  # seconds between SIGTERM and SIGKILL
POLL = 0.1  # seconds


def main() -> None:
    """Run the command of the arguments, and exit with its code."""
    folder, *command = sys.argv[1:]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    is_needed = is_over = False
    while child.poll() is None and not is_over:
        if select.select([0], [], [], POLL)[0]:
            is_over = not os.read(0, 1024)
            is_needed |= not is_over
    if is_over:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # what it has left behind
    code = child.wait()
    if is_over and not is_needed:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
