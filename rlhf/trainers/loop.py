"""The loop of a stage's steps: `fit` drives a `Trainer`, with its records, evaluations and checkpoints.

It displays and records each step's metrics, stops at a number that is not finite, and resumes from checkpoints.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from rlhf.checkpoint import training_state
from rlhf.config.schema import TrainingConfig
from rlhf.engine import distributed
from rlhf.engine.engine import Metrics, TrainingEngine
from rlhf.errors import DivergedError, RunError
from rlhf.reporting.progress import progress
from rlhf.reporting.summary import format_value
from rlhf.roles.base_sharing import adapter_folder
from rlhf.runs.stage_directory import parse_step
from rlhf.trainers.context import StageContext
from rlhf.utils import signals
from rlhf.utils.atomic_io import atomic_rename_dir, atomic_write_json, read_json
from rlhf.utils.statistics import has_fallen_significantly


class EvalResult(NamedTuple):
    """Metrics of a model on held-out rows, and samples as `{"prompt", "completion"}`.

    `judged` are the judge's scores of the rows, in the same order at each evaluation. `rows` are numbers and texts of
    each row, written to `heldout.jsonl` only.
    """

    numbers: Metrics
    samples: Sequence[dict[str, str]] = ()
    judged: Sequence[float] = ()
    rows: Sequence[dict[str, Any]] = ()


class Trainer(Protocol):
    """A stage's models, data and algorithm, as `rlhf.trainers.loop.fit` drives them; every rank calls each method."""

    unit: str
    """The metric that counts a step's tokens or pairs; the recorded rate is this number per second."""

    @property
    def displayed(self) -> tuple[str, ...]:
        """Metrics that the progress display and the lines about evaluations show."""

    @property
    def settings(self) -> TrainingConfig:
        """The stage's section of the settings."""

    @property
    def total_steps(self) -> int:
        """Steps of the whole stage."""

    @property
    def epoch_steps(self) -> int | None:
        """Steps of an epoch; None if the stage has no epochs."""

    @property
    def engines(self) -> dict[str, TrainingEngine]:
        """The models that are trained, by the names that checkpoints use."""

    def step(self, index: int) -> Metrics:
        """Take step `index`, from 0, and return its metrics: the same on all ranks, `unit` among them."""

    def evaluate(self, when: str) -> EvalResult:
        """Measure the model on held-out rows; `when`, "before" or "after step 20", is for display."""

    def save(self, folder: Path) -> None:
        """Write the model into `folder`, complete or not at all."""

    def summarize(self) -> dict[str, Any]:
        """Log what was saved, once training is done, and return the summary's entries about models and data."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs in addition to the engines'."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""


def fit(trainer: Trainer, context: StageContext, later: float = 0.0) -> dict[str, Any]:
    """Take the steps after the newest checkpoint, with evaluations before, after and in between.

    Args:
        later: about how long later stages will take, relative to all steps of this one, for display.

    Returns:
        The stage's summary: entries about evaluations, models and data.

    Raises:
        DivergedError: a number is not finite; nothing more is written.
        KeyboardInterrupt: a signal arrived; the step was finished and a checkpoint written.
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
        if any_rank_signalled(signals_seen, context):
            raise KeyboardInterrupt
        if 0 < first < total_steps and schedule.is_due(first):  # the process may have ended before the evaluation
            schedule.run(first)
        if schedule.over_optimized_since(first) is not None:
            total_steps = first
        for index in range(first, total_steps):
            with measure_step(trainer, context, index) as metrics:
                metrics |= trainer.step(index)
            done = index + 1
            if is_recorded(trainer, done):
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
                if schedule.over_optimized_since(done) is not None:
                    end_early(trainer, context, done, metrics)
                    total_steps = done
                    break
        if any_rank_signalled(signals_seen, context):  # while the last checkpoint was written
            raise KeyboardInterrupt
    if total_steps == trainer.total_steps:
        schedule.run(total_steps)
    return schedule.finish(total_steps) | trainer.summarize()


def is_recorded(trainer: Trainer, step: int) -> bool:
    """Return whether a step's metrics are recorded; the first step has those of checks that are not repeated."""
    return step % trainer.settings.log_every == 0 or step in (1, trainer.total_steps)


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
        raise DivergedError(f"{stage}: ended by alarms.stop: {broken.line}; {_last_checkpoint(context)}")


