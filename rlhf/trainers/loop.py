"""The loop of a stage's steps, with its records and checkpoints, and sums over held-out rows.

A stage hands `run_steps` a function that does one step and returns numbers; the loop shows and records
them, stops at a number that is not finite, writes checkpoints and resumes from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.checkpoint import training_state
from rlhf.config.schema import TrainingConfig
from rlhf.data.batches import Batches
from rlhf.engine import distributed
from rlhf.engine.engine import Batch, TrainingEngine
from rlhf.engine.metric_sums import Metrics, MetricSums
from rlhf.errors import DivergedError
from rlhf.reporting.progress import progress
from rlhf.trainers.context import StageContext
from rlhf.trainers.evaluation_schedule import Evaluations, Found
from rlhf.utils import signals


def run_steps(
    context: StageContext,
    *,
    total_steps: int,
    step: Callable[[int], Metrics],
    engines: dict[str, TrainingEngine],
    settings: TrainingConfig,
    unit: str,
    shown: tuple[str, ...],
    measure: Callable[[str], Found] = lambda when: Found({}),
    leave: Callable[[Path], None] = lambda folder: None,
    epoch: int | None = None,
    save_state: Callable[[], dict[str, Any]] = dict,
    load_state: Callable[[dict[str, Any]], None] = lambda state: None,
) -> dict[str, Any]:
    """Run `step(index)` for every step that no checkpoint holds yet, with evaluations before, after and in between.

    Args:
        step: one step; returns numbers that are the same on all ranks. One of them, `unit`, counts what the
            step worked on and gives the rate. All are recorded; `shown` appear in the progress display.
        measure, leave, epoch: see `Evaluations`.
        save_state, load_state: the stage's own numbers that a checkpoint must carry.

    Returns:
        What the stage's summary says of its evaluations and of the model that is left.

    Raises:
        DivergedError: a number is not finite; nothing more is written.
        KeyboardInterrupt: a signal arrived; the step was finished and a checkpoint written.
    """
    name = context.directory.name
    context.directory.check_steps(total_steps)
    if context.trial:
        begin(context, engines, load_state)
        context.trial(context, lambda index: measured(context, index, step, engines, unit))
    evaluations = Evaluations(context, settings, total_steps, measure=measure, leave=leave, epoch=epoch, shown=shown)
    evaluations.take(0)
    first = begin(context, engines, load_state)
    training = progress(total_steps - first, f"{name}: training", unit="steps", enabled=context.world.is_main)
    with ending_signals() as arrived, training as bar:
        if 0 < first < total_steps and evaluations.due(first):  # the process may have died before it was done
            evaluations.take(first)
        for index in range(first, total_steps):
            numbers, done = measured(context, index, step, engines, unit), index + 1
            if done % settings.log_every == 0 or done == total_steps:
                context.recorder.log(done, numbers)
                context.commit()
            bar.advance(1, **{key: numbers[key] for key in shown}, **{f"{unit}/s": numbers[f"{unit}_per_second"]})
            interrupted = anywhere(arrived, context)
            due = settings.checkpoint_every and done % settings.checkpoint_every == 0
            # After the last step too: the evaluation and the export that follow may fail, or be interrupted.
            if due or interrupted or done == total_steps:
                save(context, done, engines, save_state)
            if interrupted:
                raise KeyboardInterrupt
            if done < total_steps and evaluations.due(done):
                evaluations.take(done)
        if anywhere(arrived, context):  # while the last checkpoint was written
            raise KeyboardInterrupt
    evaluations.take(total_steps)
    return evaluations.finish()


def begin(
    context: StageContext, engines: dict[str, TrainingEngine], load_state: Callable[[dict[str, Any]], None]
) -> int:
    """Go on from the newest checkpoint, or seed the generators where there is none; gives the steps that are done."""
    with context.phases.running("reading a checkpoint"):
        restored = training_state.restore_checkpoint(context.directory, engines)
    if not restored:
        context.accelerator.seed(_rank_seed(context))
        return 0
    done, state = restored
    load_state(state["stage"])
    _restore_generators(context, state["rng"], done)
    context.clock.earlier += state["seconds"]
    context.phases.totals.update(state.get("phases", {}))  # checkpoints of earlier versions have none
    context.say(f"{context.directory.name}: resumed after step {done:,}")
    return done


def measured(
    context: StageContext, index: int, step: Callable[[int], Metrics], engines: dict[str, TrainingEngine], unit: str
) -> Metrics:
    """The numbers of `step(index)`, with those that say how fast it was and what it took; see `run_steps`.

    Raises:
        DivergedError: one of them is not finite, or fp16 cannot hold the gradients whatever the loss scale.
    """
    phases, skipped = context.phases, _skipped(engines)
    with phases.step():
        numbers = step(index)
    numbers |= phases.metrics() | {f"{unit}_per_second": numbers[unit] / phases.seconds}
    compilations = context.accelerator.compilations()
    if compilations is not None:
        numbers["compilations"] = float(compilations)
    if context.precision.loss_scaling:
        numbers |= {f"{name}_loss_scale": engine.loss_scale() for name, engine in engines.items()}
        numbers["skipped_steps"] = float(_skipped(engines) - skipped)
    _check_finite(numbers, context, index + 1)
    for name in (name for name, engine in engines.items() if engine.overflows_always):
        raise DivergedError(
            f"{context.directory.name}: gradients of the {name} overflow fp16 at the lowest loss scale at step "
            f"{index + 1} (batch {index}); {_kept(context)}; set precision=bf16 or fp32, or lower the learning rate"
        )
    return numbers


def save(
    context: StageContext, done: int, engines: dict[str, TrainingEngine], save_state: Callable[[], dict[str, Any]]
) -> None:
    """Write the checkpoint of a stage that has done `done` steps."""
    own = {"stage": save_state(), "rng": context.accelerator.rng_state(), "seconds": context.clock.seconds()}
    own["phases"] = dict(context.phases.totals)
    with context.phases.running("writing a checkpoint"):
        training_state.save_checkpoint(context.directory, done, engines, own)
    context.commit()


@torch.no_grad()
def sum_over(
    context: StageContext,
    engine: TrainingEngine,
    held_out: Batches,
    what: str,
    statistics: Callable[[nn.Module, Batch], dict[str, Tensor]],
) -> Metrics:
    """Sums of `statistics(model, batch)` over the held-out batches of all ranks; `what` is shown meanwhile."""
    name = context.directory.name
    engine.engine.eval()
    sums = MetricSums()
    bars = progress(held_out.rows, f"{name}: {what}", enabled=context.world.is_main)
    with context.phases.running("evaluation"), bars as bar:
        for index in range(len(held_out)):
            for batch in held_out.step(index):
                batch = context.accelerator.to_device(batch)
                with context.precision.autocast():
                    found = statistics(engine.engine, batch)
                context.accelerator.step_boundary(f"{name}/evaluate")
                sums.add(**found)
            bar.advance(len(held_out.examples(index)))
    return sums.read()


@contextmanager
def ending_signals() -> Iterator[list[int]]:
    """The signals to end that have arrived; an impatient one ends at once."""
    arrived: list[int] = []

    def receive(number: int) -> None:
        if signals.ends_at_once(arrived, number):
            raise KeyboardInterrupt
        arrived.append(number)

    with signals.handle_signals(receive):
        yield arrived


def _skipped(engines: dict[str, TrainingEngine]) -> int:
    """Optimizer steps that were skipped so far; engines that step together skip together."""
    return max((engine.skipped for engine in engines.values()), default=0)


def anywhere(arrived: list[int], context: StageContext) -> bool:
    """Whether a signal arrived on any rank, so that all stop after the same step."""
    if context.world.size == 1:
        return bool(arrived)
    return bool(distributed.all_sum(torch.tensor(float(len(arrived)), device=context.accelerator.device())) > 0)


def _rank_seed(context: StageContext) -> int:
    """Different samples on every rank, the same ones in every run with this seed."""
    return context.config.seed * 100_003 + context.world.rank


def _restore_generators(context: StageContext, state: dict[str, Any], step: int) -> None:
    """Go on with the checkpoint's random numbers, or anew and not silently, where it is another accelerator's."""
    mine = context.accelerator.rng_state()
    try:
        if mine.keys() != state.keys():
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
        "seed, so this run will not equal one that was not stopped"
    )


def _check_finite(numbers: Metrics, context: StageContext, step: int) -> None:
    bad = [key for key, value in numbers.items() if not math.isfinite(value)]
    if context.precision.loss_scaling:  # a step whose gradients overflow is skipped, and the scale lowered
        bad = [key for key in bad if not key.endswith("grad_norm")]
    if not bad:
        return
    stage = context.directory.name
    raise DivergedError(
        f"{stage}: {bad[0]} became {numbers[bad[0]]} at step {step} (batch {step - 1}); {_kept(context)}; "
        f"lower {stage}.optimizer.learning_rate, or look for extreme rows in that batch"
    )


def _kept(context: StageContext) -> str:
    kept = context.directory.latest_checkpoint
    return (
        f"the last good checkpoint is {kept}"
        if kept
        else f"no checkpoint yet ({context.directory.name}.checkpoint_every)"
    )
