"""`rlhf accelerators check`: run the conformance kit on one backend.

A line appears as each check ends, on standard error; the table, or one JSON document, follows on standard output.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from accelerators import stdout_to_stderr
from rlhf.cli.tables import print_json, print_table

if TYPE_CHECKING:
    from accelerators.testing import Result


def check(
    name: Annotated[str, typer.Argument(help="Backend; auto: the one that a run would take.")],
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="CHECK", help="Run this check alone; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check that a backend keeps the promises of the accelerator interface, on this machine.

    The checks cover discovery, precisions, kernels, memory, random numbers, graph capture, collectives, DeepSpeed at
    every ZeRO stage, and a tiny run of the three stages. A plugin's own tests can inherit the same checks from
    [bold]accelerators.testing.Conformance[/].

    Exit code 0: none failed; 1: at least one failed; 2: they could not be run.
    """
    from accelerators import testing

    def say(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    with stdout_to_stderr():  # a device's software may print as it likes
        results = testing.run(
            name,
            only or (),
            started=lambda check: say(f"{check:24}"),
            finished=lambda result: say(f"{result.result} {result.seconds:.1f} s\n"),
        )
    if as_json:
        print_json([asdict(result) for result in results])
    else:
        print_table(f"Conformance of {name}", ("check", "result", "seconds", "what", "reason"), _rows(results))
    if any(result.result == "failed" for result in results):
        raise typer.Exit(1)


def _rows(results: list[Result]) -> list[tuple[str, ...]]:
    return [(result.check, result.result, f"{result.seconds:.1f}", result.title, result.reason) for result in results]
