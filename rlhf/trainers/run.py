"""Run a configuration: check everything that can be checked, select the accelerator, run the stages.

`run` works in this process, alone or as one of the ranks that a launcher (`rlhf.launchers.local`, torchrun) started.
It may be called again, and from any thread.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf.config.schema import STAGES, Config, Stage
from rlhf.data.examples import max_completion_tokens
from rlhf.data.preview import decode_median_row, describe_prompt_format, list_loss_parts, summarize_lengths
from rlhf.engine.select import choose_kernels, select_accelerator
from rlhf.errors import ConfigError, OutOfMemory, RunError
from rlhf.launchers import stacks
from rlhf.models import hub
from rlhf.reporting.console import console
from rlhf.reporting.health import describe_rates
from rlhf.reporting.summary import print_summary
from rlhf.roles.lineage import base_models
from rlhf.runs.description import read_description
from rlhf.runs.directory import RunDirectory
from rlhf.runs.resume import find_first_difference
from rlhf.trainers import preflight
from rlhf.trainers.interruption import RunTermination
from rlhf.utils import file_lock, signals
from rlhf.utils.full_disk import wait_for_room
from rlhf.utils.garbage import collect_nothing_imported
from rlhf.utils.process_info import current_process
from rlhf.version import __version__

if TYPE_CHECKING:
    from accelerators import Accelerator, Selection
    from rlhf.roles.lineage import ResolvedBaseModel
    from rlhf.trainers.preflight import StagePlan

_EMBEDDED = "embedded tiny Llama, from scratch"


def run(
    config: Config,
    *,
    stages: Sequence[Stage] = STAGES,
    accelerator: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    ranks: int | None = None,
    recipe: Path | None = None,
) -> RunDirectory:
    """Run `stages` in this process, which may be one rank of several.

    Everything that can be known beforehand is checked before the first of them; see `rlhf.trainers.preflight`.

    Args:
        accelerator: the backend named on the command line; it overrides that of `config`.
        resume: resume stages that the run directory contains already.
        overwrite: replace them.
        dry_run: check, show what each stage would do, and write nothing.
        ranks: number of ranks that a dry run in one process assumes.
        recipe: the file that `config` comes from, for display.

    Raises:
        RLHFError, AcceleratorError: something that the user can fix; the message says how.
        Interrupted: a signal of `rlhf.utils.signals` arrived.
        InternalError: anything else; its traceback is in the run directory.
    """
    if accelerator:  # recorded, so that a later resume uses the same
        config = config.model_copy(update={"accelerator": accelerator})
    directory = RunDirectory(config.output)
    size = current_process().size if current_process().launcher else ranks or 1
    pending = preflight.check(config, stages, size, resume=resume, overwrite=overwrite, run_code=not dry_run)
    if not pending:
        if current_process().rank == 0:
            with console.loudly():
                console.print(
                    f"{config.output}: {', '.join(stages)} {'is' if len(stages) == 1 else 'are'} complete",
                    soft_wrap=True,
                )
            print_summary([stage.summary() for stage in directory.stages if stage.done], console)
        return directory
    termination = RunTermination(directory, stages)
    with _restore_environment(), signals.tolerate_closed_terminal(), signals.interrupt_on_signals():
        selection = select_accelerator(config, accelerator)
        if current_process().rank == 0:
            _announce(config, selection, stages, pending, recipe)
        request = Request(stages, size, resume, overwrite, dry_run)
        try:
            with termination.report_errors(), _open(config, selection, request, pending) as opened:
                signals.raise_if_interrupted()  # a library may have swallowed one
                if not dry_run:
                    from rlhf.trainers import pipeline  # imports DeepSpeed, which is configured for the device by now

                    with termination.notice_deletion():
                        pipeline.run(opened.config, opened.accelerator, directory, stages, opened.later)
                    if current_process().rank == 0:
                        print_summary([stage.summary() for stage in directory.stages if stage.done], console)
        finally:
            if current_process().rank == 0:
                with signals.collect_signals():  # the run has ended already
                    termination.write_report()
    return directory


@contextmanager
def open_run(
    config: Config,
    stages: Sequence[Stage],
    *,
    accelerator: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Iterator[tuple[Config, Accelerator]]:
    """Prepare and lock a run for code that runs `stages` itself, as `rlhf.api.session` does.

    While the block runs, the folder is locked and the accelerator's environment variables are set; signals are not
    handled. Yields the configuration with each `auto` that the plan resolves, and the accelerator.

    Args:
        config, stages, accelerator, resume, overwrite: as for `run`.

    Raises:
        RLHFError, AcceleratorError: as `run`; or the stages are complete.
    """
    ranks = current_process().size
    pending = preflight.check(config, stages, ranks, resume=resume, overwrite=overwrite)
    if not pending:
        raise RunError(f"{config.output}: {', '.join(stages)} is complete; replace it with overwrite=True")
    request = Request(stages, ranks, resume, overwrite)
    termination = RunTermination(RunDirectory(config.output), stages)
    try:
        with (
            _restore_environment(),
            _open(config, select_accelerator(config, accelerator), request, pending) as opened,
        ):
            yield opened.config, opened.accelerator
    finally:
        if current_process().rank == 0:
            termination.write_report(show=False)


class Request(NamedTuple):
    """The stages to run, on how many ranks, and what to do with the stages that the run's folder contains."""

    stages: Sequence[Stage]
    ranks: int
    resume: bool
    overwrite: bool
    dry_run: bool = False


