"""Run stages one after the other, each from the models that earlier ones saved in the run directory.

SFT, reward model and PPO, or SFT and DPO, or distillation: `build_trainer` makes each stage's trainer,
`rlhf.trainers.loop.fit` trains.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import torch

from rlhf.config.paths import WORLD
from rlhf.config.schema import STAGES, Config, Stage
from rlhf.data import toy_world as embedded
from rlhf.data.cache import StageCache
from rlhf.data.load_sources import read_sources
from rlhf.data.stage_dataset import StageData, load_stage
from rlhf.engine import cpu_offload, distributed
from rlhf.engine.select import choose_shapes
from rlhf.errors import DataError, ModelError, OutOfMemory
from rlhf.memory.report import plan_next_stage
from rlhf.models.compatibility import choose_attention
from rlhf.models.tokenizers import find_end_tokens
from rlhf.report.card import write_cards
from rlhf.reporting import verbosity
from rlhf.reporting.console import console, copy_console_to
from rlhf.reporting.recorder import Recorder
from rlhf.reporting.sinks import SinkGroup, describe_stage
from rlhf.roles.base_sharing import identify_bases
from rlhf.roles.model_identity import StartModel, describe_change
from rlhf.roles.roles import ROLES
from rlhf.runs.directory import collect_versions
from rlhf.runs.stage_directory import parse_step
from rlhf.trainers import loop
from rlhf.trainers.context import StageContext
from rlhf.trainers.device_health import DeviceWatch
from rlhf.trainers.distill import DistillTrainer
from rlhf.trainers.dpo import DPOTrainer
from rlhf.trainers.oom import translate_stage_errors
from rlhf.trainers.ppo.exact import exact_numbers
from rlhf.trainers.ppo.trainer import PPOTrainer
from rlhf.trainers.stage_models import ModelFactory, resolve_stage_bases
from rlhf.trainers.supervised import RewardTrainer, SFTTrainer
from rlhf.trainers.teacher_servers import identify_teachers
from rlhf.trainers.trainer import Trainer
from rlhf.utils import manifest, signals
from rlhf.utils.busy_cores import describe_busy_cores
from rlhf.utils.process_info import get_command_line

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from accelerators import Accelerator
    from rlhf.runs.directory import RunDirectory


def run(
    config: Config,
    accelerator: Accelerator,
    directory: RunDirectory,
    stages: Sequence[Stage] = STAGES,
    later: Mapping[Stage, float] = {},
) -> None:
    """Run the stages that are not complete yet.

    Args:
        later: about how long the stages after each stage will take, relative to its own duration, for display.

    Raises:
        RLHFError, AcceleratorError: the user can fix it; the message says how.
    """
    computes_on_host = accelerator.device() == accelerator.host_device()
    if distributed.world().is_main and computes_on_host and (line := describe_busy_cores(torch.get_num_threads())):
        console.print(f"note: {line}", markup=False, soft_wrap=True)
    for stage in stages:
        signals.raise_if_interrupted()  # a library may have swallowed an earlier signal
        if not directory.stage(stage).done:
            with stage_context(stage, config, accelerator, directory) as context, translate_stage_errors(context):
                plan = log_plan(context)
                watch = DeviceWatch(context)
                summary = train(context, later.get(stage, 0.0)) | watch.conclude()
                release_models(context)  # the next stage needs the memory
                finish(context, summary | plan)


@contextmanager
def stage_context(
    stage: Stage, config: Config, accelerator: Accelerator, directory: RunDirectory
) -> Iterator[StageContext]:
    """Yield the context of a stage, with its records started, or continued after the newest checkpoint."""
    verbosity.quiet_imported_libraries()
    world, place = distributed.world(), directory.stage(stage)
    checkpoint = place.latest_checkpoint
    step = parse_step(checkpoint) if checkpoint else None
    sinks = SinkGroup(config.sinks, describe_stage(place, config), config.sinks_timeout)
    title = f"{datetime.now(timezone.utc).isoformat(timespec='seconds')} {get_command_line()}"
    with (
        Recorder(place, enabled=world.is_main, resume_step=step, sink=sinks) as recorder,
        copy_console_to(place.console, title) if world.is_main else nullcontext(),
        exact_numbers(config, stage, accelerator),
    ):
        if step is None and place.started and world.is_main:
            console.print(f"{stage}: its earlier steps were not saved; it starts again", markup=False)
        precision = accelerator.precision(config.precision)
        shapes = choose_shapes(config, accelerator)
        context = StageContext(config, accelerator, precision, shapes, world, directory, place, recorder)
        if config.record_steps:
            recorder.steps.begin(describe_session(context))
        record_models(context)
        with context.exits:
            yield context


def describe_session(context: StageContext) -> dict[str, Any]:
    """Return what `rlhf replay` must know about the process that takes steps."""
    return {
        "config": context.config.model_dump(mode="json"),
        "ranks": context.world.size,
        "precision": context.precision.name,
        "accelerator": context.accelerator.name,
        "device": context.accelerator.info().model,
        "threads": torch.get_num_threads(),
        "versions": collect_versions(),
    }


def record_models(context: StageContext) -> None:
    """Record the content of the models that a stage starts from in `run.json`; every rank calls it.

    Raises:
        ModelError, RunError: as `compare_models`.
    """
    models, stage = compare_models(context), context.directory.name
    with distributed.on_main("recording the models", takes_long=True) as main:
        if main:
            context.run.record_models(stage, {**models, **identify_teachers(context.config, stage)})


def compare_models(context: StageContext) -> Mapping[str, StartModel]:
    """Return the content of the models that a stage starts from, after a comparison with `run.json`.

    Every rank calls it. One rank on each machine reads their files.

    Raises:
        ModelError: a file differs from its manifest, or a model differs between machines.
        RunError: a model differs from the one that the run started with.
    """
    config, stage, models = context.config, context.directory.name, None
    with distributed.on_each_machine("reading the models") as reads:
        if reads:
            models = identify_bases(config, stage, resolve_stage_bases(context))
    gathered = distributed.all_gather_objects((models, manifest.get_known_digests() if reads else {}))
    views = [view for view, _ in gathered if view is not None]
    for _, digests in gathered:
        manifest.add_known_digests(digests)  # other ranks on a machine need not read the files
    compare_machines(views)
    with distributed.on_main("comparing the models") as main:
        if main:  # an earlier stage may have taken days
            context.run.check_models(config, {stage: views[0]})
    return views[0]


def compare_machines(views: Sequence[Mapping[str, StartModel]]) -> None:
    """Raise `ModelError` if the machines, each with a view of the models by key, have different ones.

    A machine that has not downloaded a model yet does not list it.
    """
    for key, model in views[0].items():
        changes = [describe_change(model.identity, view[key].identity) for view in views[1:] if key in view]
        if change := next(filter(None, changes), None):
            raise ModelError(f"{model.path}: differs between machines ({change}); give all machines the same files")


def log_plan(context: StageContext) -> dict[str, Any]:
    """Log how a stage's models are placed and the memory this will take; return the summary's entries about it.

    Raises:
        OutOfMemory: the free memory is less than what the stage keeps all the time.
    """
    config, stage, accelerator = context.config, context.directory.name, context.accelerator
    bases = resolve_stage_bases(context)
    attention = {choose_attention(accelerator, base.path, config.model).name for base in bases}
    start = plan_next_stage(
        config,
        stage,
        accelerator,
        bases,
        ranks=context.world.size,
        fused_attention="eager" not in attention,
    )
    if refusals := list(filter(None, distributed.all_gather_objects(start.refusal))):
        raise OutOfMemory(refusals[0])
    for line in start.lines:
        context.say(line)
    accelerator.reset_peak()
    if line := cpu_offload.describe_offload(context.placements.values(), accelerator):
        context.say(f"{stage}: {line}")
    if (plan := start.plan) is None:
        return {}
    reserve = {"planned_reserve": start.reserved} if start.reserved else {}
    return {"planned_memory": plan.fullest.device, "planned_phase": plan.fullest.name} | reserve


def train(context: StageContext, later: float = 0.0) -> dict[str, Any]:
    """Set a stage up, take its steps, and return its summary; `later` is that of `run` for this stage."""
    trainer = build_trainer(context)
    stage = context.directory.name
    (trained, *_) = ROLES[stage]
    if configuration := context.configuration(trained.name):
        # Not the tokenizer's: a model may have more outputs than it.
        context.health.vocabulary = configuration.get_text_config(decoder=True).vocab_size
    set_up = context.clock.seconds()
    return {**loop.fit(trainer, context, later), "set_up_seconds": set_up}


def build_trainer(context: StageContext) -> Trainer:
    """Load a stage's models and data, and return its trainer."""
    models = ModelFactory(context)
    data = stage_rows(context, models.tokenizer, models.generation_settings)
    if context.directory.name in ("ppo", "distill"):
        on_world = any(dataset.path == WORLD for dataset in context.config.data.datasets)
        trainer = PPOTrainer if context.directory.name == "ppo" else DistillTrainer
        return trainer(context, models, models.tokenizer, data, rule=embedded.is_good_reply if on_world else None)
    supervised = {"sft": SFTTrainer, "reward": RewardTrainer, "dpo": DPOTrainer}[context.directory.name]
    return supervised(context, models, models.tokenizer, data)


