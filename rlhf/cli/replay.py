"""`rlhf replay`: a recorded step computed again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf.cli.options import report_interruption, require_folder
from rlhf.cli.outcome import BAD_RESULT
from rlhf.cli.tables import AsJSON, print_json, print_line
from rlhf.utils.atomic_io import atomic_write_json

if TYPE_CHECKING:
    from rlhf.replay.recording import TensorDifference
    from rlhf.replay.replay import Replay


@report_interruption()
def replay(
    run: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")],
    step: Annotated[int, typer.Option(help="Step to compute again, from 1.", min=1, metavar="N")],
    stage: Annotated[
        str | None, typer.Option(help="Its stage: sft, reward, dpo, ppo or distill.", metavar="NAME")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(help="Compute the step with another setting too; repeatable.", metavar="KEY=VALUE"),
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="File for digests and samples of all tensors, as JSON.", metavar="FILE")
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", metavar="", help="Run code of the run that another user could have written.")
    ] = False,
    as_json: AsJSON = False,
) -> None:
    """Compute a recorded step of a run again, bit for bit, and say if it equals the record.

    [bold]rlhf replay runs/a --stage ppo --step 40[/]                     [dim]# is it what the run recorded?[/]

    [bold]rlhf replay runs/a --stage ppo --step 40 --record s40.json[/]   [dim]# keep all of its tensors' digests[/]

    [bold]rlhf replay runs/a --stage sft --step 7 --change sft.optimizer.learning_rate=1e-4[/]

    The steps since the nearest checkpoint before it (a complete stage has none: since its beginning) are computed
    first, with the completions that the run drew. [bold]--change[/] says what another setting would have moved in
    this one step: the first phase (rows, rollout, scores, advantages, loss, gradients, update), and by how much.
    Nothing is written into the run's folder.

    Exit code 0: the step equals its record, or with [bold]--change[/] nothing moves; 3: it differs; 2: an error
    that you can fix.
    """
    from rlhf.replay import replay as replays

    require_folder("--record", record)
    found = replays.find_step(run, step, stage)
    differences: list[TensorDifference] = []
    changed = None
    if change:
        result, changed, differences = replays.replay_with_changes(found, change, trust=trust)
    else:
        result = replays.replay(found, trust=trust)
    if record:
        content = {"run": str(run), "stage": found.stage.name, "step": step, "tensors": _list(result)}
        atomic_write_json(record, content | ({"changed": _list(changed)} if changed else {}))
    different = bool(result.found or differences)
    if as_json:
        print_json(_summarize(result, differences, bool(change)))
    else:
        _print(result, differences, change or [], record)
    if different:
        raise typer.Exit(BAD_RESULT)


def _list(result: Replay) -> list[dict[str, Any]]:
    return [entry._asdict() for entry in result.entries]


def _summarize(result: Replay, differences: Sequence[TensorDifference], is_changed: bool) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "stage": result.step.stage.name,
        "step": result.step.record.step,
        "from": str(result.step.checkpoint or "the beginning"),
        "equal": not result.found,
        "rounding": result.rounding,
        "different": [{"phase": phase, "text": text} for phase, text in result.found],
        "not_taken": result.not_taken,
        "metrics": result.metrics,
    }
    if is_changed:
        moved = [{"phase": item.entry.phase, "tensor": str(item.entry), "change": item.change} for item in differences]
        summary["moved"] = moved
    return summary


def _print(result: Replay, differences: Sequence[TensorDifference], change: Sequence[str], record: Path | None) -> None:
    found, name = result.step, result.step.stage.name
    start = found.checkpoint.name if found.checkpoint else "the stage's beginning"
    print_line(f"{name} step {found.record.step}: computed from {start}, {len(result.entries):,} tensors")
    if result.rounding:
        print_line(f"note: another machine ({result.rounding}): numbers are compared within rounding")
    if result.not_taken:
        print_line(f"the step is not taken: {result.not_taken}")
        for path in result.kept:
            print_line(f"the run kept its rows in {path}")
    if result.found:
        phase, text = result.found[0]
        print_line(f"differs from the record, first in {phase}: {text}")
        for phase, text in result.found[1:10]:
            print_line(f"  then {phase}: {text}")
    else:
        metrics = f"{len(found.record.metrics)} metrics" if found.record.metrics else "no metrics (it was not taken)"
        how = "within rounding" if result.rounding else "bit for bit"
        print_line(f"equals the record {how}: rows, drawn tokens, {metrics}")
    if change:
        _print_changes(differences, change, result)
    if record:
        print_line(f"tensors: {record}")


def _print_changes(differences: Sequence[TensorDifference], change: Sequence[str], result: Replay) -> None:
    settings = ", ".join(change)
    if not differences:
        print_line(f"with {settings}: nothing moves in this step")
        return
    first = differences[0]
    print_line(f"with {settings}: the first phase that moves is {first.entry.phase}")
    for phase in dict.fromkeys(entry.phase for entry in result.entries):
        moved = [item for item in differences if item.entry.phase == phase]
        count = sum(entry.phase == phase for entry in result.entries)
        if moved:
            most = max(moved, key=lambda item: item.change)
            print_line(f"  {phase}: {len(moved):,} of {count:,} tensors; most: {most}")
        else:
            print_line(f"  {phase}: nothing")


@report_interruption()
def recompute_step(job: Annotated[Path, typer.Argument(help="File of the job.")]) -> None:
    """Compute the step of a job; `rlhf replay` starts it, once for each rank."""
    from rlhf.replay.worker import recompute

    recompute(job)