class OpenRun(NamedTuple):
    """A run whose folder is open: its configuration without `auto`, and its accelerator.

    `later`: about how long the stages after each stage will take, relative to its own duration; on rank 0 only.
    """

    config: Config
    accelerator: Accelerator
    later: dict[Stage, float]


@contextmanager
def _open(config: Config, selection: Selection, request: Request, pending: Sequence[Stage]) -> Iterator[OpenRun]:
    """Connect the ranks, check the run, and open its folder."""
    with ExitStack() as imports, ExitStack() as stack:
        imports.enter_context(collect_nothing_imported())
        # They import torch, which needs the environment that `select_accelerator` has set.
        from rlhf.engine import distributed
        from rlhf.memory.duration import compare_later_stages
        from rlhf.memory.environment import detect_environment

        directory = RunDirectory(config.output)
        later: dict[Stage, float] = {}
        accelerator = stack.enter_context(distributed.start_process_group(selection, timeout=config.engine.timeout))
        # They import DeepSpeed, which knows the device by now.
        from rlhf.checkpoint.training_state import verify_checkpoint
        from rlhf.trainers import pipeline  # noqa: F401  (all that a stage needs)

        imports.close()

        settings = config.model_dump(mode="json")
        if differing := find_first_difference(distributed.all_gather_objects(settings)):
            raise ConfigError(f"ranks were started with different settings: {differing}; start all with the same")
        config = _resolve_auto(config, pending, accelerator, request.ranks)
        choose_kernels(config, accelerator)
        remaining: tuple[str, ...] = ()
        if config.engine.deterministic:  # else the caller's program may have asked torch for it
            remaining = accelerator.deterministic(True)
            stack.callback(accelerator.deterministic, False)
        selection.check_run(accelerator, config.model_dump(mode="json"))
        for stage in () if request.overwrite else pending:
            verify_checkpoint(directory.stage(stage))
        with distributed.on_main("checking the run", takes_long=True) as main:
            if main:
                _print_warnings(preflight.describe_divisions(config, pending))
                _print_warnings([f"engine.deterministic: may still differ: {part}" for part in remaining])
                findings = preflight.examine(
                    *(config, pending, directory, accelerator),
                    ranks=request.ranks,
                    overwrite=request.overwrite,
                    whole=request.dry_run,
                )
                arguments: dict[str, Any] = {
                    "stages": request.stages,
                    "resume": request.resume,
                    "overwrite": request.overwrite,
                    "accelerator": _describe(accelerator, selection, config, findings)
                    | {"deterministic": {"on": config.engine.deterministic, "may_differ": remaining}},
                    "data": findings.data,
                    "models": findings.models,
                }
                if request.dry_run:
                    directory.check(config, **arguments)
                    _print_plans(config, findings, accelerator, request.ranks)
                else:
                    stack.enter_context(directory.open_for(config, **arguments))
                    if directory.remove_stop_file():
                        note = f"note: {directory.stop_file}: removed; it was there before this run"
                        console.print(note, markup=False, soft_wrap=True)
                    stack.callback(directory.remove_stop_file)
                    steps = {plan.stage: plan.steps(config) for plan in findings.plans}
                    with suppress(ConfigError):  # the shape of a model is not known
                        environment = detect_environment(accelerator, config, request.ranks)
                        later = compare_later_stages(config, steps, environment)
                del findings  # frees the rows
        if not request.dry_run:
            timeout = config.engine.timeout / 2 if distributed.world().size > 1 else math.inf
            stack.enter_context(wait_for_room(min(config.engine.disk_wait, timeout), _tell))
            _check_shared(directory)
            if distributed.world().size > 1:
                stack.enter_context(stacks.keep_stacks(directory.path, distributed.world().rank))
        yield OpenRun(config, accelerator, later)


