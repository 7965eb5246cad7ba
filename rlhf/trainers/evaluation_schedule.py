"""A stage's evaluations: when its model is measured, with which result, and which of its models the stage saves.

Results are written to `evaluations.json` before training continues, and before that a model that is the best so far to
a folder named by its step. Neither is ever changed, so a stage that resumes takes from both what belongs to the steps
of its checkpoint, measures nothing twice, and saves what an uninterrupted stage would have saved.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.engine import distributed
from rlhf.engine.metric_sums import Metrics
from rlhf.errors import RunError
from rlhf.reporting.summary import format_value
from rlhf.roles.base_sharing import adapter_folder
from rlhf.runs.stage_directory import parse_step
from rlhf.trainers.trainer import EvalResult, Trainer
from rlhf.utils.atomic_io import atomic_rename_dir, atomic_write_json, read_json

if TYPE_CHECKING:
    from rlhf.trainers.context import StageContext


def record_evaluation(context: StageContext, step: int, result: EvalResult) -> None:
    """Record the result of the evaluation after `step` steps."""
    context.recorder.log(step, {f"heldout_{key}": value for key, value in result.numbers.items()})
    for position, sample in enumerate(result.samples):
        context.recorder.text(f"heldout_{position}", step, f"{sample['prompt']}\n{sample['completion']}")


class EvaluationSchedule:
    """The evaluations of a stage; every rank takes part."""

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
            # One rank's numbers for all: if they write a model, they do it together.
            self._results[step] = distributed.all_gather_objects(self.trainer.evaluate(when))[0]
            accelerator.set_rng_state(state)
            if self._best(step) == step:
                self.trainer.save(self._folder(step))
            with distributed.on_main(f"writing {self._path}") as main:
                if main:
                    results = {str(done): result._asdict() for done, result in self._results.items()}
                    atomic_write_json(self._path, results)
            self._prune()
        if (known and step == 0) or not self._results[step].numbers:
            return
        # Resuming dropped all records after the checkpoint, including those of known evaluations: log them again.
        record_evaluation(self.context, step, self._results[step])
        if self._every and step:
            best = ", the best so far" if self._best(step) == step else ""
            self.context.say(f"{name}: after step {step:,}: {self._format(self._results[step].numbers)}{best}")

    def finish(self) -> dict[str, Any]:
        """Save the model of the stage, and return the summary's entries about evaluations."""
        directory, total_steps = self.context.directory, self.trainer.total_steps
        step = self._best(total_steps)
        kept: dict[str, Any] = {"step": total_steps if step is None else step}
        if step is None:
            self.trainer.save(directory.path)
        else:
            metric, value = str(self._metric), self._results[step].numbers[str(self._metric)]
            kept |= {"metric": metric, "value": value}
            with distributed.on_main("saving the best model") as main:
                if main:
                    self._move_model(self._folder(step))
            self.context.say(
                f"{directory.name}: keeps the model of step {step:,}, {metric.replace('_', ' ')} "
                f"{format_value(metric, value)}: the best of {len(self._results) - 1:,} evaluations"
            )
        before, after = self._results[0], self._results[kept["step"]]
        summary = {"before": before.numbers, "after": after.numbers, "steps": total_steps, "kept": kept}
        if after.samples:
            summary["samples"] = [
                {"prompt": old["prompt"], "before": old["completion"], "after": new["completion"]}
                for old, new in zip(before.samples, after.samples)
            ]
        return summary

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
        """Return the step of the best model up to step `until`, the earliest one of several as good.

        None if the settings keep the last model, or no number is finite. The model as it was loaded does not count.
        """
        if self._metric is None:
            return None
        values = {step: result.numbers[self._metric] for step, result in self._results.items() if 0 < step <= until}
        finite = [step for step in sorted(values) if math.isfinite(values[step])]
        best: int | None = self.settings.better[self._metric](finite, key=values.__getitem__, default=None)
        return best

    def _folder(self, step: int) -> Path:
        return self.context.directory.best / f"step-{step:08d}"

    def _read_results(self) -> dict[int, EvalResult]:
        """Read the results up to the checkpoint that the stage resumes from; rank 0 reads for all."""
        latest = self.context.directory.latest_checkpoint
        resumes = self.context.world.is_main and latest and self._path.is_file()
        saved = read_json(self._path) if resumes else {}
        (saved, first), *_ = distributed.all_gather_objects((saved, parse_step(latest) if latest else 0))
        return {int(step): EvalResult(**result) for step, result in saved.items() if int(step) <= first}

    def _prune(self) -> None:
        """Delete models that are no longer the best, now and for a stage that resumes from one of its checkpoints."""
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
