"""`rlhf plan`: what a recipe takes, before anything is loaded, and what to change where it does not fit.

A recipe and a device flow in; tables of bytes by phase, role and kind flow out, with hours and money where asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf.cli.options import Options, shared
from rlhf.cli.tables import print_json, print_table
from rlhf.config.schema import EVERY_STAGE, STAGES, Config, Stage
from rlhf.errors import ConfigError


@shared("config", "overrides", "precision", "accelerator", "debug")
def plan(
    context: typer.Context,
    options: Options,
    devices: Annotated[int, typer.Option(help="How many devices, each with one rank.", min=1, metavar="N")] = 1,
    memory: Annotated[
        str | None, typer.Option(help="Memory of each, e.g. 80GiB. Without: of the accelerator here.", metavar="SIZE")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option("--host-memory", help="Memory of the machine that holds them.", metavar="SIZE")
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option("--stage", metavar="STAGE", help="This stage alone: sft, reward, dpo or ppo. Repeatable."),
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(help="A finished run, whose pace gives hours.", metavar="DIR")
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(help="Million million operations a second of one device, for hours.", min=0.001, metavar="X"),
    ] = None,
    price: Annotated[float | None, typer.Option(help="Money for an hour of one device.", min=0, metavar="X")] = None,
    rows: Annotated[
        int | None,
        typer.Option(help="Rows that a stage passes over, for hours.", min=1, metavar="N"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")] = False,
) -> None:
    """Predict the memory of a recipe before anything is loaded, by phase, role and kind, and whether it fits.

    Models are known by their config.json, or by name: opt-125m ... opt-66b, bloom-7b1, llama-2-7b, pythia-1b and more.
    If a stage does not fit, the cheapest change that makes it fit is named; also the smallest number of devices and the
    largest micro-batch. [bold]engine.zero_stage=auto[/] shows the value that a run would take.

    [bold]rlhf plan --config recipe.yaml --devices 8 --memory 80GiB[/]

    [bold]rlhf plan --set model.path=llama-2-7b --set lora.rank=8 --memory 24GB --stage ppo[/]

    [bold]rlhf plan --config recipe.yaml --accelerator NAME --measured runs/mine --price 4.13[/]

    Memory is that of one rank, on its device and on the host. Nothing is loaded or written. Exit code 0: all stages
    fit; 1: one does not; 2: something has to be corrected first.
    """
    from rlhf.memory.report import report_stage

    stages = _select_stages(stage or STAGES)
    config = options.load()
    environment = _describe_device(config, options, devices, memory, host_memory)
    reports = [
        report_stage(config, name, environment, measured=measured, tflops=tflops, price=price, rows=rows)
        for name in stages
    ]
    if as_json:
        print_json(reports)
    else:
        for report in reports:
            _print_report(report)
    if not all(report["fits"] for report in reports):
        raise typer.Exit(1)


def _select_stages(names: Sequence[str]) -> list[Stage]:
    for name in names:
        if name not in EVERY_STAGE:
            raise ConfigError(f"--stage {name}: no such stage; use one of {', '.join(EVERY_STAGE)}")
    return [stage for stage in EVERY_STAGE if stage in names]


def _describe_device(config: Config, options: Options, devices: int, memory: str | None, host: str | None) -> Any:
    from rlhf.memory.environment import describe_environment, detect_environment
    from rlhf.utils.units import parse_bytes

    host_bytes = parse_bytes(host, "--host-memory") if host else None
    if memory:
        if options.accelerator:
            raise ConfigError(
                "--memory and --accelerator: the first describes a device, the second queries one; give one of them"
            )
        return describe_environment(config, devices, parse_bytes(memory, "--memory"), host_bytes)
    from accelerators import stdout_to_stderr
    from rlhf.engine.select import select_accelerator

    with stdout_to_stderr():  # a device's software may print as it likes
        accelerator = select_accelerator(config, options.accelerator).create()
        accelerator.bind(0)
        return detect_environment(accelerator, config, devices, local=devices)


def _print_report(stage: dict[str, Any]) -> None:
    from rich.text import Text

    from rlhf.reporting.console import console
    from rlhf.reporting.summary import STAGE_NAMES
    from rlhf.utils.units import format_bytes

    console.print()
    console.print(
        Text.assemble((STAGE_NAMES[stage["stage"]], "bold"), (f"  {stage['verdict']}", "dim")), soft_wrap=True
    )
    rows = [(phase["phase"], format_bytes(phase["device"]), format_bytes(phase["host"])) for phase in stage["phases"]]
    print_table("at each phase", ("phase", "on each device", "on the host, of a rank"), rows)
    items = [
        (item["role"], item["kind"], format_bytes(item["bytes"]), "host" if item["host"] else "device")
        for item in stage["items"]
        if item["bytes"] >= 2**20
    ]
    print_table(f"at the fullest: {stage['fullest']}", ("role", "kind", "bytes", "where"), items)
    for name, text in stage["advice"].items():
        console.print(Text.assemble((f"{name:22}", "dim"), text), soft_wrap=True)
