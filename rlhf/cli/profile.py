"""`rlhf profile`: the time of a stage's steps by phase and by operator, of the rest of the stage, and a trace.

The steps run in a temporary folder that is deleted afterwards; only the trace file stays. Seconds are measured without
torch's profiler, which takes time itself; one more step is recorded with it. `rlhf.memory.duration` predicts a stage's
hours from the report.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import reduce
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf.cli.options import Options, shared, sort_stages
from rlhf.cli.tables import AsTSV, print_json, print_line, print_table, route_notes_to_stderr
from rlhf.config.schema import EVERY_STAGE, Config, Stage
from rlhf.errors import ConfigError, RunError
from rlhf.reporting.console import console
from rlhf.reporting.progress import progress
from rlhf.reporting.timers import PhaseTime, profile_operators
from rlhf.roles.lineage import resolve_base_models
from rlhf.runs.directory import RunDirectory
from rlhf.utils.atomic_io import atomic_file
from rlhf.utils.process_info import current_process
from rlhf.utils.units import format_bytes

if TYPE_CHECKING:
    from rlhf.trainers.context import StageContext
    from rlhf.trainers.distill import DistillTrainer
    from rlhf.trainers.ppo.trainer import PPOTrainer
    from rlhf.trainers.trainer import Trainer

Report = dict[str, Any]

_OPERATORS_SHOWN = 15
_EXTRA_STEPS = 2
"""Steps in addition to those that are measured: the first, and the one that is recorded."""


@shared("config", "overrides", "accelerator", "precision", "output", "seed", "trust", "debug")
def profile(
    options: Options,
    stage: Annotated[
        list[str] | None,
        typer.Option(metavar="STAGE", help="sft, reward, dpo, ppo or distill. Repeatable. Default: ppo."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Number of steps to measure.", min=1, metavar="N")] = 3,
    trace: Annotated[
        Path, typer.Option(help="File for the trace of one more step; with several stages, STAGE-FILE.", metavar="FILE")
    ] = Path("trace.json.gz"),
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print JSON, a list of the stages with every operator.")
    ] = False,
    as_tsv: AsTSV = False,
) -> None:
    """Run a few steps of a stage in one process and report where the time went: by phase and by operator.

    The first step compiles and allocates and is not measured; the next ones are. One more is recorded: open its trace
    in https://ui.perfetto.dev or chrome://tracing. An evaluation, a checkpoint and the saving of the model are timed,
    too, so that [bold]rlhf plan --measured[/] predicts the hours of the whole recipe.

    The run in [bold]--output[/] is only read: PPO starts from its SFT and reward model. If they are missing, each of
    these stages first takes one step in a temporary folder. An untrained model would hardly end a completion, so the
    data's replies are drawn instead. Only the trace and the cache of tokenized rows stay.

    [bold]rlhf profile --config recipe.yaml[/]                    [dim]# a PPO step[/]

    [bold]rlhf profile --output runs/mine --steps 10[/]           [dim]# with a run's settings and models[/]

    [bold]rlhf profile --config recipe.yaml --stage sft --stage reward --stage ppo --json > profile.json[/]

    [bold]rlhf plan --config recipe.yaml --measured profile.json[/]       [dim]# hours of each stage and in total[/]

    Seconds are of steps without the profiler; the shares of operators are of the recorded step. TFLOP/s count only
    the models' matrix products over real tokens (docs/metrics.md). Exit code 2: an error that you can fix.
    """
    stages = sort_stages(stage or ["ppo"], "--stage")
    config = options.with_run_recipe(stages).load_for(stages)
    if options.accelerator:
        config = config.model_copy(update={"accelerator": options.accelerator})
    traces = {name: trace if len(stages) == 1 else trace.with_name(f"{name}-{trace.name}") for name in stages}
    with route_notes_to_stderr(as_json or as_tsv):
        reports = [profile_stage(config, name, steps=steps, trace=traces[name]) for name in stages]
    if as_json:
        print_json(reports)
    else:
        for name, report in zip(stages, reports):
            _print(report, config.title(name), as_tsv)


def profile_stage(config: Config, stage: Stage, *, steps: int, trace: Path) -> Report:
    """Take a first step of a stage, measure `steps` more, and record another in the file `trace`.

    Raises:
        RLHFError, AcceleratorError: the user can fix it.
        KeyboardInterrupt: a signal arrived; nothing is left behind.
    """
    from rlhf.memory.advice import apply_settings
    from rlhf.trainers import run as launch

    if launcher := current_process().launcher:
        raise ConfigError(f"rlhf profile measures one process; start it without {launcher}")
    _check_trace_file(trace)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler prints to the terminal when it starts
    run = config.output
    config, earlier_stages = _choose_base_models(config, stage)
    if earlier_stages:
        missing = " and ".join(earlier_stages)
        print_line(f"profile: {run} has no finished {missing}: one step of each is taken first, and not kept")
    short = {f"{name}.{key}": 1 for name in earlier_stages for key in ("max_steps", "eval_rows")}
    config = ensure_steps(
        apply_settings(config, short | {"ppo.samples_every": 0, "alarms.skip_not_finite": 0}),
        stage,
        steps + _EXTRA_STEPS,
    )
    with tempfile.TemporaryDirectory(prefix="rlhf-profile-") as folder:
        directory = RunDirectory(Path(folder, "run"))
        config = config.model_copy(update={"output": directory.path, "sinks": ()})
        recording = Path(folder, "trace.json.gz" if trace.suffix == ".gz" else "trace.json")
        start = time.perf_counter()
        with launch.open_run(config, (*earlier_stages, stage)) as (resolved, accelerator):
            from rlhf.trainers import pipeline  # imports DeepSpeed, which `open_run` has configured for the device
            from rlhf.trainers.distill import DistillTrainer
            from rlhf.trainers.oom import translate_stage_errors
            from rlhf.trainers.ppo.trainer import PPOTrainer

            opening = time.perf_counter() - start
            pipeline.run(resolved, accelerator, directory, earlier_stages)
            start = time.perf_counter()
            with (
                pipeline.stage_context(stage, resolved, accelerator, directory) as context,
                translate_stage_errors(context),
            ):
                pipeline.log_plan(context)
                trainer = pipeline.build_trainer(context)
                if "sft" in earlier_stages and isinstance(trainer, PPOTrainer | DistillTrainer):
                    draw_replies(trainer)
                report = _measure_steps(trainer, context, steps, recording, start)
                pipeline.release_models(context)
        try:
            with atomic_file(trace) as temporary:
                shutil.copyfile(recording, temporary)
        except OSError as error:
            raise RunError(f"{trace}: cannot be written ({error.strerror}); choose another --trace") from error
    return {"stage": stage, "start_seconds": opening, **report, "trace": str(trace)}


def _check_trace_file(trace: Path) -> None:
    folder = trace.absolute().parent
    if trace.is_dir():
        raise ConfigError(f"--trace {trace}: is a folder; name a file in it, such as {trace / 'trace.json.gz'}")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        problem = "cannot be written to" if folder.is_dir() else "does not exist"
        raise ConfigError(f"--trace {trace}: its folder {problem}; create it, or name another file")


def _choose_base_models(config: Config, stage: Stage) -> tuple[Config, tuple[Stage, ...]]:
    """Return the settings with the run's finished models that `stage` starts from, and the stages still to run."""
    from rlhf.memory.advice import apply_settings

    run = RunDirectory(config.output)
    pending = [name for name in EVERY_STAGE if not run.stage(name).done]
    bases = resolve_base_models(config, stage, pending, run.finished_model)
    earlier_stages = tuple(dict.fromkeys(earlier for base in bases for earlier in base.through))
    for name in (*earlier_stages, stage):
        for base in resolve_base_models(config, name, pending, run.finished_model):
            if base.path and not base.through and not base.ref.named_in(config):
                model = str(Path(base.path).absolute())
                config = apply_settings(config, {base.ref.key: model})
                print_line(f"{base.ref.key}: {model}")
    return config, earlier_stages


