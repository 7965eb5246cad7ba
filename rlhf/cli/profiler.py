"""A few steps of a stage, measured: where their time goes by phase and by operator. `rlhf profile` prints it.

Settings flow in; steps run in a temporary folder, which is gone afterwards; numbers and a trace file flow out. Seconds
are those of steps without torch's profiler, which costs time of its own; one more step is recorded with it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.schema import EVERY_STAGE, Config, Stage
from rlhf.errors import ConfigError, RunError
from rlhf.memory.advice import apply_settings
from rlhf.reporting.console import console
from rlhf.reporting.progress import progress
from rlhf.roles.lineage import resolve_base_models
from rlhf.runs.directory import RunDirectory
from rlhf.trainers import run as launch
from rlhf.utils import signals
from rlhf.utils.atomic_io import PARTIAL
from rlhf.utils.process_info import current_process

if TYPE_CHECKING:
    from rlhf.trainers.context import StageContext
    from rlhf.trainers.trainer import Trainer

Found = dict[str, Any]

_MORE = 2
"""Steps beside those that are measured: the first, and the one that is recorded."""


def profile(config: Config, stage: Stage, *, steps: int, trace: Path) -> Found:
    """Take a first step of a stage, `steps` that are measured, and one that is recorded in the file `trace`.

    Where the stage starts from what earlier ones leave, that is what they have left in the run's folder; else each of
    them takes one step before, in the temporary folder.

    Returns:
        The document that `rlhf profile --json` prints.

    Raises:
        RLHFError, AcceleratorError: something that the user can fix.
        KeyboardInterrupt: a signal arrived; nothing is left.
    """
    if launcher := current_process().launcher:
        raise ConfigError(f"rlhf profile measures one process; start it without {launcher}")
    check_file(trace)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler tells on the terminal when it starts
    run = config.output
    config, before = founded(config, stage)
    if before:
        short = f"{run} holds no finished {' and '.join(before)}: one step of each is taken first, and not kept"
        console.print(f"profile: {short}", markup=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="rlhf-profile-") as folder, signals.handle_signals(_interrupt):
        config = lengthened(shortened(config, before), stage, steps + _MORE)
        config = config.model_copy(update={"output": Path(folder, "run")})
        trial = Trial(steps, Path(folder, "trace.json.gz" if trace.suffix == ".gz" else "trace.json"))
        with launch.open_run(config, (*before, stage)) as (decided, accelerator):
            from rlhf.trainers import pipeline  # these import DeepSpeed, which has been told about the device
            from rlhf.trainers.oom import explain_out_of_memory

            directory = RunDirectory(config.output)
            pipeline.run(decided, accelerator, directory, before)
            trial.begun = time.perf_counter()
            with (
                pipeline.stage_context(stage, decided, accelerator, directory) as context,
                explain_out_of_memory(context),
            ):
                pipeline.log_plan(context)
                trial.take(pipeline.build_trainer(context), context)
                pipeline.release_models(context)
        try:
            shutil.copyfile(trial.trace, trace.with_name(trace.name + PARTIAL))
            os.replace(trace.with_name(trace.name + PARTIAL), trace)
        except OSError as error:
            raise RunError(f"{trace}: cannot be written ({error.strerror}); choose another --trace") from error
    return {"stage": stage, **trial.found, "trace": str(trace)}


def check_file(trace: Path) -> None:
    """Raise `ConfigError` where no trace can be written to this file."""
    folder = trace.absolute().parent
    if trace.is_dir():
        raise ConfigError(f"--trace {trace}: is a folder; name a file in it, such as {trace / 'trace.json.gz'}")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "cannot be written to" if folder.is_dir() else "is not there"
        raise ConfigError(f"--trace {trace}: its folder {why}; make one, or name another file")


def founded(config: Config, stage: Stage) -> tuple[Config, tuple[Stage, ...]]:
    """The settings with the models that the run's folder holds for `stage`, and the stages that it still needs."""
    run = RunDirectory(config.output)
    pending = [name for name in EVERY_STAGE if not run.stage(name).done]
    bases = resolve_base_models(config, stage, pending, run.finished_model)
    before = tuple(dict.fromkeys(earlier for base in bases for earlier in base.through))
    for name in (*before, stage):
        for base in resolve_base_models(config, name, pending, run.finished_model):
            if base.path and not base.through and not base.ref.named_in(config):
                model = str(Path(base.path).absolute())
                config = apply_settings(config, {base.ref.key: model})
                console.print(f"{base.ref.key}: {model}", markup=False, soft_wrap=True)
    return config, before


