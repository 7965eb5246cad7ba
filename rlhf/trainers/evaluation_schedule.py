"""The evaluations of a stage: when the model is measured, which model the stage keeps, and when training ends early."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rlhf.engine import distributed
from rlhf.engine.engine import Metrics
from rlhf.errors import RunError
from rlhf.reporting.summary import format_value
from rlhf.roles.base_sharing import adapter_folder
from rlhf.runs.description import read_evaluations, write_evaluations
from rlhf.runs.stage_directory import parse_step
from rlhf.trainers.context import StageContext
from rlhf.trainers.trainer import EvalResult, Trainer
from rlhf.utils.atomic_io import atomic_rename_dir, remove_folder
from rlhf.utils.statistics import has_fallen_significantly


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
        self._path = context.directory.evaluations
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
                    write_evaluations(self._path, results)
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
        """Read the results up to the checkpoint that the stage resumes from, on rank 0, and send them to all ranks.

        If the stage's file is missing, the checkpoint's copy takes its place.
        """
        latest = self.context.directory.latest_checkpoint
        paths = [self._path, latest / self._path.name] if self.context.world.is_main and latest else []
        saved = next((read_evaluations(path) for path in paths if path.is_file()), {})
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
                remove_folder(folder)

    def _format(self, numbers: Metrics) -> str:
        """Return one line of the numbers that are displayed or may select a model, each with its value before."""
        selected = (*self.trainer.displayed, *self.settings.better)
        names = [name for name in numbers if name in selected] or list(numbers)
        before = self._results[0].numbers
        return ", ".join(
            f"{name.replace('_', ' ')} {format_value(name, numbers[name])} (before {format_value(name, before[name])})"
            for name in names
        )
