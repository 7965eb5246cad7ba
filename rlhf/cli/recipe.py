"""Commands that read a recipe and train nothing: `rlhf config`, `rlhf data` and `rlhf plan`. No model is loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import accelerators
from rlhf.cli.options import Options, shared, sort_stages
from rlhf.cli.outcome import BAD_RESULT
from rlhf.cli.tables import AsJSON, AsTSV, print_json, print_line, print_table
from rlhf.config.dump import format_recipe
from rlhf.config.schema import EMBEDDED_RECIPE, STAGES, Config
from rlhf.data.report import find_remedy
from rlhf.engine.select import select_accelerator
from rlhf.errors import ConfigError
from rlhf.reporting.console import console
from rlhf.utils.units import format_bytes, parse_bytes

_DEFAULTS = (
    "The default of every key. To start, set model.path (the model to train) and data.datasets (your rows), adapt "
    "max_prompt_length and max_completion_length to the rows and the learning rates to the model. Paths are relative "
    "to the folder of this file."
)
_EXAMPLE = (
    "The embedded example, which `rlhf` runs if no recipe is given. Its values suit its tiny model of "
    "short sentences; start your recipe from `rlhf config`, which prints the defaults."
)
_BORDER = 4  # tokens that are shown on either side of the border of prompt and completion, and at the end

_Stages = Annotated[
    list[str] | None,
    typer.Option("--stage", metavar="STAGE", help="Only this stage: sft, reward, dpo, ppo or distill. Repeatable."),
]


@shared("config", "overrides", "precision", "output", "seed", "debug")
def config(
    options: Options,
    example: Annotated[
        bool, typer.Option("--example", metavar="", help="Print the embedded example's values, not the defaults.")
    ] = False,
    from_deepspeed_chat: Annotated[
        list[str] | None,
        typer.Option(
            "--from-deepspeed-chat",
            metavar="COMMAND",
            help="Translate a DeepSpeed-Chat command line, a script with its arguments, or standard input (-) into a "
            "recipe. Repeatable: several steps make one recipe.",
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(help="With --from-deepspeed-chat: devices, if the command does not say.", min=1, metavar="N"),
    ] = None,
) -> None:
    """Print every key of a recipe with its meaning and its default.

    The output is itself a recipe: [bold]rlhf config > recipe.yaml[/], edit, [bold]rlhf --config recipe.yaml[/].
    Values from [bold]--config[/] and [bold]--set[/] replace the defaults. [bold]--example[/] prints the embedded
    example, which plain [bold]rlhf[/] runs; its values suit only its tiny model.

    [bold]--from-deepspeed-chat[/] prints a recipe that trains like a command line of DeepSpeed-Chat, or of its fork
    with HL_* variables. Comments say what each flag became, or why it has no key; docs/deepspeed-chat.md lists them
    all.

    [bold]rlhf config --from-deepspeed-chat "deepspeed --num_gpus 1 main.py --model_name_or_path facebook/opt-1.3b"[/]

    [bold]rlhf config --from-deepspeed-chat "bash training_scripts/opt/single_node/run_13b.sh out/actor out/critic"[/]
    """
    if from_deepspeed_chat:
        others = (options.config, options.overrides, options.precision, options.output, options.seed)
        if example or any(value is not None for value in others):
            raise ConfigError("--from-deepspeed-chat: prints what the command means; give other options to rlhf later")
        from rlhf.contrib.deepspeed_chat.translate import format_translation, translate_commands

        texts = [sys.stdin.read() if command == "-" else command for command in from_deepspeed_chat]
        _print_recipe(format_translation(translate_commands(texts, os.environ, devices)))
        return
    if devices:
        raise ConfigError("--devices: is for --from-deepspeed-chat; leave it out")
    if example and options.config:
        raise ConfigError("--example and --config: each names a recipe to print; give one of them")
    about = _EXAMPLE if example else _DEFAULTS
    if options.config:
        about = f"{options.config}, and the default of every key that it leaves out. Paths are absolute."
    if options.overrides or (options.precision, options.output, options.seed) != (None, None, None):
        about += " Values from the command line replace these."
    values = (replace(options, config=EMBEDDED_RECIPE) if example else options).load(example=False)
    if options.config:  # its paths are relative to its folder, which need not be that of the printed recipe
        values = Config.model_validate(values.model_dump(mode="json"))
    _print_recipe(format_recipe(values, about))


def _print_recipe(text: str) -> None:
    if console.is_terminal:
        from rich.syntax import Syntax  # imports pygments

        console.print(Syntax(text, "yaml", theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        print(text, end="")


@shared("config", "overrides", "seed", "trust", "debug")
def data(options: Options, stage: _Stages = None, as_json: AsJSON = False) -> None:
    """Show how the rows of a recipe are read, before training on them.

    For each stage and source: how the columns are read, how many rows are used and why others are left out, how many
    tokens prompts and completions have, and one row as the model sees it: where the prompt ends and the completion
    begins, the end token, and which part is learned. A swapped or misread column shows here.

    [bold]rlhf data --config recipe.yaml[/]  ·  [bold]rlhf data --set data.datasets=rows.jsonl --stage reward[/]

    The tokenizer is loaded, but no model; nothing is written. Exit code 2: a stage would have no rows to train on.
    """
    from rlhf.data.preview import describe_stage
    from rlhf.trainers import preflight

    config = options.load_for(())
    descriptions = (
        describe_stage(plan.stage, plan.data, plan.tokenizer, config)
        for plan in preflight.look_at_data(config, sort_stages(stage or STAGES, "--stage"), show=not as_json)
    )
    if as_json:
        print_json(list(descriptions))
        return
    for description in descriptions:  # the stages before one that fails are shown
        _print_data(description, config.title(description["stage"]))


def _print_data(stage: dict[str, Any], title: str) -> None:
    from rlhf.data.preview import describe_prompt_format

    prompts = describe_prompt_format(stage["prompts"])
    total = f"  {stage['train']:,} rows for training, {stage['heldout']:,} held out; prompts: {prompts}"
    console.print()
    print_line((title, "bold"), (total, "dim"))
    for source in stage["sources"]:
        print_line((f"\n  {source['source']}", "cyan"))
        for name, text in _list_facts(stage, source):
            print_line("    ", (f"{name:14}", "dim"), text)


def _list_facts(stage: dict[str, Any], source: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the names and values to print for a source, one a line."""
    facts = [
        ("read as", source["read_as"]),
        ("rows", f"{source['train']:,} for training, {source['heldout']:,} held out"),
    ]
    if source["train"]:  # a held-out source is not divided among the stages
        shares = ":".join(f"{share:g}" for share in stage["split"].values())
        share = f"{source['share']:,} of its {source['rows']:,} rows (data.stage_split {shares})"
        facts.append(("share", share if source["share"] < source["rows"] else f"all of its {source['rows']:,} rows"))
    if source["truncated"]:
        facts.append(("truncated", f"{source['truncated']:,} rows"))
    if source["by_weight"]:
        text = f"uses {source['train']:,} rows for training and leaves out {source['by_weight']:,} usable ones"
        facts.append(("weight", f"{text}; set data.datasets.*.weight=all to use every row"))
    for dropped in sorted(source["dropped"], key=lambda dropped: -dropped["rows"]):
        reason = f"{dropped['rows']:,} {dropped['reason']} (first: {dropped['first']})"
        facts.append(("left out", f"{reason}; {find_remedy(dropped['reason'])}"))
    for part, counts in source["tokens"].items():
        lengths = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        facts.append((part, f"{lengths} tokens (at most {source['limits'][part]:,})"))
    if source["example"]:
        prompt, *completions = source["example"]["parts"]
        facts.append(("example", source["example"]["row"]))
        for part in (prompt, *completions):
            text = part["text"].replace("\n", "\n" + " " * 18)
            facts.append((f"  {part['part']}", f"{text}  [learned]" if part["in_loss"] else text or "(none)"))
        facts += [("  tokens", _format_border(prompt["tokens"], part["tokens"])) for part in completions]
    return facts