def shortened(config: Config, before: Sequence[Stage]) -> Config:
    """The settings with one step for each of the stages `before`, and no samples shown in PPO."""
    for stage in before:
        config = apply_settings(config, {f"{stage}.max_steps": 1, f"{stage}.eval_rows": 1})
    return apply_settings(config, {"ppo.samples_every": 0})


def lengthened(config: Config, stage: Stage, steps: int) -> Config:
    """The settings with at least so many steps of `stage`, however few rows there are."""
    if stage == "ppo":
        enough = config.ppo.epochs is None and config.ppo.steps >= steps
        return config if enough else apply_settings(config, {"ppo.epochs": None, "ppo.steps": steps})
    section = config.supervised(stage)
    return apply_settings(
        config,
        {
            f"{stage}.epochs": max(section.epochs, steps),
            f"{stage}.max_steps": section.max_steps and max(section.max_steps, steps),
        },
    )


class Trial:
    """A few measured steps of a stage, in place of its loop.

    Attributes:
        begun: when the stage began, by `time.perf_counter`.
        found: what was measured.
    """

    def __init__(self, steps: int, trace: Path) -> None:
        self._steps, self.trace = steps, trace
        self.begun = time.perf_counter()
        self.found: Found = {}

    def take(self, trainer: Trainer, context: StageContext) -> None:
        """Take the steps."""
        from rlhf.reporting.timers import profile_operators
        from rlhf.trainers import loop

        context.directory.check_steps(trainer.total_steps)
        loop.resume_or_seed(trainer, context)

        def take(index: int) -> dict[str, float]:
            with loop.measure_step(trainer, context, index) as metrics:
                metrics |= trainer.step(index)
            return metrics

        stage, set_up = context.directory.name, time.perf_counter() - self.begun
        with progress(self._steps + _MORE, f"{stage}: profiling", unit="steps") as bar:
            first = take(0)["seconds"]
            bar.advance()
            parts, numbers = [], []
            for index in range(1, self._steps + 1):
                numbers.append(take(index))
                parts.append(context.phases.phase_times())
                bar.advance()
            events = self._recorded(lambda: take(self._steps + 1))
            bar.advance()
        operators = profile_operators(events)
        whole = sum(each["seconds"] for each in numbers)
        phases = {name: sum((each[name] for each in parts[1:]), parts[0][name]) for name in parts[0]}
        rates = [key for key in ("tflops", "peak_share", "tokens_per_second") if key in numbers[0]]
        self.found = {
            "accelerator": context.accelerator.name,
            "device": context.accelerator.info().model,
            "precision": context.precision.name,
            "set_up_seconds": set_up,
            "first_step_seconds": first,
            "steps": self._steps,
            "step_seconds": [each["seconds"] for each in numbers],
            **{key: sum(each[key] * each["seconds"] for each in numbers) / whole for key in rates},
            "peak_memory": max(each["peak_memory"] for each in numbers),
            "phases": [
                {"phase": name, "seconds": part.seconds / self._steps, "share": part.seconds / whole, **part.rates()}
                for name, part in phases.items()
            ],
            "traced_seconds": operators.seconds,
            "outside_operators": operators.idle,
            "on_device": operators.on_device,
            "operators": [
                {**operator._asdict(), "share": operator.seconds / operators.seconds}
                for operator in operators.operators
            ],
        }

    def _recorded(self, step: Callable[[], Any]) -> Any:
        """The profiler's events of a step, which it also writes to the trace."""
        import torch.profiler

        with torch.profiler.profile(activities=torch.profiler.supported_activities()) as recording:
            step()
        recording.export_chrome_trace(str(self.trace))
        return recording.events()


def _interrupt(number: int) -> None:
    raise KeyboardInterrupt
