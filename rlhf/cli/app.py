"""All commands of `rlhf`; libraries that are slow to import are imported when a command runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from rlhf.cli import (
    accelerators,
    bisect,
    chat,
    checkpoints,
    compare,
    evaluate,
    export,
    label,
    profile,
    recipe,
    replay,
    report,
    serve,
    show,
    sweep,
)
from rlhf.cli.options import (
    RUN,
    Options,
    collect_options,
    join_lines,
    parse_stages,
    refuse_options,
    report_interruption,
    shared,
    with_signature,
)
from rlhf.cli.tables import print_line
from rlhf.config.schema import STAGES, Stage
from rlhf.engine import select
from rlhf.errors import USER_ERRORS, ConfigError, RemoteRankError
from rlhf.launchers import local, multinode
from rlhf.launchers.exit_status import INTERRUPTED, ExitStatus
from rlhf.reporting.console import console
from rlhf.runs.checkpoints import resume_from
from rlhf.runs.directory import RunDirectory
from rlhf.trainers.interruption import RunTermination
from rlhf.utils import signals
from rlhf.version import __version__

app = typer.Typer(
    name="rlhf",
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_EXAMPLES = {
    "rlhf": "train the embedded example",
    "rlhf --config recipe.yaml --dry-run": "check files, data, memory",
    "rlhf --config recipe.yaml --output runs/a": "train your recipe",
    "rlhf sft --set sft.epochs=2 --set seed=1": "train one stage",
    "rlhf --stages sft,dpo --output runs/b": "train these stages",
    "rlhf --output runs/a --resume": "resume a run",
    "rlhf checkpoints list runs/a": "see what it can resume from",
    "rlhf --output runs/a --ranks 2": "train in two processes",
    "rlhf show runs/a": "see how a run went or goes",
    "rlhf report runs/a": "write a page that explains it",
    "rlhf doctor runs/a": "check what it has recorded",
    "rlhf export runs/a --to csv": "write tables of its numbers",
    "rlhf chat runs/a": "talk to the trained model",
    "rlhf serve runs/a": "let programs talk to it",
    "rlhf compare runs/a/sft runs/a -R runs/a": "measure what PPO changed",
    "rlhf evaluate runs/a --pairs heldout": "measure the reward model",
    "rlhf data --config recipe.yaml": "see how rows are read",
    "rlhf plan --config recipe.yaml --memory 80GiB": "predict the memory",
    "rlhf profile --config recipe.yaml": "see where the time goes",
    "rlhf replay runs/a --stage ppo --step 40": "compute a step again",
    "rlhf bisect runs/a runs/b": "find where two runs part",
    "rlhf sweep grid.yaml": "train every point of a grid",
    "rlhf config > recipe.yaml": "print a recipe to edit",
    "rlhf config --from-deepspeed-chat run_1.3b.sh": "translate a script",
}
"""Commands and their purposes; a line must fit into 80 columns."""

_HELP = """Train a language model with human feedback: SFT, then a reward model, then PPO.

Without a command, these three stages run, or those of [bold]--stages[/]. Options may come before or after a command."""
_EPILOG = "[bold]Examples[/]\n" + "\n".join(
    f"  [cyan]{command:47}[/]{meaning}" for command, meaning in _EXAMPLES.items()
)
_STAGES: dict[Stage, str] = {
    "sft": "Stage 1: supervised fine-tuning on demonstrations.",
    "reward": """Stage 2: a reward model from preferences.

It starts from the SFT model in the folder, or from [bold]reward.model[/].""",
    "dpo": """DPO: learn from preferences directly, instead of with a reward model and PPO.

It starts from the SFT model in the folder, or from [bold]dpo.model[/], and trains on the reward model's pairs.
[bold]dpo.beta[/] is the weight of the KL to the start model, [bold]dpo.loss[/] the loss: sigmoid, ipo or robust.

