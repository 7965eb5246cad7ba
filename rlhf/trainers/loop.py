"""The loop of a stage's steps: `fit` drives a `Trainer`, with its records, evaluations and checkpoints.

It displays and records each step's metrics, stops at a number that is not finite, and resumes from checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlhf.checkpoint import training_state
from rlhf.engine import distributed
from rlhf.engine.metric_sums import Metrics
from rlhf.errors import DivergedError
from rlhf.reporting.progress import progress
from rlhf.trainers.context import StageContext
from rlhf.trainers.evaluation_schedule import EvaluationSchedule
from rlhf.trainers.trainer import Trainer
from rlhf.utils import signals


def fit(trainer: Trainer, context: StageContext) -> dict[str, Any]:
    """Take every step that no checkpoint holds yet, with evaluations before, after and in between.

    Returns:
        The stage's summary: its evaluations, its models, its data.

    Raises:
        DivergedError: a number is not finite; nothing more is written.
        KeyboardInterrupt: a signal arrived; the step was finished and a checkpoint written.
    """
    name, settings, total_steps, unit = context.directory.name, trainer.settings, trainer.total_steps, trainer.unit
    context.directory.check_steps(total_steps)
    schedule = EvaluationSchedule(trainer, context)
    schedule.run(0)
    first = resume_or_seed(trainer, context)
    training = progress(total_steps - first, f"{name}: training", unit="steps", enabled=context.world.is_main)
    with collect_signals() as signals_seen, training as bar:
        if 0 < first < total_steps and schedule.is_due(first):  # the process may have died before it was done
            schedule.run(first)
        for index in range(first, total_steps):
            with measure_step(trainer, context, index) as metrics:
                metrics |= trainer.step(index)
            done = index + 1
            if done % settings.log_every == 0 or done == total_steps:
                context.recorder.log(done, metrics)
                context.commit()
            displayed = {key: metrics[key] for key in trainer.displayed}
            bar.advance(1, **displayed, **{f"{unit}/s": metrics[f"{unit}_per_second"]})
            interrupted = any_rank_signalled(signals_seen, context)
            due = settings.checkpoint_every and done % settings.checkpoint_every == 0
            # After the last step too: the evaluation and the export that follow may fail, or be interrupted.
            if due or interrupted or done == total_steps:
                save_checkpoint(trainer, context, done)
            if interrupted:
                raise KeyboardInterrupt
            if done < total_steps and schedule.is_due(done):
                schedule.run(done)
        if any_rank_signalled(signals_seen, context):  # while the last checkpoint was written
            raise KeyboardInterrupt
    schedule.run(total_steps)
    return schedule.finish() | trainer.summarize()


def resume_or_seed(trainer: Trainer, context: StageContext) -> int:
    """Restore the newest checkpoint, or seed the generators if there is none; return the steps that are done."""
    with context.phases.running("reading a checkpoint"):
        restored = training_state.restore_checkpoint(context.directory, trainer.engines)
    if not restored:
        context.accelerator.seed(_rank_seed(context))
        return 0
    done, state = restored
    trainer.load_state_dict(state["stage"])
    _restore_generators(context, state["rng"], done)
    context.clock.earlier += state["seconds"]
    context.phases.totals.update(state.get("phases", {}))  # checkpoints of earlier versions have none
    context.say(f"{context.directory.name}: resumed after step {done:,}")
    return done


@contextmanager
def measure_step(trainer: Trainer, context: StageContext, index: int) -> Iterator[Metrics]:
    """Measure step `index`, which the block takes and whose metrics it adds to the dictionary that is yielded.

    After the block the dictionary also has the step's duration, rates and memory.

    Raises:
        DivergedError: a metric is not finite, or fp16 cannot hold the gradients at any loss scale.
    """
    phases, unit, engines = context.phases, trainer.unit, trainer.engines
    skipped_before = _skipped_steps(trainer)
    metrics: Metrics = {}
    with phases.step():
        yield metrics
    metrics |= phases.metrics() | {f"{unit}_per_second": metrics[unit] / phases.seconds}
    compilations = context.accelerator.compilations()
    if compilations is not None:
        metrics["compilations"] = float(compilations)
    if context.precision.loss_scaling:
        metrics |= {f"{name}_loss_scale": engine.loss_scale() for name, engine in engines.items()}
        metrics["skipped_steps"] = float(_skipped_steps(trainer) - skipped_before)
    _check_finite(metrics, context, index + 1)
    for name in (name for name, engine in engines.items() if engine.overflows_always):
        raise DivergedError(
            f"{context.directory.name}: gradients of the {name} overflow fp16 at the lowest loss scale at step "
            f"{index + 1} (batch {index}); {_last_checkpoint(context)}; set precision=bf16 or fp32, or lower the "
            "learning rate"
        )


def save_checkpoint(trainer: Trainer, context: StageContext, done: int) -> None:
    """Write the checkpoint of a stage that has done `done` steps."""
    state = {
        "stage": trainer.state_dict(),
        "rng": context.accelerator.rng_state(),
        "seconds": context.clock.seconds(),
        "phases": dict(context.phases.totals),
    }
    with context.phases.running("writing a checkpoint"):
        training_state.save_checkpoint(context.directory, done, trainer.engines, state)
    context.commit()


@contextmanager
def collect_signals() -> Iterator[list[int]]:
    """Yield the list of interrupting signals that have arrived; a second, impatient one interrupts at once."""
    received: list[int] = []

    def receive(number: int) -> None:
        if signals.ends_at_once(received, number):
            raise KeyboardInterrupt
        received.append(number)

    with signals.handle_signals(receive):
        yield received


def any_rank_signalled(received: list[int], context: StageContext) -> bool:
    """Return whether a signal arrived on any rank, so that all stop after the same step."""
    if context.world.size == 1:
        return bool(received)
    return bool(distributed.all_sum(torch.tensor(float(len(received)), device=context.accelerator.device())) > 0)


def _skipped_steps(trainer: Trainer) -> int:
    """Return the optimizer steps that were skipped so far; engines that step together skip together."""
    return max((engine.skipped for engine in trainer.engines.values()), default=0)


def _rank_seed(context: StageContext) -> int:
    """Return a seed that differs between ranks and is the same in every run with this seed."""
    return context.config.seed * 100_003 + context.world.rank


def _restore_generators(context: StageContext, state: dict[str, Any], step: int) -> None:
    """Restore the checkpoint's random generators; if another accelerator wrote them, seed again and say so."""
    current = context.accelerator.rng_state()
    try:
        if current.keys() != state.keys():
            raise KeyError
        context.accelerator.set_rng_state(state)
        fits = True
    except (KeyError, TypeError, ValueError, RuntimeError):  # other generators, or the same in another format
        fits = False
    if all(distributed.all_gather_objects(fits)):
        return
    context.accelerator.seed((_rank_seed(context) + step * 1_000_003) % 2**32)  # not the first step's numbers again
    context.say(
        f"{context.directory.name}: the checkpoint's random numbers are of another accelerator; they continue from the "
        "seed, so this run will not equal an uninterrupted one"
    )


def _check_finite(metrics: Metrics, context: StageContext, step: int) -> None:
    bad = [key for key, value in metrics.items() if not math.isfinite(value)]
    if context.precision.loss_scaling:  # a step whose gradients overflow is skipped, and the scale lowered
        bad = [key for key in bad if not key.endswith("grad_norm")]
    if not bad:
        return
    stage = context.directory.name
    raise DivergedError(
        f"{stage}: {bad[0]} became {metrics[bad[0]]} at step {step} (batch {step - 1}); {_last_checkpoint(context)}; "
        f"lower {stage}.optimizer.learning_rate, or look for extreme rows in that batch"
    )


def _last_checkpoint(context: StageContext) -> str:
    latest = context.directory.latest_checkpoint
    if latest:
        return f"the last good checkpoint is {latest}"
    return f"no checkpoint yet ({context.directory.name}.checkpoint_every)"
