"""The `rlhf` command: thin commands over `rlhf.trainers.run`, and one place where errors become exit codes."""

from __future__ import annotations

import sys
import traceback
from io import TextIOWrapper


def main(*, ends_with_launcher: bool = False) -> None:
    """Entry point of the `rlhf` script.

    Exit codes: 0: done; 2: an error that the user can fix; 3: a check failed, or things differ (`outcome`);
    1: a bug in rlhf; 130: interrupted.

    Args:
        ends_with_launcher: this process is a rank that `rlhf.launchers.local` started.
    """
    from rlhf.utils import signals  # it imports only the standard library

    signals.remember_signals()
    if ends_with_launcher:
        from rlhf.launchers.local import end_with_launcher

        end_with_launcher()
    code = _run_command()
    signals.ignore_signals()
    sys.exit(code)


def _run_command() -> int:
    """Run the command of `sys.argv`, report how it ended, and return its exit code."""
    from rlhf.utils.garbage import collect_nothing_imported

    with collect_nothing_imported():
        from typer.main import get_command

        from rlhf.cli.app import app
    from rlhf.cli.options import split_resume
    from rlhf.launchers.exit_status import INTERRUPTED, ExitStatus
    from rlhf.reporting import verbosity
    from rlhf.reporting.progress import show_hashing
    from rlhf.utils import signals
    from rlhf.utils.printable import make_output_printable
    from rlhf.utils.process_info import set_command_line, strip_local_rank

    if isinstance(sys.stdout, TextIOWrapper):  # a character that the terminal cannot show must not end the command
        sys.stdout.reconfigure(errors="backslashreplace")
    debug = "--debug" in sys.argv
    verbosity.configure_logging(debug=debug)
    with make_output_printable(), show_hashing():
        try:
            with signals.interrupt_on_signals():
                arguments = strip_local_rank(sys.argv[1:])
                set_command_line(arguments)
                code = get_command(app).main(split_resume(arguments), prog_name="rlhf", standalone_mode=False)
                if code == INTERRUPTED:  # Typer returns it, without a line, for a signal outside of a command
                    signals.raise_if_interrupted()
        except (Exception, KeyboardInterrupt) as error:
            if debug:
                traceback.print_exc()
            code = ExitStatus.from_error(error).report()
    return code if isinstance(code, int) else 0