def _tell(line: str) -> None:
    """Print a line about a full disk, which may have no room for a copy of it."""
    copy, console.copy = console.copy, None
    try:
        with console.loudly():
            console.print(line, markup=False, soft_wrap=True)
    finally:
        console.copy = copy


def _resolve_auto(config: Config, pending: Sequence[Stage], accelerator: Accelerator, ranks: int) -> Config:
    """Replace each `auto` of `engine` by the plan's choice, the same on all ranks."""
    from rlhf.engine import distributed
    from rlhf.memory.report import resolve_engine

    directory, resolved = RunDirectory(config.output), config
    with distributed.on_main("planning the run") as main:
        if main:
            started = [stage for stage in pending if directory.stage(stage).started]
            recorded = read_description(directory.description).get("stages", {}).get(started[0], {}) if started else {}
            resolved, line = resolve_engine(config, pending, accelerator, ranks, recorded.get("engine", {}))
            if line:
                console.print(line, markup=False, soft_wrap=True)
    return distributed.all_gather_objects(resolved)[0]


def _check_shared(directory: RunDirectory) -> None:
    """Raise `RunError` if other machines do not see the folder that rank 0 has locked: later stages read from it."""
    from rlhf.engine import distributed

    if current_process().local_size == current_process().size:
        return
    owner = distributed.all_gather_objects(file_lock.read_owner(directory.path))[0]
    views = distributed.all_gather_objects((socket.gethostname(), file_lock.wait_for_owner(directory.path, owner)))
    with distributed.on_main("looking for the run's folder") as main:
        if main and (hosts := list(dict.fromkeys(host for host, shares in views if not shares))):
            raise RunError(
                f"{directory.path}: {', '.join(hosts)} sees a different folder than {views[0][0]}; "
                "choose an --output that all machines share"
            )


def _print_plans(config: Config, findings: preflight.Findings, accelerator: Accelerator, ranks: int) -> None:
    """Print what each stage would do on `ranks` ranks, in a dry run.

    Raises:
        OutOfMemory: a stage would be refused for lack of memory.
    """
    from rlhf.memory.report import plan_next_stage

    fused = all(choice.name != "eager" for choice in findings.attention.values())
    refusals = []
    for plan in findings.plans:
        start = plan_next_stage(
            config,
            plan.stage,
            accelerator,
            plan.bases,
            ranks=ranks,
            fused_attention=fused,
        )
        print_stage(plan, config, start.lines, console)
        refusals += [start.refusal] if start.refusal else []
    if refusals:
        raise OutOfMemory(refusals[0])
    console.print("\nnothing found that would stop this run; nothing was written", markup=False)


def _announce(
    config: Config, selection: Selection, stages: Sequence[Stage], pending: Sequence[Stage], recipe: Path | None
) -> None:
    """Print the run's stages, models, data and accelerator before the first slow import."""
    sources = ", ".join(
        "world (embedded)" if source.path == "world" else source.path for source in config.data.datasets
    )
    facts = {
        "stages": ", ".join(_describe_stage(config, stage, stage in pending) for stage in stages),
        **({"recipe": str(recipe)} if recipe else {}),
        "model": format_base_models(config, pending),
        "data": sources,
        "accelerator": f"{selection.name} ({selection.summary})",
        "output": str(config.output),
    }
    if "ppo" in stages and "reward" in pending and not config.ppo.reward_weight:
        facts["note"] = (
            "ppo.reward_weight is 0: PPO does not use the reward model; `rlhf sft` and `rlhf ppo` train none"
        )
    console.print(f"[bold]rlhf {__version__}[/]")
    for name, value in facts.items():
        console.print(Text.assemble((f"{name:13}", "dim"), value), soft_wrap=True)
    _print_warnings(describe_rates(config, pending))


def _print_warnings(lines: Sequence[str]) -> None:
    for line in lines:
        with console.loudly():
            console.print(Text.assemble((f"{'warning':13}", "bold yellow"), line), soft_wrap=True)


