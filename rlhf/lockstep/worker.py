"""A backend's process: `python -m rlhf.lockstep.worker DESCRIPTOR`, which answers calls of `rlhf.lockstep.peers`.

Each call names a method of `Side`; its result, or the line of its error, is the answer.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import accelerators
from rlhf.config.schema import Config, Stage


def serve(config: Config, stages: list[Stage], connection: Connection) -> None:
    """Open a run of `stages` on the configuration's backend, and answer calls until the other end closes."""
    from rlhf.trainers import run as launch

    with ExitStack() as stack:
        resolved, accelerator = stack.enter_context(
            launch.open_run(config, stages, accelerator=config.accelerator, overwrite=True)
        )
        from rlhf.lockstep.side import Side  # imports DeepSpeed, which `open_run` has configured for the device

        side = Side(resolved, accelerator)
        _send(connection, {"result": side.describe()})
        while True:
            try:
                method, args, options = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            _send(connection, {"result": getattr(side, method)(*args, **options)})


def _send(connection: Connection, answer: dict[str, Any]) -> None:
    connection.send_bytes(pickle.dumps(answer))  # not `send`, with which torch would share memory


def main() -> None:
    """Serve the driver at the other end of the pipe whose descriptor is on the command line."""
    from rlhf.launchers.exit_status import ExitStatus
    from rlhf.reporting import verbosity

    verbosity.configure_logging(debug=False)
    with Connection(int(sys.argv[1])) as connection, accelerators.stdout_to_stderr():
        try:
            config, stages = pickle.loads(connection.recv_bytes())
            serve(config, stages, connection)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            status = ExitStatus.summarize(error)
            _send(connection, {"error": status.line.removeprefix("rlhf: error: "), "code": status.code})
            sys.exit(status.code)


if __name__ == "__main__":
    main()