def _format_border(prompt: Sequence[str], completion: Sequence[str]) -> str:
    """Format the last tokens before the border and the first after it: `... '<user>' 'Hi' | ' Hello' '!' '<eos>'`."""
    before = [*(["..."] if len(prompt) > _BORDER else []), *map(repr, prompt[-_BORDER:])]
    after = list(map(repr, completion))
    if len(after) > 2 * _BORDER:
        after[_BORDER:-_BORDER] = ["..."]
    return " ".join([*before, "|", *after])


@shared("config", "overrides", "precision", "accelerator", "trust", "debug")
def plan(
    options: Options,
    machine: Annotated[
        str | None,
        typer.Option(
            "--on",
            help="Number and name of devices whose memory, speed and price are known (estimates, with their sources), "
            f"such as 8xa100-80: {', '.join(accelerators.known_device_names())}.",
            metavar="MACHINE",
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="Number of devices, each with one rank. Default: 1.", min=1, metavar="N")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory of each device, e.g. 80GiB. Default: that of the accelerator here.", metavar="SIZE"),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option("--host-memory", help="Memory of the machine with the devices.", metavar="SIZE")
    ] = None,
    stage: _Stages = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            help="Predict hours from the output of rlhf profile --json, or from the speed of a finished run.",
            metavar="PATH",
        ),
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(help="Predict hours from this speed of one device, in TFLOP/s.", min=0.001, metavar="X"),
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Price of one device for an hour, for the cost.", min=0, metavar="X")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="Number of rows that a stage trains on, for hours.", min=1, metavar="N")
    ] = None,
    as_json: AsJSON = False,
    as_tsv: AsTSV = False,
) -> None:
    """Predict the memory of a recipe, by phase, role and kind, and whether it fits, before anything is loaded.

    Models are known by their config.json, or by name: opt-125m ... opt-175b, bloom-7b1, llama-2-7b, pythia-1b and more.
    If a stage does not fit, the report names the cheapest change that makes it fit, the smallest number of devices and
    the largest micro-batch. For [bold]engine.zero_stage=auto[/] it shows the value that a run would choose.

    [bold]rlhf plan --config recipe.yaml --on 8xa100-80 --rows 30000[/]      [dim]# memory, hours and dollars[/]

    [bold]rlhf plan --config recipe.yaml --devices 8 --memory 80GiB[/]

    [bold]rlhf plan --set model.path=llama-2-7b --set lora.rank=8 --memory 24GB --stage ppo[/]

    [bold]rlhf plan --config recipe.yaml --accelerator NAME --measured runs/mine --price 4.13[/]

    [bold]rlhf plan --config recipe.yaml --measured profile.json[/]      [dim]# after rlhf profile --json[/]

    Memory is that of one rank, on its device and on the host. Hours and cost are estimates: docs/memory.md compares
    them with published ones. Nothing is loaded or written. Exit code 0: all stages
    fit; 3: a stage does not fit; 2: an error that you can fix.
    """
    from rlhf.memory.environment import describe_environment, describe_machine, detect_environment, parse_machine
    from rlhf.memory.report import format_hours, report_stage

    stages = sort_stages(stage or STAGES, "--stage")
    config = options.load_for(())
    host_bytes = parse_bytes(host_memory, "--host-memory") if host_memory else None
    if memory and options.accelerator:
        raise ConfigError(
            "--memory and --accelerator: the first describes a device, the second queries one; give one of them"
        )
    device = None
    if machine:
        for option, value in (("--devices", devices), ("--memory", memory), ("--accelerator", options.accelerator)):
            if value is not None:
                raise ConfigError(f"--on and {option}: each describes the devices; give one of them")
        count, device = parse_machine(machine)
        environment = describe_machine(config, count, device, host_bytes)
    elif memory:
        environment = describe_environment(config, devices or 1, parse_bytes(memory, "--memory"), host_bytes)
    else:
        devices = devices or 1
        with accelerators.stdout_to_stderr():  # a device's software may print at any time
            accelerator = select_accelerator(config, options.accelerator).create()
            accelerator.bind(0)
            environment = detect_environment(accelerator, config, devices, local=devices)
        if host_bytes and environment.unified_memory:
            raise ConfigError(f"--host-memory: {accelerator.name} uses the host's memory; leave this option out")
        if host_bytes:
            environment = replace(environment, host_limit=host_bytes // devices)
    reports = [
        report_stage(config, name, environment, device=device, measured=measured, tflops=tflops, price=price, rows=rows)
        for name in stages
    ]
    if as_json:
        print_json(reports)
    else:
        for report in reports:
            _print_plan(report, config.title(report["stage"]), as_tsv)
        if len(reports) > 1 and all("hours" in report for report in reports):
            start = max(report["start_hours"] for report in reports)
            hours = start + sum(report["hours"] for report in reports)
            print_line((f"{'all stages':22}", "dim"), f"{format_hours(hours)}, with the start of the run")
    if not all(report["fits"] for report in reports):
        raise typer.Exit(BAD_RESULT)


def _print_plan(stage: dict[str, Any], title: str, tsv: bool) -> None:
    console.print()
    print_line((title, "bold"), (f"  {stage['verdict']}", "dim"))
    rows = [(phase["phase"], format_bytes(phase["device"]), format_bytes(phase["host"])) for phase in stage["phases"]]
    print_table("memory in each phase", ("phase", "on each device", "on the host, per rank"), rows, tsv=tsv)
    items = [
        (item["role"], item["kind"], format_bytes(item["bytes"]), "host" if item["host"] else "device")
        for item in stage["items"]
        if item["bytes"] >= 2**20
    ]
    print_table(f"memory at the peak: {stage['fullest']}", ("role", "kind", "bytes", "where"), items, tsv=tsv)
    for name, text in stage["advice"].items():
        print_line((f"{name:22}", "dim"), text)