def finish(context: StageContext, summary: dict[str, Any]) -> None:
    """Mark a stage as complete, with its duration and memory; every rank calls it."""
    stage = context.directory.name
    if "after" in summary:
        context.warn(summary["steps"], context.health.judge_result(summary["after"]), "heldout_warning")
    peak = max(distributed.all_gather_objects(context.phases.highest_memory()))
    with distributed.on_main(f"finishing {stage}") as main:
        if main:
            took = {"seconds": context.clock.seconds(), "peak_memory": peak, **context.phases.summary()}
            warnings = list(context.health.lines.values())
            title = context.config.title(stage)
            whole = {"stage": stage, "title": title, "ranks": context.world.size, **summary, **took}
            context.directory.finish({**whole, "warnings": warnings})
            try:
                write_cards(context.run.path, stage)
            except Exception as error:  # the stage is complete: nothing about a text may end the run
                context.say(f"note: {stage}: its model cards cannot be written ({error})")


def release_models(context: StageContext) -> None:
    """Return the memory of a stage's models to the device, once its trainer is gone."""
    context.exits.close()  # a thread that still works for it has references
    context.models.clear()
    context.bases.clear()
    gc.collect()  # engines refer to themselves
    context.accelerator.empty_cache()


def stage_rows(
    context: StageContext, tokenizer: PreTrainedTokenizerBase, settings: GenerationConfig | None
) -> StageData:
    """Return the stage's examples, and log how many rows of each source are used; replies end as generation does.

    Raises:
        DataError: a source cannot be read, has no usable row, or differs between machines.
        RunError: the rows differ from those that the run started with.
    """
    config, stage, show = context.config, context.directory.name, context.world.is_main
    ends = find_end_tokens(tokenizer, settings)
    cache = StageCache.of(config, stage, tokenizer, ends)
    if len(set(distributed.all_gather_objects(cache.key))) > 1:
        raise DataError(
            f"{stage}: rows, tokenizers or versions of rlhf differ between ranks; give all machines the same files"
        )
    with distributed.on_each_machine("tokenizing the rows") as builds:
        obstacle = cache.build(show=show) if builds else None
    obstacles = [reason for reason in distributed.all_gather_objects(obstacle) if reason]
    if obstacles:
        context.say(f"note: {stage}: tokenized rows are not cached, and every rank tokenizes them: {obstacles[0]}")
        sources = read_sources(config.data, [stage], seed=config.data_seed, show=show, records=cache.records)
        data = load_stage(config.data, stage, tokenizer, seed=config.data_seed, end_ids=ends, sources=sources)
        data = replace(data, fingerprints=sources.fingerprints())
    else:
        data = cache.load()
    with distributed.on_main("comparing the rows") as main:
        if main:  # an earlier stage may have taken days
            context.run.check_rows(config, data.fingerprints)
    for report in data.reports:
        context.say(str(report))
    return data
