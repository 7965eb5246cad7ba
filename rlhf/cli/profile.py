"""`rlhf profile`: where the time of a stage's steps goes, by phase and by operator, with a trace to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf.cli.options import Options, shared
from rlhf.cli.tables import print_json, print_table, route_notes_to_stderr
from rlhf.config.schema import EVERY_STAGE
from rlhf.errors import ConfigError

_SHOWN = 15  # operators


@shared("config", "overrides", "accelerator", "precision", "output", "seed", "debug")
def profile(
    context: typer.Context,
    options: Options,
    stage: Annotated[str, typer.Option(metavar="STAGE", help="sft, reward, dpo or ppo.")] = "ppo",
    steps: Annotated[int, typer.Option(help="Steps that are measured.", min=1, metavar="N")] = 3,
    trace: Annotated[Path, typer.Option(help="File for the trace of one more step.", metavar="FILE")] = Path(
        "trace.json.gz"
    ),
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON, with every operator.")] = False,
) -> None:
    """Run a few steps of a stage in one process, and tell where the time went: by phase and by operator.

    A first step is taken, which compiles and allocates, then those that are measured, then one that is recorded: open
    the trace in https://ui.perfetto.dev or chrome://tracing. A stage that would end before takes more steps. Nothing
    else is left behind but tokenized rows, which runs share; the run in [bold]--output[/] is only read: its SFT and
    reward model are what PPO starts from. Where it has none, each of these stages takes one step first, in a temporary
    folder: then lengths of completions are those of an untrained model.

    [bold]rlhf profile --config recipe.yaml[/]                    [dim]# a PPO step[/]

    [bold]rlhf profile --output runs/mine --steps 10[/]           [dim]# of a run, with its own settings and models[/]

    [bold]rlhf profile --config recipe.yaml --stage sft --set sft.micro_batch_size=4 --json[/]

    Seconds are those of steps without the profiler; operators' shares are of the recorded step. TFLOP/s count the
    models' matrix products over real tokens alone (docs/metrics.md). Exit code 2: something has to be mended.
    """
    if stage not in EVERY_STAGE:
        raise ConfigError(f"--stage {stage}: no such stage; use one of {', '.join(EVERY_STAGE)}")
    (wanted,) = (known for known in EVERY_STAGE if known == stage)
    config = options.with_run_recipe((wanted,)).load()
    if options.accelerator:
        config = config.model_copy(update={"accelerator": options.accelerator})
    with route_notes_to_stderr(as_json):
        from rlhf.cli import profiler

        found = profiler.profile(config, wanted, steps=steps, trace=trace)
    if as_json:
        print_json(found)
    else:
        _print(found)


def _print(found: dict[str, Any]) -> None:
    from rich.text import Text

    from rlhf.reporting.console import console
    from rlhf.reporting.summary import STAGE_NAMES
    from rlhf.utils.units import format_bytes

    seconds = found["step_seconds"]
    mean = sum(seconds) / len(seconds)
    speed = [_speed(found), f"{format_bytes(found['peak_memory'])} peak"]
    lines = [
        f"set-up {_seconds(found['set_up_seconds'])}, first step {_seconds(found['first_step_seconds'])}, then "
        f"{len(seconds)} of {_seconds(mean)} each ({_seconds(min(seconds))} to {_seconds(max(seconds))})",
        " · ".join(filter(None, speed)),
    ]
    where = f"  one process on {found['accelerator']} ({found['device']}), {found['precision']}"
    console.print()
    console.print(Text.assemble((STAGE_NAMES[found["stage"]], "bold"), (where, "dim")), soft_wrap=True)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True, highlight=False)
    rows = [
        (
            phase["phase"],
            _seconds(phase["seconds"]),
            _percent(phase["share"]),
            _number(phase.get("tflops")),
            _number(phase.get("tokens_per_second")),
        )
        for phase in found["phases"]
    ]
    print_table("by phase, of a step", ("phase", "time", "share", "TFLOP/s", "tokens/s"), rows)
    whole, operators = found["traced_seconds"], found["operators"]
    shown, rest = operators[:_SHOWN], operators[_SHOWN:]
    listed = [
        (each["name"], each["phase"], _seconds(each["seconds"]), _percent(each["share"]), f"{each['calls']:,}")
        for each in shown
    ]
    left = sum(each["seconds"] for each in rest)
    listed.append((f"({len(rest):,} others)", "", _seconds(left), _percent(left / whole), ""))
    idle = found["outside_operators"]
    nothing = "(nothing on the device)" if found["on_device"] else "(Python, between operators)"
    listed.append((nothing, "", _seconds(idle), _percent(idle / whole), ""))
    what = "kernel" if found["on_device"] else "operator"
    print_table(
        f"by {what}, of a recorded step of {_seconds(whole)}", (what, "phase", "time", "share", "calls"), listed
    )
    console.print(
        f"trace: {found['trace']} (open it in https://ui.perfetto.dev or chrome://tracing)",
        markup=False,
        soft_wrap=True,
        highlight=False,
    )


def _speed(found: dict[str, Any]) -> str:
    share = f" ({_percent(found['peak_share'])} of the device's peak)" if "peak_share" in found else ""
    return f"{_number(found['tflops'])} TFLOP/s{share}" if "tflops" in found else ""


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _number(value: float | None) -> str:
    return "" if value is None else f"{float(f'{value:.3g}'):,g}"
