"""Run a command until it ends or its parent does, however that ends, and delete its folder if the parent was killed.

    python supervisor.py FOLDER COMMAND [ARGUMENTS]

The parent holds the other end of stdin. When that closes, the command and its children are ended. A parent that ends as
it should writes a byte before and deletes the folder itself.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading

GRACE = 30  # seconds between SIGTERM and SIGKILL
POLL = 0.1  # seconds


def main() -> None:
    """Run the command of the arguments, and exit with its code."""
    folder, *command = sys.argv[1:]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(sys.stdin.buffer.read()), daemon=True)
    reader.start()
    while child.poll() is None:
        reader.join(POLL)
        if received:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # what it has left behind
    code = child.wait()
    if received == [b""]:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
