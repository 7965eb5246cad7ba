"""A stage's evaluations: when its model is measured, what was found, and which of its models the stage leaves.

What is found is written to `evaluations.json` before training goes on, and a model that is the best so far to a folder
named by its step before that. Nothing there is ever changed, so a stage that resumes takes from both what belongs to
the steps of its checkpoint, measures nothing twice, and keeps what a stage that was not stopped would have kept.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.engine import distributed
from rlhf.engine.metric_sums import Metrics
from rlhf.errors import RunError
from rlhf.reporting.summary import shown_value
from rlhf.roles.base_sharing import adapter_folder
from rlhf.runs.stage_directory import parse_step
from rlhf.utils.atomic_io import atomic_rename_dir, atomic_write_json, read_json

if TYPE_CHECKING:
    from rlhf.config.schema import TrainingConfig
    from rlhf.trainers.context import StageContext


class Found(NamedTuple):
    """What a model did with held-out rows: numbers, and texts as `{"prompt", "completion"}`."""

    numbers: Metrics
    samples: Sequence[dict[str, str]] = ()


def record(context: StageContext, step: int, found: Found) -> None:
    """Record what was found after `step` steps."""
    context.recorder.log(step, {f"heldout_{key}": value for key, value in found.numbers.items()})
    for position, sample in enumerate(found.samples):
        context.recorder.text(f"heldout_{position}", step, f"{sample['prompt']}\n{sample['completion']}")


class Evaluations:
    """The evaluations of a stage of `total_steps`; every rank takes part.

    Args:
        measure: measures the model; its argument, "before" or "after step 20", is for display.
        leave: writes the model into a folder.
        epoch: steps of an epoch; None: the stage has none.
        shown: names of numbers that a person is told first.
    """

    def __init__(
        self,
        context: StageContext,
        settings: TrainingConfig,
        total_steps: int,
        *,
        measure: Callable[[str], Found],
        leave: Callable[[Path], None],
        epoch: int | None,
        shown: tuple[str, ...],
    ) -> None:
        self.context, self.settings, self.total_steps = context, settings, total_steps
        self._measure, self._leave, self._shown = measure, leave, shown
        self._every = (epoch or 0) if settings.eval_every == "epoch" else settings.eval_every
        self._metric = settings.selection_metric
        self._path = context.directory.path / "evaluations.json"
        self._found = self._known()
        self._prune()

    def due(self, step: int) -> bool:
        """Whether the model is measured after `step` steps."""
        return step in (0, self.total_steps, *self._found) or bool(self._every and step % self._every == 0)

    def take(self, step: int) -> None:
        """Measure the model after `step` steps, where that is not known yet, and record it; it changes no training."""
        name, accelerator = self.context.directory.name, self.context.accelerator
        known = step in self._found
        if not known:
            when = f"after step {step:,}" if 0 < step < self.total_steps else "after" if step else "before"
            state = accelerator.rng_state()
            # One rank's numbers for all: where they write a model, they do it together.
            self._found[step] = distributed.all_gather_objects(self._measure(when))[0]
            accelerator.set_rng_state(state)
            if self._best(step) == step:
                self._leave(self._folder(step))
            with distributed.on_main(f"writing {self._path}") as main:
                if main:
                    atomic_write_json(self._path, {str(done): each._asdict() for done, each in self._found.items()})
            self._prune()
        if (known and step == 0) or not self._found[step].numbers:
            return
        # Records that follow the checkpoint's step were dropped when the stage was resumed: also those of what is known
        found = self._found[step]
        record(self.context, step, found)
        if self._every and step:
            best = ", the best so far" if self._best(step) == step else ""
            self.context.say(f"{name}: after step {step:,}: {self._told(found.numbers)}{best}")

    def finish(self) -> dict[str, Any]:
        """Put the model that the stage leaves in its place; gives what the stage's summary says of its evaluations."""
        directory, step = self.context.directory, self._best(self.total_steps)
        kept: dict[str, Any] = {"step": self.total_steps if step is None else step}
        if step is None:
            self._leave(directory.path)
        else:
            metric, value = str(self._metric), self._found[step].numbers[str(self._metric)]
            kept |= {"metric": metric, "value": value}
            with distributed.on_main("keeping the best model") as main:
                if main:
                    self._put(self._folder(step))
            self.context.say(
                f"{directory.name}: keeps the model of step {step:,}, {metric.replace('_', ' ')} "
                f"{shown_value(metric, value)}: the best of {len(self._found) - 1:,} evaluations"
            )
        before, after = self._found[0], self._found[kept["step"]]
        summary = {"before": before.numbers, "after": after.numbers, "steps": self.total_steps, "kept": kept}
        if after.samples:
            summary["samples"] = [
                {"prompt": old["prompt"], "before": old["completion"], "after": new["completion"]}
                for old, new in zip(before.samples, after.samples)
            ]
        return summary

    def _put(self, folder: Path) -> None:
        """Move what is in `folder` to where a stage leaves it, all or what a process that died has not moved."""
        parts = list(folder.glob("*")) if folder.is_dir() else []
        directory = self.context.directory
        for part in parts:
            atomic_rename_dir(part, directory.path / part.name)
        if not parts and not directory.model.is_dir() and not adapter_folder(str(directory.model)).is_dir():
            raise RunError(
                f"{folder}: the model that {directory.name} keeps is not there; bring it back, or train anew with "
                "--overwrite"
            )

    def _best(self, until: int) -> int | None:
        """The step whose model is kept of those up to `until`, an earlier one where several are as good.

        None where none is kept, or no number is finite. The model as it was loaded does not count.
        """
        if self._metric is None:
            return None
        values = {step: found.numbers[self._metric] for step, found in self._found.items() if 0 < step <= until}
        finite = [step for step in sorted(values) if math.isfinite(values[step])]
        return self.settings.better[self._metric](finite, key=values.__getitem__, default=None)

    def _folder(self, step: int) -> Path:
        return self.context.directory.best / f"step-{step:08d}"

    def _known(self) -> dict[int, Found]:
        """What was found up to the step that the stage goes on from, as rank 0 finds it."""
        latest = self.context.directory.latest_checkpoint
        resumes = self.context.world.is_main and latest and self._path.is_file()
        there = read_json(self._path) if latest and resumes else {}
        (there, first), *_ = distributed.all_gather_objects((there, parse_step(latest) if latest else 0))
        return {int(step): Found(**found) for step, found in there.items() if int(step) <= first}

    def _prune(self) -> None:
        """Delete models that are the best no more, neither now nor where one of the checkpoints is resumed from."""
        directory = self.context.directory
        if not self.context.world.is_main or not directory.best.is_dir():
            return
        until = [*map(parse_step, directory.all_checkpoints), max(self._found, default=0)]
        kept = {self._folder(step) for step in map(self._best, until) if step is not None}
        for folder in directory.best.iterdir():
            if folder not in kept:
                shutil.rmtree(folder)

    def _told(self, numbers: Metrics) -> str:
        """Numbers in one line, each with what it was before: those that are shown or can be kept by, or all."""
        names = [name for name in numbers if name in self._shown or name in self.settings.better] or list(numbers)
        before = self._found[0].numbers
        return ", ".join(
            f"{name.replace('_', ' ')} {shown_value(name, numbers[name])} (before {shown_value(name, before[name])})"
            for name in names
        )