def _describe_stage(config: Config, stage: Stage, pending: bool) -> str:
    notes = [config.title(stage)] if stage == "ppo" and config.title(stage) != "PPO" else []
    notes += [] if pending else ["complete"]
    return f"{stage} ({', '.join(notes)})" if notes else stage


def _describe(
    accelerator: Accelerator, selection: Selection, config: Config, findings: preflight.Findings
) -> dict[str, Any]:
    """Return what `run.json` records about the accelerator."""
    precision = accelerator.precision(config.precision)
    return {
        "name": selection.name,
        "provider": selection.provider,
        "reason": selection.reason,
        "device": asdict(accelerator.info()),
        "health": asdict(accelerator.health()),
        "precision": {"name": precision.name, "reason": precision.reason},
        "capabilities": {name: asdict(support) for name, support in accelerator.kernels.capabilities().items()},
        "attention": {model: asdict(choice) for model, choice in findings.attention.items()},
    }


@contextmanager
def _restore_environment() -> Iterator[None]:
    """Restore the environment and `sys.excepthook` after the block, for the caller's program."""
    environment, hook = dict(os.environ), sys.excepthook
    try:
        with hub.restore_offline_flags():
            os.environ.update(current_process().variables())  # before a runtime that reads them is loaded
            yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        sys.excepthook = hook  # each process group makes it print the rank once more


def format_base_models(config: Config, pending: Sequence[Stage]) -> str:
    """Return one line about the models that the `pending` stages start from, except those that these stages train."""
    models = []
    for ref in (ref for stage in pending for ref in base_models(config, stage)):
        if named := ref.named_in(config):
            models.append(named if ref.key == "model.path" else f"{named} ({ref.key})")
        elif ref.trained_by is None:
            models.append(_EMBEDDED)
        elif ref.trained_by not in pending:
            models.append(f"this run's {ref.trained_by} model")
    return ", ".join(dict.fromkeys(models))


def print_stage(plan: StagePlan, config: Config, memory: Sequence[str], console: Console) -> None:
    """Print what a stage will do; `plan` has all of its rows, `memory` the lines about its memory."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for base in plan.bases:
        table.add_row(base.ref.key, Text(_format_base(base)))
    for line in plan.teachers:
        table.add_row("distill.teacher_servers", Text(line))
    if plan.parameters is not None:
        table.add_row("parameters", f"{plan.parameters:,} in {plan.bases[0].ref.key}")
    for report in plan.data.reports:
        table.add_row("rows", Text(str(report).removeprefix(f"{plan.stage}: ")))
    table.add_row("prompts", Text(describe_prompt_format(plan.data.prompt_format)))
    table.add_row("steps", _format_steps(plan, config))
    for line in memory:
        table.add_row("memory", Text(line.removeprefix(f"{plan.stage}: plan: ")))
    completion = max(max_completion_tokens(row.row, row.prompt_ids, config.data) for row in plan.data.train)
    limits = {"prompt": config.data.max_prompt_length}
    for part, (median, high, longest) in summarize_lengths(plan.data).items():
        allowed = limits.get(part, completion)
        table.add_row(f"{part} tokens", f"median {median}, 95 % up to {high}, longest {longest} (at most {allowed})")
    in_loss = list_loss_parts(plan.data, loss_on=config.sft.loss_on)
    for part, text in decode_median_row(plan.data, plan.tokenizer):
        table.add_row(f"example {part}", Text.assemble(text, ("  (in the loss)" if part in in_loss else "", "dim")))
    console.print()
    console.print(Text(config.title(plan.stage), style="bold"))
    console.print(table)


def _format_base(base: ResolvedBaseModel) -> str:
    path = base.path or _EMBEDDED
    return f"{path}, after {' and '.join(base.through)} of this run" if base.through else path


def _format_steps(plan: StagePlan, config: Config) -> str:
    if plan.stage == "ppo":
        rows, group = config.ppo.batch_size, config.ppo.method.group_size
        rollouts = f"{plan.steps(config):,} rollouts of {rows // group} prompts"
        return rollouts if group == 1 else f"{rollouts}, {group} completions of each"
    section, unit = config.supervised(plan.stage), {"sft": "rows", "distill": "prompts"}.get(plan.stage, "pairs")
    return f"{plan.steps(config):,} of {section.batch_size} {unit}"
