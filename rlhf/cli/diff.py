"""`rlhf accelerators diff`: one recipe on two backends in lockstep, or on one backend now and as recorded."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf.cli.options import parse_stages, report_interruption, require_folder
from rlhf.cli.outcome import BAD_RESULT
from rlhf.cli.tables import AsJSON, print_json, print_line
from rlhf.config.schema import STAGES, build_config, load_config
from rlhf.config.trust import admit_code
from rlhf.errors import ConfigError
from rlhf.utils.process_info import current_process

if TYPE_CHECKING:
    from rlhf.lockstep.peers import LiveSide


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Backend that is taken as right.")],
    b: Annotated[
        str | None, typer.Argument(metavar="[B]", help="Backend to compare with it; the same name checks a backend.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Recipe, a YAML file. Default: the embedded example.", metavar="FILE")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Set one key of the recipe. Repeatable.", metavar="KEY=VALUE")
    ] = None,
    stages: Annotated[
        str | None, typer.Option(help="Stages to compare, in their order; default: sft,reward,ppo.", metavar="LIST")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of each stage.", min=1, metavar="N")] = 3,
    operators: Annotated[
        bool,
        typer.Option("--operators", metavar="", help="Judge the operators of each step, not only of one that differs."),
    ] = False,
    bisect: Annotated[
        bool,
        typer.Option(
            "--bisect",
            metavar="",
            help="Compare held-out metrics after all steps too, and search for the step that makes them differ.",
        ),
    ] = False,
    record: Annotated[Path | None, typer.Option(help="Write what A does to this golden file.", metavar="FILE")] = None,
    against: Annotated[
        Path | None, typer.Option(help="Compare A with this golden file, instead of with B.", metavar="FILE")
    ] = None,
    variables_a: Annotated[
        list[str] | None,
        typer.Option("--variable-a", help="Environment variable of A's process. Repeatable.", metavar="NAME=VALUE"),
    ] = None,
    variables_b: Annotated[
        list[str] | None,
        typer.Option("--variable-b", help="Of B's: [bold]--variable-b MODE=1[/].", metavar="NAME=VALUE"),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option("--trust", metavar="", help="Run code of the recipe that another user could have written."),
    ] = False,
    as_json: AsJSON = False,
) -> None:
    """Run one recipe on two backends in lockstep, and name the first operator that is wrong.

    Each step of B starts from A's weights and optimizer, and draws A's completions. The steps are compared by phase:
    rollout, scores, advantages, loss, gradients, update. In the first step with a tensor beyond its band, every
    operator of B is judged, forward, backward and in the optimizer: its result is compared with the same operator in
    float64 on the host, on its own inputs. So the report names the operator that makes the difference, its layer and
    its line, and no operator that passes it on.

    [bold]rlhf accelerators diff cpu NAME --config recipe.yaml[/]       [dim]# is this device right?[/]

    [bold]rlhf accelerators diff cpu cpu[/]                             [dim]# check the comparison itself[/]

    [bold]rlhf accelerators diff NAME NAME --variable-b MODE=1[/]       [dim]# two modes of one backend[/]

    [bold]rlhf accelerators diff NAME --record golden.tar[/]            [dim]# keep what it does now[/]

    [bold]rlhf accelerators diff NAME --against golden.tar[/]           [dim]# and compare with it after an update[/]

    [bold]rlhf accelerators diff cpu NAME --steps 32 --bisect[/]        [dim]# only the evaluation at the end differs[/]

    The bands are measured for each recipe: A repeats each step with every operator perturbed by one rounding. Take a
    small model and short rows: judging an operator costs some milliseconds.

    Exit code 0: equal within the bands; 3: a difference; 2: the comparison could not start.
    """
    if launcher := current_process().launcher:
        raise ConfigError(f"rlhf accelerators diff starts its processes itself; start it without {launcher}")
    if (b is not None) + (against is not None) + (record is not None and b is None) != 1:
        raise ConfigError("rlhf accelerators diff: name A and B, or A with either --record FILE or --against FILE")
    without_b = {"--bisect": bisect, "--variable-b": variables_b, "--operators": operators and not against}
    with_golden = {"--record": record, "--config": config, "--set": overrides, "--stages": stages}
    for options, is_fit, reason in (
        (without_b, b is not None, "needs two backends; name A and B"),
        (with_golden, against is None, f"cannot be used with --against {against}, which has its recipe; leave it out"),
    ):
        if not is_fit and (wrong := next((option for option, value in options.items() if value), "")):
            raise ConfigError(f"{wrong}: {reason}")
    require_folder("--record", record)
    variables = {"A": _parse_variables("--variable-a", variables_a), "B": _parse_variables("--variable-b", variables_b)}
    with report_interruption(), tempfile.TemporaryDirectory(prefix="rlhf-diff-") as temporary, ExitStack() as stack:
        from rlhf.lockstep import driver, reference
        from rlhf.lockstep.peers import live_side
        from rlhf.lockstep.report import format_outcome

        folder = Path(temporary)
        kept = reference.open_golden(against, folder / "golden") if against else None
        if kept:
            wanted, recipe = kept.stages, build_config(kept.facts["settings"])
        else:
            wanted, recipe = parse_stages(stages) if stages else STAGES, load_config(config, overrides or ())
        admit_code([recipe], [file for file in (config, against) if file], wanted, trust=trust)

        def start(end: str, name: str) -> LiveSide:
            chosen = recipe.model_copy(update={"accelerator": name, "output": folder / end / "run"})
            title = f"{end}, {name}" if b else name
            return stack.enter_context(live_side(title, chosen, wanted, folder / end, variables[end]))

        live = start("A", a)
        if kept:
            outcome = driver.run_lockstep(kept, live, wanted, steps, judge_always=operators, say=_say)
        else:
            first = reference.LiveReference(live, folder / "reference")
            if b is None:
                driver.record_steps(first, wanted, steps, say=_say)
            else:
                other = start("B", b)
                outcome = driver.run_lockstep(
                    first, other, wanted, steps, judge_always=operators, bisect=bisect, say=_say
                )
            if record:
                first.write(record)
    if b is None and not kept:
        counts = ", ".join(f"{count} steps of {stage}" for stage, count in first.steps.items())
        print_line(f"recorded {counts} on {a}: {record}")
        return
    if as_json:
        print_json(outcome.to_json())
    else:
        for line in format_outcome(outcome):
            print_line(line)
    if not outcome.is_equal:
        raise typer.Exit(BAD_RESULT)


def _parse_variables(option: str, given: Sequence[str] | None) -> dict[str, str]:
    for text in given or ():
        if not text.partition("=")[0] or "=" not in text:
            raise ConfigError(f"{option} {text}: is no variable; write NAME=VALUE")
    return dict(text.split("=", 1) for text in given or ())


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
