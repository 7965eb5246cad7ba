"""`rlhf bisect`: the first phase of the first step in which two runs differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf.cli.options import report_interruption
from rlhf.cli.outcome import BAD_RESULT
from rlhf.cli.tables import AsJSON, print_json, print_line

if TYPE_CHECKING:
    from rlhf.replay.bisect import Bisection

Folder = Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")]


@report_interruption()
def bisect(
    first: Folder,
    second: Folder,
    stage: Annotated[
        str | None, typer.Option(help="Only this stage: sft, reward, dpo, ppo or distill.", metavar="NAME")
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(help="Relative difference of metrics and rewards that counts as none.", min=0.0, metavar="X"),
    ] = 0.0,
    records_only: Annotated[
        bool, typer.Option("--records-only", metavar="", help="Only compare records; compute nothing again.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", metavar="", help="Run code of the runs that another user could have written.")
    ] = False,
    as_json: AsJSON = False,
) -> None:
    """Find the first phase of the first step in which two runs differ.

    [bold]rlhf bisect runs/a runs/b[/]

    [bold]rlhf bisect runs/a runs/b --records-only[/]        [dim]# seconds; nothing is computed[/]

    [bold]rlhf bisect runs/a runs/b --tolerance 1e-3[/]      [dim]# runs of two machines, which round in other ways[/]

    First the records of all steps are compared ([bold]steps.bin[/]): rows, drawn tokens, rewards, metrics. Then the
    step that differs is computed again for both runs, as [bold]rlhf replay[/] does, which names the first tensor
    that differs, with its values. Settings, rows, models and versions that differ are listed first.

    Exit code 0: no recorded step differs; 3: one does; 2: an error that you can fix.
    """
    from rlhf.replay.bisect import bisect as search

    result = search(first, second, stage, tolerance=tolerance, computes=not records_only, trust=trust)
    if as_json:
        print_json(_summarize(result))
    else:
        for line in _describe(result):
            print_line(line)
    if result.found:
        raise typer.Exit(BAD_RESULT)


def _summarize(result: Bisection) -> dict[str, Any]:
    found, computed = result.found, result.computed
    summary: dict[str, Any] = {
        "origins": result.origins,
        "not_compared": result.not_compared,
        "steps_compared": result.compared,
        "equal": found is None,
    }
    if found:
        summary |= {"stage": found.stage, "step": found.step, "phase": found.phase, "text": found.text}
    if computed and computed.difference:
        item = computed.difference
        tensor = {"tensor": str(item.entry), "first": item.first, "second": item.second, "change": item.change}
        summary["computed"] = {"step": computed.step, "phase": computed.phase, **tensor}
    return summary | ({"not_computed": result.failure} if result.failure else {})


def _describe(result: Bisection) -> Iterator[str]:
    yield from (f"differs: {line}" for line in result.origins)
    if not result.origins:
        yield "settings, rows, models and versions are the same"
    yield from (f"note: {line}" for line in result.not_compared)
    found, computed = result.found, result.computed
    if not found:
        yield f"no difference in {result.compared:,} steps of {', '.join(result.stages)}"
        return
    yield f"first difference: {found.stage} step {found.step}, {found.phase}: {found.text}"
    if result.failure:
        yield f"the step cannot be computed again ({result.failure}); this is what the records show"
    elif computed:
        for replay in computed.replays:
            if replay.found:
                phase, text = replay.found[0]
                yield f"note: {replay.step.run.path}: computed again, it is not its record ({phase}: {text})"
        if computed.difference:
            yield f"computed again: step {computed.step}, {computed.phase}: {computed.difference}"
        else:
            yield "computed again: no tensor of this step differs"
