"""`rlhf bisect`: the first phase of the first step in which two runs differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf.cli.options import report_interruption
from rlhf.cli.replay import DIFFERENT
from rlhf.cli.tables import AsJSON, print_json, print_line
from rlhf.errors import RLHFError

Folder = Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")]


@report_interruption()
def bisect(
    first: Folder,
    second: Folder,
    stage: Annotated[str | None, typer.Option(help="Only this stage: sft, reward, dpo or ppo.", metavar="NAME")] = None,
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
    from rlhf.replay import bisect as search

    stages = search.list_common_stages(first, second, stage)
    origins = search.compare_origins(first, second, stages)
    found, compared = search.find_first_difference(first, second, stages, tolerance)
    computed, failure = None, ""
    if found and not records_only:
        try:
            computed = search.compute_difference(first, second, found, trust=trust)
        except RLHFError as error:
            failure = search.explain_failure(error)
    if as_json:
        print_json(_summarize(origins, found, compared, computed, failure))
    else:
        _print(origins, found, compared, computed, failure, stages)
    if found:
        raise typer.Exit(DIFFERENT)


def _summarize(origins: Any, found: Any, compared: int, computed: Any, failure: str) -> dict[str, Any]:
    summary: dict[str, Any] = {"origins": origins.lines, "steps_compared": compared, "equal": found is None}
    if found:
        summary |= {"stage": found.stage, "step": found.step, "phase": found.phase, "text": found.text}
    if computed and computed.difference:
        item = computed.difference
        tensor = {"tensor": str(item.entry), "first": item.first, "second": item.second, "change": item.change}
        summary["computed"] = {"phase": computed.phase, **tensor}
    return summary | ({"not_computed": failure} if failure else {})


def _print(origins: Any, found: Any, compared: int, computed: Any, failure: str, stages: Any) -> None:
    for line in origins.lines:
        print_line(f"differs: {line}")
    if not origins.lines:
        print_line("settings, rows, models and versions are the same")
    if not found:
        print_line(f"no difference in {compared:,} steps of {', '.join(stages)}")
        return
    print_line(f"first difference: {found.stage} step {found.step}, {found.phase}: {found.text}")
    if failure:
        print_line(failure)
    elif computed:
        for replay in computed.replays:
            if replay.found:
                phase, text = replay.found[0]
                print_line(f"note: {replay.step.run.path}: computed again, it is not its record ({phase}: {text})")
        if computed.difference:
            print_line(f"computed again: {computed.phase}: {computed.difference}")
        else:
            print_line("computed again: no tensor of this step differs")