def ensure_steps(config: Config, stage: Stage, steps: int) -> Config:
    """Return the settings with at least `steps` steps of `stage`, however few rows there are."""
    from rlhf.memory.advice import apply_settings

    if stage == "ppo":
        enough = config.ppo.epochs is None and config.ppo.steps >= steps
        return config if enough else apply_settings(config, {"ppo.epochs": None, "ppo.steps": steps})
    section = config.supervised(stage)
    epochs, max_steps = max(section.epochs, steps), section.max_steps and max(section.max_steps, steps)
    return apply_settings(config, {f"{stage}.epochs": epochs, f"{stage}.max_steps": max_steps})


def draw_replies(trainer: PPOTrainer | DistillTrainer) -> None:
    """Let the trainer's decoder draw the replies of its rows, in their order, so that completions have their lengths.

    Without replies in the data, it draws as before, and a line says so.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    decoder = trainer.decoder
    texts = [text for example in trainer.data.train if (text := example.row.response or example.row.chosen)]
    if not texts:
        print_line("profile: the prompts have no replies, so completions are as long as an untrained model draws them")
        return
    end = int(decoder.eos_ids[0])
    encoded = trainer.tokenizer(texts, add_special_tokens=False)["input_ids"]
    replies = cycle(torch.tensor([*ids, end][: decoder.max_new_tokens]) for ids in encoded)
    draw_freely = decoder.generate

    def generate(model: Any, prompt_ids: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        rows = [next(replies) for _ in range(len(prompt_ids))]
        decoder.forced = pad_sequence(rows, batch_first=True, padding_value=decoder.pad_id)
        return draw_freely(model, prompt_ids, *arguments, **options)

    decoder.generate = generate  # type: ignore[method-assign]


def _measure_steps(trainer: Trainer, context: StageContext, count: int, trace: Path, start: float) -> Report:
    """Take a few steps of a stage in place of its loop, and return the measurements.

    Args:
        trainer: the stage's trainer.
        context: the stage's context.
        count: number of measured steps.
        trace: file for the recorded step.
        start: time at which the stage began, by `time.perf_counter`.
    """
    import torch.profiler

    from rlhf.trainers import loop

    context.directory.check_steps(trainer.total_steps)
    loop.resume_or_seed(trainer, context)
    set_up = time.perf_counter() - start
    with progress(count + _EXTRA_STEPS, f"{context.directory.name}: profiling", unit="steps") as bar:

        def take_step(index: int) -> dict[str, float]:
            metrics = loop.take_step(trainer, context, index)
            context.recorder.log(index + 1, metrics)
            context.commit()
            bar.advance()
            return metrics

        first, begin = take_step(0)["seconds"], time.perf_counter()
        steps, phase_times = [], []
        for index in range(1, count + 1):
            steps.append(take_step(index))
            phase_times.append(context.phases.phase_times())
        elapsed = time.perf_counter() - begin
        context.phases.waits = True
        with torch.profiler.profile(activities=torch.profiler.supported_activities()) as recording:
            take_step(count + 1)
        recording.export_chrome_trace(str(trace))

    def time_call(function: Callable[..., object], *arguments: Any) -> float:
        start = time.perf_counter()
        function(*arguments)
        context.accelerator.synchronize()
        return time.perf_counter() - start

    around = {
        "evaluation_seconds": time_call(trainer.evaluate, "after"),
        "checkpoint_seconds": time_call(loop.save_checkpoint, trainer, context, count + _EXTRA_STEPS),
        "saving_seconds": time_call(trainer.save, context.directory.path),
    }
    profile = profile_operators(recording.events())
    total = sum(step["seconds"] for step in steps)
    phases = {name: reduce(PhaseTime.plus, (times[name] for times in phase_times)) for name in phase_times[0]}
    rates = [key for key in ("tflops", "peak_share", "tokens_per_second") if key in steps[0]]
    return {
        "accelerator": context.accelerator.name,
        "device": context.accelerator.info().model,
        "peak_bandwidth": context.accelerator.info().peak_bandwidth,
        "precision": context.precision.name,
        "rows": len(trainer.data.train),
        "set_up_seconds": set_up,
        "first_step_seconds": first,
        "recording_seconds": (elapsed - total) / count,
        **around,
        "steps": count,
        "step_seconds": [step["seconds"] for step in steps],
        **{key: sum(step[key] * step["seconds"] for step in steps) / total for key in rates},
        "peak_memory": max(step["peak_memory"] for step in steps),
        "phases": [
            {"phase": name, "seconds": phase.seconds / count, "share": phase.seconds / total, **phase.rates()}
            for name, phase in phases.items()
        ],
        "traced_seconds": profile.seconds,
        "outside_operators": profile.idle,
        "on_device": profile.on_device,
        "operators": [
            {**operator._asdict(), "share": operator.seconds / profile.seconds} for operator in profile.operators
        ],
    }


def _print(report: Report, title: str, tsv: bool) -> None:
    seconds = report["step_seconds"]
    device = f"  one process on {report['accelerator']} ({report['device']}), {report['precision']}"
    console.print()
    print_line((title, "bold"), (device, "dim"))
    print_line(
        f"set-up {_format_time(report['set_up_seconds'])}, first step {_format_time(report['first_step_seconds'])}, "
        f"then {len(seconds)} steps of {_format_time(sum(seconds) / len(seconds))} on average "
        f"({_format_time(min(seconds))} to {_format_time(max(seconds))})"
    )
    names = ("evaluation", "checkpoint", "saving")
    print_line(", ".join(f"{name} {_format_time(report[f'{name}_seconds'])}" for name in names))
    share = f" ({_format_percent(report['peak_share'])} of the device's peak)" if "peak_share" in report else ""
    speed = f"{_format_number(report['tflops'])} TFLOP/s{share} · " if "tflops" in report else ""
    print_line(f"{speed}{format_bytes(report['peak_memory'])} peak memory")
    rows = [
        (
            phase["phase"],
            _format_time(phase["seconds"]),
            _format_percent(phase["share"]),
            _format_number(phase.get("tflops")),
            _format_number(phase.get("tokens_per_second")),
        )
        for phase in report["phases"]
    ]
    print_table("time of a step by phase", ("phase", "time", "share", "TFLOP/s", "tokens/s"), rows, tsv=tsv)
    for phase in report["phases"]:
        if "step_seconds" in phase:
            speed = phase.get("bytes_per_second")
            peak = report["peak_bandwidth"]
            share = f" ({_format_percent(speed / peak)} of the device's peak)" if speed and peak else ""
            read = f", weights read at {speed / 1e9:.3g} GB/s{share}" if speed else ""
            latency = _format_time(phase["step_seconds"])
            print_line(f"{phase['phase']}: {latency} per decoding step (one token of every row){read}")
    total, operators = report["traced_seconds"], report["operators"]
    others = operators[_OPERATORS_SHOWN:]
    rest = {"name": f"({len(others):,} others)", "phase": "", "seconds": sum(row["seconds"] for row in others)}
    idle = "(device idle)" if report["on_device"] else "(Python, between operators)"
    rows = [
        (
            row["name"],
            row["phase"],
            _format_time(row["seconds"]),
            _format_percent(row["seconds"] / total),
            f"{row['calls']:,}" if "calls" in row else "",
        )
        for row in (
            *operators[:_OPERATORS_SHOWN],
            rest,
            {"name": idle, "phase": "", "seconds": report["outside_operators"]},
        )
    ]
    kind = "kernel" if report["on_device"] else "operator"
    title = f"time of the recorded step ({_format_time(total)}) by {kind}"
    print_table(title, (kind, "phase", "time", "share", "calls"), rows, tsv=tsv)
    print_line(f"trace: {report['trace']} (open it in https://ui.perfetto.dev or chrome://tracing)")


def _format_time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _format_percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{float(f'{value:.3g}'):,g}"
