"""The loop of a stage's steps: `fit` drives a `Trainer`, with its records, evaluations and checkpoints.

It displays and records each step's metrics, stops at a number that is not finite, and resumes from checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlhf.checkpoint import training_state
from rlhf.checkpoint.training_state import Checkpoint
from rlhf.engine import distributed
from rlhf.engine.engine import Metrics, NotFiniteError
from rlhf.errors import DivergedError, StepNotTakenError
from rlhf.models.dropout import is_stochastic
from rlhf.reporting.console import console
from rlhf.reporting.progress import progress
from rlhf.reporting.recorder import metric_group
from rlhf.reporting.rules import FINITE_GRADIENTS, LEFT_OUT
from rlhf.roles.roles import model_placements
from rlhf.runs.stage_directory import parse_step
from rlhf.trainers.context import StageContext
from rlhf.trainers.evaluation_schedule import EvaluationSchedule
from rlhf.trainers.not_finite import explain_step
from rlhf.trainers.trainer import Trainer
from rlhf.utils import signals
from rlhf.utils.activity import activity


def fit(trainer: Trainer, context: StageContext, later: float = 0.0) -> dict[str, Any]:
    """Take the steps after the newest checkpoint, with evaluations before, after and in between.

    Args:
        later: about how long later stages will take, relative to all steps of this one, for display.

    Returns:
        The stage's summary: entries about evaluations, models and data.

    Raises:
        DivergedError: a number is not finite; nothing more is written.
        KeyboardInterrupt: a signal or the file STOP asked for it; the step was finished and a checkpoint written.
    """
    name, settings, total_steps, unit = context.directory.name, trainer.settings, trainer.total_steps, trainer.unit
    title = "" if name != "ppo" or context.config.title(name) == "PPO" else f"{context.config.title(name)} "
    context.directory.check_steps(total_steps)
    schedule = EvaluationSchedule(trainer, context)
    schedule.run(0)
    first = resume_or_seed(trainer, context)
    training = progress(
        total_steps - first,
        f"{name}: {title}training",
        unit="steps",
        enabled=context.world.is_main,
        later=later * total_steps,
    )
    # A library may have swallowed an earlier signal.
    with signals.collect_signals(signals.remembered_signals) as signals_seen, training as bar:
        if must_stop(signals_seen, context):
            raise KeyboardInterrupt
        if 0 < first < total_steps and schedule.is_due(first):  # the process may have ended before the evaluation
            schedule.run(first)
        if schedule.over_optimized_since(first) is not None:
            total_steps = first
        for index in range(first, total_steps):
            metrics = take_step(trainer, context, index)
            done = index + 1
            if metrics and is_recorded(trainer, done):
                context.recorder.log(done, metrics)
                context.commit()
            displayed = {key: metrics[key] for key in trainer.displayed if key in metrics}
            bar.advance(1, **displayed, **({f"{unit}/s": metrics[f"{unit}_per_second"]} if metrics else {}))
            interrupted = must_stop(signals_seen, context)
            due = settings.checkpoint_every and done % settings.checkpoint_every == 0
            # After the last step too: the evaluation and the export that follow may fail, or be interrupted.
            if due or interrupted or done == total_steps:
                save_checkpoint(trainer, context, done)
            if interrupted:
                raise KeyboardInterrupt
            if done < total_steps and schedule.is_due(done):
                schedule.run(done)
                if schedule.over_optimized_since(done) is not None:
                    end_early(trainer, context, done, metrics)
                    total_steps = done
                    break
        if must_stop(signals_seen, context):  # while the last checkpoint was written
            raise KeyboardInterrupt
    if total_steps == trainer.total_steps:
        schedule.run(total_steps)
    left_out = {"left_out_steps": context.left_out} if context.left_out else {}
    return schedule.finish(total_steps) | left_out | trainer.summarize()


def take_step(
    trainer: Trainer, context: StageContext, index: int, step: Callable[[int], Metrics] | None = None
) -> Metrics:
    """Take step `index`, by `step` if it is given, and return its metrics; nothing if it was left out.

    `alarms.skip_not_finite` allows that.

    Raises:
        DivergedError: see `measure_step`.
    """
    most, phase = context.config.alarms.skip_not_finite, context.phases.current
    before: dict[str, Any] = {}
    updates = _count_updates(trainer)
    try:
        with measure_step(trainer, context, index) as metrics:
            before = trainer.state_dict() if most else {}
            metrics |= (step or trainer.step)(index)
    except StepNotTakenError as error:
        done, stage = index + 1, context.directory.name
        _record_contents(trainer, context, done, {})
        if len(context.left_out) >= most:
            context.recorder.text("warning", done, str(error), {"rule": FINITE_GRADIENTS, "state": error.reason})
            raise
        context.left_out.append(done)
        context.phases.current = phase
        trainer.load_state_dict(before)
        made = [name for name, count in _count_updates(trainer).items() if count > updates[name]]
        earlier = f", after updates of the {' and the '.join(made)} model" if made else ""
        state = f"step {done} is left out{earlier} ({len(context.left_out)} of at most {most}): {error.reason}"
        line = f"{stage}: warning: {LEFT_OUT}: {state}"
        with console.loudly():
            context.say(line)
        context.recorder.text("warning", done, line, {"rule": LEFT_OUT, "state": state})
        return {}
    _record_contents(trainer, context, index + 1, metrics)
    return metrics


def _count_updates(trainer: Trainer) -> dict[str, int]:
    """Return the number of updates that were made of each model."""
    return {name: engine.steps - engine.skipped for name, engine in trainer.engines.items()}


def _record_contents(trainer: Trainer, context: StageContext, step: int, metrics: Metrics) -> None:
    """Record what a step read and drew on all ranks, and its numbers but those of speed."""
    if context.recorder.steps.is_on:
        ranks = distributed.all_gather_objects(trainer.describe_step())
        context.recorder.steps.write(step, select_repeatable(metrics), ranks)


def select_repeatable(metrics: Metrics) -> Metrics:
    """Return the metrics that a step has again if it is repeated: all but those of speed and memory."""
    return {name: value for name, value in metrics.items() if metric_group(name) != "_speed"}


def is_recorded(trainer: Trainer, step: int) -> bool:
    """Return whether a step's metrics are recorded; the first step and epochs' ends have numbers that others lack."""
    ends_epoch = trainer.epoch_steps is not None and step % trainer.epoch_steps == 0
    return step % trainer.settings.log_every == 0 or step in (1, trainer.total_steps) or ends_epoch


def end_early(trainer: Trainer, context: StageContext, step: int, metrics: Metrics) -> None:
    """Do after `step`, which had these metrics, what is done after the last step."""
    comparison = context.weight_samples.compare()
    judge_metrics(context, step, comparison)
    context.recorder.log(step, comparison if is_recorded(trainer, step) else metrics | comparison)
    latest = context.directory.latest_checkpoint
    if not latest or parse_step(latest) != step:
        save_checkpoint(trainer, context, step)


def judge_metrics(context: StageContext, step: int, metrics: Metrics) -> None:
    """Warn if rules fire.

    Raises:
        DivergedError: an invariant does not hold, and `alarms.stop` is set.
    """
    warnings = context.health.judge_step(step, metrics)
    context.warn(step, warnings)
    broken = next((warning for warning in warnings if warning.rule.is_invariant), None)
    if context.config.alarms.stop and broken:
        context.recorder.log(step, metrics)  # they show why
        stage = context.directory.name
        raise DivergedError(
            f"{stage}: ended by alarms.stop: {broken.line}; {context.directory.describe_last_checkpoint()}"
        )


def resume_or_seed(trainer: Trainer, context: StageContext) -> int:
    """Restore the newest checkpoint, or seed the generators if there is none; return the number of steps taken."""
    with context.phases.running("reading a checkpoint"):
        restored = training_state.restore_checkpoint(context.directory, trainer.engines)
    if not restored:
        context.accelerator.seed(_rank_seed(context))
        return 0
    done, state = restored.step, restored.state
    context.health.load_state_dict(state["health"])
    context.left_out[:] = state["left_out"]
    trainer.load_state_dict(state["stage"])
    reason = _restore_generators(context, restored)
    if reason and any(is_stochastic(engine.module) for engine in trainer.engines.values()):
        context.say(
            f"{context.directory.name}: {reason}: dropout continues from the seed, so this run will not equal an "
            "uninterrupted one"
        )
    context.clock.earlier += state["seconds"]
    context.phases.totals.update(state["phases"])
    context.say(f"{context.directory.name}: resumed after step {done:,}")
    return done


@contextmanager
def measure_step(trainer: Trainer, context: StageContext, index: int) -> Iterator[Metrics]:
    """Measure step `index`, which the block takes; the block adds the step's metrics to the yielded dictionary.

    After the block, the dictionary also has the step's duration, rates and memory.

    Raises:
        StepNotTakenError: the gradients of an update are not finite; earlier updates of the step were taken.
        DivergedError: a metric is not finite, fp16 cannot hold the gradients at any loss scale, or `alarms.stop` is set
            and an invariant does not hold.
    """
    phases, unit, engines = context.phases, trainer.unit, trainer.engines
    activity.stage, activity.step = context.directory.name, index + 1
    skipped_before = _skipped_steps(trainer)
    metrics: Metrics = {}
    samples = context.weight_samples  # taken before the first step
    with phases.step():
        try:
            with context.observation.during(context.directory.name, index + 1):
                yield metrics
        except NotFiniteError as failed:
            raise StepNotTakenError(
                f"the {failed} at step {index + 1} (batch {index}), so its update was not made; "
                f"{explain_step(trainer, context, index + 1, failed)}",
                context.directory.name,
                context.directory.describe_last_checkpoint(),
                failed.engine.placement.rate_key,
            ) from failed
        if index == 0:  # no resumed process repeats it, so records do not depend on where a run resumed
            metrics |= samples.count_unchanged()
        every = context.config.alarms.compare_every
        if index == 0 or index + 1 == trainer.total_steps or (every and (index + 1) % every == 0):
            metrics |= samples.compare()
    metrics |= phases.metrics() | {f"{unit}_per_second": metrics[unit] / phases.seconds}
    metrics |= _count_host_operators(context)
    compilations, fallbacks = context.accelerator.compilations(), context.accelerator.fallbacks
    if compilations is not None:
        metrics["compilations"] = float(compilations)
    if compilations is not None or fallbacks:
        metrics["fallbacks"] = float(len(fallbacks))
    if context.precision.loss_scaling:
        metrics |= {f"{name}_loss_scale": engine.loss_scale() for name, engine in engines.items()}
        metrics["skipped_steps"] = float(_skipped_steps(trainer) - skipped_before)
    _check_finite(metrics, context, index + 1)
    judge_metrics(context, index + 1, metrics)
    for name in (name for name, engine in engines.items() if engine.overflows_always):
        raise DivergedError(
            f"{context.directory.name}: gradients of the {name} overflow fp16 at the lowest loss scale at step "
            f"{index + 1} (batch {index}); {context.directory.describe_last_checkpoint()}; set precision=bf16 or fp32, "
            "or lower the learning rate"
        )


def _count_host_operators(context: StageContext) -> Metrics:
    """Return the number of operators that the device lacks and the host computed; warn once about each."""
    operators = context.accelerator.host_operators()
    for name in operators:
        context.accelerator.report_fallback(
            f"operator {name}", f"the device does not have {name}: the host computes it, and the device waits"
        )
    return {"host_operators": float(sum(operators.values()))} if operators else {}


def save_checkpoint(trainer: Trainer, context: StageContext, done: int) -> None:
    """Write the checkpoint after `done` steps."""
    state = {
        "stage": trainer.state_dict(),
        "seconds": context.clock.seconds(),
        "phases": dict(context.phases.totals),
        "health": context.health.state_dict(),
        "left_out": context.left_out,
    }
    with context.phases.running("writing a checkpoint"):
        random = context.accelerator.rng_state()
        training_state.save_checkpoint(context.directory, done, trainer.engines, state, random)
    context.commit()


def must_stop(received: list[int], context: StageContext) -> bool:
    """Return whether a signal arrived on any rank, or rank 0 finds STOP, so that all ranks stop after the same step."""
    stops = bool(received) or (context.world.is_main and context.run.stop_file.is_file())
    if context.world.size == 1:
        return stops
    accelerator = context.accelerator
    device = accelerator.host_device() if accelerator.collectives_on_host() else accelerator.device()
    return bool(distributed.all_sum(torch.tensor(float(stops), device=device)) > 0)


def _skipped_steps(trainer: Trainer) -> int:
    """Return the optimizer steps that were skipped so far; engines that step together skip together."""
    return max((engine.skipped for engine in trainer.engines.values()), default=0)


def _rank_seed(context: StageContext) -> int:
    """Return the seed of this rank, the same in every run with this configuration."""
    return context.config.seed * 100_003 + context.world.rank


def _restore_generators(context: StageContext, checkpoint: Checkpoint) -> str:
    """Restore the checkpoint's random generators, or seed them if it has others; return why, or an empty string."""
    ranks, reason = context.world.size, ""
    if checkpoint.ranks != ranks:
        reason = f"{checkpoint.ranks} {'rank' if checkpoint.ranks == 1 else 'ranks'} wrote the checkpoint, not {ranks}"
    try:
        if checkpoint.random is None or context.accelerator.rng_state().keys() != checkpoint.random.keys():
            raise KeyError
        context.accelerator.set_rng_state(checkpoint.random)
        fits = True
    except (KeyError, TypeError, ValueError, RuntimeError):  # other generators, or the same in another format
        fits = False
    if not all(distributed.all_gather_objects(fits)):
        reason = reason or "another accelerator wrote the checkpoint"
    if reason:
        # Not the numbers of the first step.
        context.accelerator.seed((_rank_seed(context) + checkpoint.step * 1_000_003) % 2**32)
    return reason


def _check_finite(metrics: Metrics, context: StageContext, step: int) -> None:
    bad = [key for key, value in metrics.items() if not math.isfinite(value)]
    if context.precision.loss_scaling:  # a step whose gradients overflow is skipped, and the scale lowered
        bad = [key for key in bad if not key.endswith("grad_norm")]
    if not bad:
        return
    stage = context.directory.name
    trained, *others = model_placements(context.config, stage).values()
    of_critic = bad[0].startswith(("critic_", "value_"))
    rate_key = next((other.rate_key for other in others if of_critic and other.role.name == "critic"), trained.rate_key)
    raise DivergedError(
        f"{stage}: {bad[0]} became {metrics[bad[0]]} at step {step} (batch {step - 1}); "
        f"{context.directory.describe_last_checkpoint()}; lower {rate_key}, or look "
        "for extreme rows in that batch"
    )