PPO can start from its model with [bold]--set ppo.actor=RUN/dpo/model[/].""",
    "ppo": """Stage 3: PPO against the reward model.

It starts from the SFT and reward models in the folder, or from [bold]ppo.actor[/] and [bold]ppo.reward_model[/].
Python functions can add to the model's scores ([bold]ppo.reward_functions[/]), or replace them:
[bold]ppo.reward_weight=0[/].""",
    "distill": """Distillation: a smaller model learns from a larger one, on completions that it draws itself.

The student starts from the SFT model in the folder, or from [bold]distill.model[/]; the teacher is
[bold]distill.teacher[/], a model or a LoRA adapter with the student's tokenizer, or a model on servers
([bold]distill.teacher_servers[/]).
At each token that the student draws it learns the teacher's whole distribution ([bold]distill.divergence[/]: reverse
or forward).""",
}
"""The commands that run one stage, with their help."""


def _print_version(requested: bool) -> None:
    if requested:
        print(f"rlhf {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True, epilog=_EPILOG, help=_HELP)
@shared(*RUN)
def run(
    context: typer.Context,
    options: Options,
    stages: Annotated[
        str | None,
        typer.Option(help="Run only these of sft, reward, dpo, ppo and distill, in this order.", metavar="NAME,..."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", metavar="", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run the stages without a command, or keep the options for the command that follows."""
    if isinstance(sys.stdin, TextIOWrapper):  # invalid bytes must not end a command
        sys.stdin.reconfigure(errors="replace")
    selected = STAGES if stages is None else parse_stages(stages)
    if not context.invoked_subcommand:
        start(context, selected, **vars(options))
        return
    if stages is not None:
        raise ConfigError(f"--stages {stages}: not allowed with a command; leave out `{context.invoked_subcommand}`")
    command = getattr(context.command, "commands", {}).get(context.invoked_subcommand)
    if hasattr(command, "commands"):  # a group, whose commands take none of them
        refuse_options(options, (), context.invoked_subcommand)
    context.obj = options


@report_interruption()
def start(context: typer.Context, stages: tuple[Stage, ...], **values: Any) -> None:
    """Run `stages` with the options `values`: in this process, or in ranks that this process starts."""
    from rlhf.trainers import preflight
    from rlhf.trainers import run as launch

    options = collect_options(context, RUN, values)
    console.quiet = options.quiet and not options.dry_run
    machine = multinode.resolve_node(options.nodes, options.node_rank, options.rendezvous)
    if machine and not options.dry_run:
        first = machine.number == 0
        options = options.with_run_recipe(stages) if first else options
        with _choose_checkpoint(options, stages) if first else nullcontext():
            _start_on_machine(machine, options, stages)
        return
    options = options.with_run_recipe(stages)
    with _choose_checkpoint(options, stages):
        config = options.load_for(() if options.dry_run else stages)  # a dry run calls no reward function
        if local.should_spawn(options.ranks) and not options.dry_run:
            assert options.ranks is not None
            # Mistakes in the command line are reported here, once, and not on every rank.
            pending = preflight.check(config, stages, options.ranks, resume=options.resume, overwrite=options.overwrite)
            if pending:
                select.select_accelerator(config, options.accelerator)
                termination = RunTermination(RunDirectory(config.output), stages)
                _report_end(
                    local.spawn_ranks(options.ranks, local.rank_command(sys.argv[1:]), debug=options.debug), termination
                )
                return
        launch.run(
            config,
            stages=stages,
            accelerator=options.accelerator,
            resume=options.resume,
            overwrite=options.overwrite,
            dry_run=options.dry_run,
            ranks=(options.ranks or 1) * machine.count if machine else options.ranks,
            recipe=options.config,
        )