def resume_or_seed(trainer: Trainer, context: StageContext) -> int:
    """Restore the newest checkpoint, or seed the generators if there is none; return the number of steps taken."""
    with context.phases.running("reading a checkpoint"):
        restored = training_state.restore_checkpoint(context.directory, trainer.engines)
    if not restored:
        context.accelerator.seed(_rank_seed(context))
        return 0
    done, state = restored
    context.health.load_state_dict(state["health"])
    trainer.load_state_dict(state["stage"])
    _restore_generators(context, state["rng"], done)
    context.clock.earlier += state["seconds"]
    context.phases.totals.update(state["phases"])
    context.say(f"{context.directory.name}: resumed after step {done:,}")
    return done


@contextmanager
def measure_step(trainer: Trainer, context: StageContext, index: int) -> Iterator[Metrics]:
    """Measure step `index`, which the block takes; the block adds the step's metrics to the yielded dictionary.

    After the block, the dictionary also has the step's duration, rates and memory.

    Raises:
        DivergedError: a metric is not finite, fp16 cannot hold the gradients at any loss scale, or `alarms.stop` is set
            and an invariant does not hold.
    """
    phases, unit, engines = context.phases, trainer.unit, trainer.engines
    skipped_before = _skipped_steps(trainer)
    metrics: Metrics = {}
    samples = context.weight_samples  # taken before the first step
    with phases.step():
        yield metrics
        if index == 0:  # no resumed process repeats it, so records do not depend on where a run resumed
            metrics |= samples.count_unchanged()
        if index == 0 or index + 1 == trainer.total_steps:
            metrics |= samples.compare()
    metrics |= phases.metrics() | {f"{unit}_per_second": metrics[unit] / phases.seconds}
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
            f"{index + 1} (batch {index}); {_last_checkpoint(context)}; set precision=bf16 or fp32, or lower the "
            "learning rate"
        )


def save_checkpoint(trainer: Trainer, context: StageContext, done: int) -> None:
    """Write the checkpoint after `done` steps."""
    state = {
        "stage": trainer.state_dict(),
        "rng": context.accelerator.rng_state(),
        "seconds": context.clock.seconds(),
        "phases": dict(context.phases.totals),
        "health": context.health.state_dict(),
    }
    with context.phases.running("writing a checkpoint"):
        training_state.save_checkpoint(context.directory, done, trainer.engines, state)
    context.commit()


def any_rank_signalled(received: list[int], context: StageContext) -> bool:
    """Return whether a signal arrived on any rank, so that all stop after the same step."""
    if context.world.size == 1:
        return bool(received)
    return bool(distributed.all_sum(torch.tensor(float(len(received)), device=context.accelerator.device())) > 0)


def _skipped_steps(trainer: Trainer) -> int:
    """Return the optimizer steps that were skipped so far; engines that step together skip together."""
    return max((engine.skipped for engine in trainer.engines.values()), default=0)


def _rank_seed(context: StageContext) -> int:
    """Return the seed of this rank, the same in every run with this configuration."""
    return context.config.seed * 100_003 + context.world.rank


def _restore_generators(context: StageContext, state: dict[str, Any], step: int) -> None:
    """Restore the checkpoint's random generators; if they are those of another accelerator, seed again and log it."""
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
    context.accelerator.seed((_rank_seed(context) + step * 1_000_003) % 2**32)  # not those of the first step
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
        return f"the last checkpoint is {latest}"
    return f"no checkpoint yet ({context.directory.name}.checkpoint_every)"


def record_evaluation(context: StageContext, step: int, result: EvalResult) -> None:
    """Record the result of the evaluation after `step` steps, and warn if a health rule holds."""
    context.recorder.log(step, {f"heldout_{key}": value for key, value in result.numbers.items()})
    for position, sample in enumerate(result.samples):
        context.recorder.text(f"heldout_{position}", step, f"{sample['prompt']}\n{sample['completion']}")
    context.warn(step, context.health.judge_evaluation(step, result.numbers), "heldout_warning")


_NOT_OPTIMIZED = ("approved_share", "judge_reward")
"""Numbers of an evaluation that judge completions and that PPO does not optimize, the most reliable first."""


def _judge_reward(result: EvalResult) -> float:
    return result.numbers["judge_reward"]


