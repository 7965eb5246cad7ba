"""Run a command until it ends or the parent process does, however that ends.

    python supervisor.py COMMAND [ARGUMENTS]

The parent holds the other end of stdin: when that closes, the command and its children are ended. The parent may be any
thread of a process, and need not be able to say goodbye.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE = 30  # seconds between SIGTERM and SIGKILL


def main() -> None:
    """Run the command of the arguments, and exit with its code."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(child.pid, number)
                child.wait(GRACE)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

    threading.Thread(target=end_with_parent, daemon=True).start()
    code = child.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # what it has left behind
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