@contextmanager
def _choose_checkpoint(options: Options, stages: tuple[Stage, ...]) -> Iterator[None]:
    """Let the run of this block resume from the checkpoint of `--resume=step-N`, if it is given.

    Raises:
        RunError: there is no such checkpoint.
    """
    if not options.checkpoint:
        yield
        return
    if options.dry_run:
        raise ConfigError(f"--resume={options.checkpoint}: sets newer checkpoints aside; leave out --dry-run")
    folder = options.output or options.load().output
    with resume_from(RunDirectory(folder), options.checkpoint, stages, print_line):
        yield


def _start_on_machine(machine: multinode.NodeSpec, options: Options, stages: tuple[Stage, ...]) -> None:
    """Start this machine's ranks of a run on several machines. The first machine checks the run for all."""
    from rlhf.trainers import preflight
    from rlhf.trainers import run as launch

    first, count = machine.number == 0, options.ranks or 1
    config = options.load_for(stages)
    timeout = config.engine.timeout
    pending = list(stages)
    with multinode.serve_rendezvous(machine, config.output, timeout) if first else nullcontext():
        if first:
            try:
                ranks = count * machine.count
                pending = preflight.check(config, stages, ranks, resume=options.resume, overwrite=options.overwrite)
                select.select_accelerator(config, options.accelerator)
            except USER_ERRORS as error:
                refusal = ExitStatus.summarize(error)
                with suppress(*USER_ERRORS, RemoteRankError):
                    multinode.join_rendezvous(machine, config.output, count, timeout, refusal=refusal)
                raise
        rendezvous = multinode.join_rendezvous(machine, config.output, count, timeout, is_pending=bool(pending))
    termination = RunTermination(RunDirectory(config.output), stages) if first else None
    outcome = None
    if rendezvous.is_pending:
        command = local.rank_command(sys.argv[1:])
        outcome = local.spawn_ranks(count, command, debug=options.debug, rendezvous=rendezvous)
    elif first:
        launch.run(config, stages=stages)
    with signals.collect_signals():  # as in `rlhf.launchers.rank_monitor`
        verdict = rendezvous.client.conclude(outcome)
    # Each machine says what it saved and how to resume.
    interrupted = outcome and verdict and outcome.code == verdict.code == INTERRUPTED
    _report_end(outcome if interrupted or not verdict else verdict, termination)


def _report_end(outcome: ExitStatus | None, termination: RunTermination | None) -> None:
    """Report how the started ranks ended; the process in charge of the folder also logs it there (`termination`)."""
    if not outcome:
        return
    code = outcome.report()
    if termination:
        termination.conclude(outcome)
    raise typer.Exit(code)


for _stage, _help in _STAGES.items():
    app.command(_stage, help=_help)(with_signature(partial(start, stages=(_stage,)), RUN))
for _command in (
    show.show,
    report.report,
    report.doctor,
    report.runs,
    export.export,
    chat.chat,
    serve.serve,
    compare.compare,
    evaluate.evaluate,
    label.label,
    recipe.config,
    recipe.data,
    recipe.plan,
    profile.profile,
    replay.replay,
    bisect.bisect,
    sweep.sweep,
):
    app.command()(_command)
for _command_info in (
    *app.registered_commands,
    *accelerators.app.registered_commands,
    *checkpoints.app.registered_commands,
):
    _command_info.help = join_lines(_command_info.help or _command_info.callback.__doc__)


app.command("recompute-step", hidden=True)(replay.recompute_step)


@app.command("train", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def _refuse_train() -> None:
    """Point to the command that trains, which other programs call `train`."""
    raise ConfigError(
        "No such command 'train': rlhf trains without one; use `rlhf --config recipe.yaml`, or for one stage "
        "`rlhf sft`, `rlhf reward`, `rlhf dpo`, `rlhf ppo` or `rlhf distill`"
    )


app.add_typer(checkpoints.app, name="checkpoints", short_help="List, verify and remove the checkpoints of a run.")
app.add_typer(accelerators.app, name="accelerators", short_help="Show and check the installed accelerator backends.")