class EvaluationSchedule:
    """The evaluations of a stage; every rank takes part.

    If a model is the best so far, it is saved to a folder named by its step; then the result is written to
    `evaluations.json`, and training continues. A model is deleted if it is the best neither now nor at a checkpoint. So
    a stage that resumes reads the results up to its checkpoint, repeats no evaluation, and saves the same model as an
    uninterrupted stage.
    """

    def __init__(self, trainer: Trainer, context: StageContext) -> None:
        self.trainer, self.context, self.settings = trainer, context, trainer.settings
        eval_every = self.settings.eval_every
        self._every = (trainer.epoch_steps or 0) if eval_every == "epoch" else eval_every
        self._metric = self.settings.selection_metric
        self._path = context.directory.path / "evaluations.json"
        self._results = self._read_results()
        self._prune()

    def is_due(self, step: int) -> bool:
        """Return whether the model is measured after `step` steps."""
        return step in (0, self.trainer.total_steps, *self._results) or bool(self._every and step % self._every == 0)

    def run(self, step: int) -> None:
        """Measure the model after `step` steps, unless the result is known, and record it; training is unchanged."""
        name, accelerator = self.context.directory.name, self.context.accelerator
        known = step in self._results
        if not known:
            when = f"after step {step:,}" if 0 < step < self.trainer.total_steps else "after" if step else "before"
            state = accelerator.rng_state()
            # All ranks use the numbers of rank 0, so that all save a model or none does.
            result = self.trainer.evaluate(when)
            self.context.recorder.heldout(step, result.rows)
            self._results[step] = distributed.all_gather_objects(result._replace(rows=()))[0]
            accelerator.set_rng_state(state)
            if self._best(step) == step:
                self.trainer.save(self._folder(step))
            with distributed.on_main(f"writing {self._path}") as main:
                if main:
                    results = {
                        str(done): {"numbers": result.numbers, "samples": result.samples, "judged": result.judged}
                        for done, result in self._results.items()
                    }
                    atomic_write_json(self._path, results)
            self._prune()
        if (known and step == 0) or not self._results[step].numbers:
            return
        # Resuming dropped all records after the checkpoint, including those of known evaluations: log them again.
        record_evaluation(self.context, step, self._results[step])
        if self._every and step:
            best = ", the best so far" if self._best(step) == step else ""
            self.context.say(f"{name}: after step {step:,}: {self._format(self._results[step].numbers)}{best}")

    def over_optimized_since(self, step: int) -> int | None:
        """Return the evaluation since which the model that is evaluated after `step` is over-optimized.

        Since then, the reward has risen, and the judge's score has fallen significantly. None if it is not
        over-optimized, or the settings do not end training early. As in `_best`, the model before training does not
        count.
        """
        judged = sorted(done for done, result in self._results.items() if 0 < done <= step and result.judged)
        if not self.settings.ends_early or step not in judged:
            return None
        best, now = max((self._results[done] for done in judged), key=_judge_reward), self._results[step]
        rises = now.numbers["reward"] > best.numbers["reward"]
        falls = has_fallen_significantly(best.judged, now.judged)
        return next(done for done in judged if self._results[done] is best) if rises and falls else None

    def finish(self, total_steps: int) -> dict[str, Any]:
        """Save the model of the stage, which took `total_steps`; return the summary's entries about evaluations."""
        directory = self.context.directory
        since = self.over_optimized_since(total_steps)
        if since is not None:
            best, now = self._results[since].numbers, self._results[total_steps].numbers
            self.context.say(
                f"{directory.name}: ended at step {total_steps:,}, over-optimized since step {since:,}: reward "
                f"{best['reward']:.2f} -> {now['reward']:.2f}, the judge's score {best['judge_reward']:.2f} -> "
                f"{now['judge_reward']:.2f}"
            )
        step = self._best(total_steps)
        kept: dict[str, Any] = {"step": total_steps if step is None else step}
        if step is None:
            self.trainer.save(directory.path)
            if self._metric:
                self.context.say(f"{directory.name}: no evaluated model is worth keeping, so the last one is saved")
        else:
            metric, value = str(self._metric), self._results[step].numbers[str(self._metric)]
            kept |= {"metric": metric, "value": value}
            with distributed.on_main("saving the best model") as main:
                if main:
                    self._move_model(self._folder(step))
            self.context.say(
                f"{directory.name}: keeps the model of step {step:,}, {metric.replace('_', ' ')} "
                f"{format_value(metric, value)}: the best of {len(self._results) - 1:,} evaluations"
                f"{self._describe_doubt(step)}"
            )
        before, after = self._results[0], self._results[kept["step"]]
        summary = {"before": before.numbers, "after": after.numbers, "steps": total_steps, "kept": kept}
        summary |= {} if since is None else {"over_optimized_since": since}
        if after.samples:
            summary["samples"] = [
                {"prompt": old["prompt"], "before": old["completion"], "after": new["completion"]}
                for old, new in zip(before.samples, after.samples)
            ]
        return summary

    def _describe_doubt(self, step: int) -> str:
        """Return what to know about a model that was chosen by the reward that PPO raises; empty if nothing."""
        if self._metric != "reward":
            return ""
        second = next((name for name in _NOT_OPTIMIZED if name in self._results[step].numbers), None)
        if second is None:
            return (
                "; chosen by the reward alone, which over-optimization raises, too: read its samples, or set ppo.judge"
            )
        values = {done: result.numbers[second] for done, result in self._results.items() if done}
        best, here = max(values, key=values.__getitem__), values[step]
        if values[best] <= here:
            return ""
        better, worse = format_value(second, values[best]), format_value(second, here)
        name = second.replace("_", " ")
        return f"; that of step {best:,} has a higher {name}, {better} instead of {worse} (ppo.keep=best({second}))"

    def _move_model(self, folder: Path) -> None:
        """Move the files of `folder` to the stage's folder: all, or those that a killed process has not moved."""
        parts = list(folder.glob("*")) if folder.is_dir() else []
        directory = self.context.directory
        for part in parts:
            atomic_rename_dir(part, directory.path / part.name)
        if not parts and not directory.model.is_dir() and not adapter_folder(str(directory.model)).is_dir():
            raise RunError(
                f"{folder}: the best model of {directory.name} is missing; restore it, or train again with --overwrite"
            )

    def _best(self, until: int) -> int | None:
        """Return the step of the best model up to step `until`, the earliest in case of a tie.

        None if the settings keep the last model, or no model is eligible: one with a finite number that no rule calls
        ruined (`rlhf.reporting.health`). The model before training does not count.
        """
        if self._metric is None:
            return None
        values = {step: result.numbers[self._metric] for step, result in self._results.items() if 0 < step <= until}
        is_ruined = self.context.health.is_ruined
        eligible = [
            step
            for step in sorted(values)
            if math.isfinite(values[step]) and not is_ruined(self._results[0].numbers, self._results[step].numbers)
        ]
        best: int | None = self.settings.better[self._metric](eligible, key=values.__getitem__, default=None)
        return best

    def _folder(self, step: int) -> Path:
        return self.context.directory.best / f"step-{step:08d}"

    def _read_results(self) -> dict[int, EvalResult]:
        """Read the results up to the checkpoint that the stage resumes from, on rank 0, and send them to all ranks."""
        latest = self.context.directory.latest_checkpoint
        resumes = self.context.world.is_main and latest and self._path.is_file()
        saved = read_json(self._path) if resumes else {}
        (saved, first), *_ = distributed.all_gather_objects((saved, parse_step(latest) if latest else 0))
        return {int(step): EvalResult(**result) for step, result in saved.items() if int(step) <= first}

    def _prune(self) -> None:
        """Delete models that are the best neither now nor at any checkpoint from which the stage may resume."""
        directory = self.context.directory
        if not self.context.world.is_main or not directory.best.is_dir():
            return
        until = [*map(parse_step, directory.all_checkpoints), max(self._results, default=0)]
        needed = {self._folder(step) for step in map(self._best, until) if step is not None}
        for folder in directory.best.iterdir():
            if folder not in needed:
                shutil.rmtree(folder)

    def _format(self, numbers: Metrics) -> str:
        """Return one line of the numbers that are displayed or may select a model, each with its value before."""
        selected = (*self.trainer.displayed, *self.settings.better)
        names = [name for name in numbers if name in selected] or list(numbers)
        before = self._results[0].numbers
        return ", ".join(
            f"{name.replace('_', ' ')} {format_value(name, numbers[name])} (before {format_value(name, before[name])})"
            for name in names
        )
