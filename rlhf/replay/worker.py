"""A rank that computes a recorded step again: earlier steps from what they drew, then the step itself, observed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.schema import Config, build_config
from rlhf.engine.select import choose_kernels, choose_shapes, select_accelerator
from rlhf.errors import RunError, StepNotTakenError
from rlhf.replay.job import Job, RankOutcome, list_kept, read_origin
from rlhf.reporting.console import console
from rlhf.reporting.progress import progress
from rlhf.reporting.step_records import RankStep, StepRecord, read_steps
from rlhf.utils.units import format_bytes

if TYPE_CHECKING:
    from accelerators import Accelerator
    from rlhf.trainers.context import StageContext
    from rlhf.trainers.distill import DistillTrainer
    from rlhf.trainers.ppo.experience import Rollout
    from rlhf.trainers.ppo.trainer import PPOTrainer
    from rlhf.trainers.trainer import Trainer

_STATE_BYTES = 16  # of a trained number in a checkpoint, at most: weight, two moments, average


def recompute(file: Path) -> None:
    """Do the job in a file as one of its ranks, and write the outcome next to it."""
    job = Job.read(file)
    os.environ.setdefault("OMP_NUM_THREADS", str(job.session["threads"]))
    config = build_config(job.session["config"])
    selection = select_accelerator(config, job.session["accelerator"])
    import torch

    from rlhf.engine import distributed

    torch.set_num_threads(job.session["threads"])
    console.quiet = True
    with distributed.start_process_group(selection, timeout=config.engine.timeout) as accelerator:
        choose_kernels(config, accelerator)
        outcome = _compute(job, config, accelerator)
        outcome.write(Path(job.folder))


def _compute(job: Job, config: Config, accelerator: Accelerator) -> RankOutcome:
    """Take the steps up to the job's, on this rank."""
    from rlhf.replay.recording import StepRecording
    from rlhf.trainers import loop, pipeline
    from rlhf.trainers.oom import translate_stage_errors

    context = _build_context(job, config, accelerator)
    rank = context.world.rank
    records = {record.step: record for record in read_steps(Path(job.run, job.stage, "steps.bin"))}
    with translate_stage_errors(context):
        if not job.changed:
            pipeline.compare_models(context)
        trainer = pipeline.build_trainer(context)
        first = loop.resume_or_seed(trainer, context)
        if job.changed and first and job.stage == "ppo":
            _set_kl_coefficient(trainer, config, records[job.step])
        with (
            console.loudly(),
            progress(job.step - first, f"{job.stage}: computing", unit="steps", enabled=rank == 0) as bar,
        ):
            for index in range(first, job.step - 1):
                console.quiet = True
                _take_recorded(trainer, context, index, records.get(index + 1))
                console.quiet = False
                bar.advance()
            console.quiet = True
            if job.saves and job.step - 1 > first:
                _save(trainer, context, job)
            recording = StepRecording(rank, accelerator.host_device())
            context.observation.observer = recording
            metrics = _take_last(trainer, context, job, records[job.step])
            context.observation.observer = None
            console.quiet = False
            bar.advance()
        own = trainer.describe_step()
    console.quiet = True
    differences = _compare(own, records[job.step].ranks[rank]) if rank < len(records[job.step].ranks) else {}
    machine = pipeline.describe_session(context)
    machine.pop("config")
    origin = read_origin(place) if (place := list_kept(context.directory, job.step).get(rank)) else {}
    numbers = loop.select_repeatable(metrics)
    return RankOutcome(rank, numbers, recording.entries, differences, machine, bool(metrics), origin)


def _build_context(job: Job, config: Config, accelerator: Accelerator) -> StageContext:
    """Return a context whose stage is in the job's folder; earlier stages are the run's, and only read."""
    from rlhf.engine import distributed
    from rlhf.reporting.recorder import Recorder
    from rlhf.runs.directory import RunDirectory
    from rlhf.runs.stage_directory import StageDirectory
    from rlhf.trainers.context import StageContext

    run, place = RunDirectory(Path(job.run)), StageDirectory(job.stage_folder, job.stage)
    if job.changed:  # a run without a description, with which rows and models would be compared
        run = RunDirectory(Path(job.folder, "run"))
    precision = accelerator.precision(job.session["precision"])
    shapes, world = choose_shapes(config, accelerator), distributed.world()
    recorder = Recorder(place, enabled=False)
    return StageContext(config, accelerator, precision, shapes, world, run, place, recorder)


def _take_recorded(trainer: Trainer, context: StageContext, index: int, record: StepRecord | None) -> None:
    """Take a step before the one of interest, with the completions and the functions' rewards that are recorded."""
    from rlhf.trainers import loop

    own = record.ranks[context.world.rank] if record else None
    if own is None or "ids" not in own.arrays:
        loop.take_step(trainer, context, index)
        return
    drawing: PPOTrainer | DistillTrainer = trainer  # type: ignore[assignment]  # no other draws
    drawing.given = own
    _give_scores(trainer, own)
    try:
        _take_drawn(drawing, context, index, own)
    finally:
        drawing.given = None


def _give_scores(trainer: Trainer, own: RankStep) -> None:
    """Let distillation take what its teacher's servers have said, instead of asking them."""
    from rlhf.trainers.distill import DistillTrainer

    if isinstance(trainer, DistillTrainer):
        trainer.scored = own


def _take_drawn(
    trainer: PPOTrainer | DistillTrainer, context: StageContext, index: int, own: RankStep
) -> dict[str, float]:
    """Take a step of a stage that draws; only PPO's completions have rewards."""
    from rlhf.trainers import loop
    from rlhf.trainers.distill import DistillTrainer

    if isinstance(trainer, DistillTrainer):
        return loop.take_step(trainer, context, index)
    return _take_with_rewards(trainer, context, index, own)


def _take_with_rewards(trainer: PPOTrainer, context: StageContext, index: int, own: RankStep) -> dict[str, float]:
    """Take a PPO step; completions that equal the recorded ones get the functions' recorded rewards."""
    import torch

    from rlhf.trainers import loop

    settings_reward: Any = trainer.reward_fn
    functions = getattr(settings_reward, "functions", None)
    parts = [own.arrays[name] for name in own.arrays if name.startswith("part/reward/")]

    def is_recorded(rollout: Rollout) -> bool:
        from rlhf.trainers.ppo.recorded_rollout import list_tokens

        lengths, tokens = list_tokens(rollout)
        recorded = own.arrays["lengths"].tolist(), own.arrays["ids"].tolist()
        return bool((lengths, tokens) == recorded)

    def reward(rollout: Rollout, model_scores: Any, examples: Sequence[Any]) -> Any:
        settings_reward.functions = (
            (lambda samples: [part[: len(samples)].tolist() for part in parts])
            if functions and is_recorded(rollout)
            else functions
        )
        try:
            return settings_reward(rollout, model_scores, examples)
        finally:
            settings_reward.functions = functions

    def given(rollout: Rollout, model_scores: Any, examples: Sequence[Any]) -> Any:
        if not is_recorded(rollout):
            raise RunError(
                f"{context.directory.name}: the rewards of this step came from a program, which cannot be asked about "
                "other completions; leave out --change, or change what does not move the rollout"
            )
        return torch.from_numpy(own.arrays["given"].copy()).to(rollout.action_mask.device), {}

    if "given" in own.arrays:
        return loop.take_step(trainer, context, index, lambda number: trainer.step(number, reward_fn=given))
    trainer.reward_fn = reward
    try:
        return loop.take_step(trainer, context, index)
    finally:
        trainer.reward_fn = settings_reward


def _take_last(trainer: Trainer, context: StageContext, job: Job, record: StepRecord) -> dict[str, float]:
    """Take the step of interest, drawing again; return its metrics, or nothing if it was not taken.

    What servers have drawn or scored is recorded.
    """
    from rlhf.trainers import loop

    rank = context.world.rank
    own = record.ranks[rank] if rank < len(record.ranks) else RankStep([])
    try:
        if "ids" in own.arrays:
            drawing: PPOTrainer | DistillTrainer = trainer  # type: ignore[assignment]
            drawing.given = own if job.stage == "ppo" and context.config.ppo.rollout.where else None
            _give_scores(trainer, own)
            drawing.generate = partial(  # type: ignore[method-assign]
                _generate_in_columns, drawing, drawing.generate, own.columns
            )
            return _take_drawn(drawing, context, job.step - 1, own)
        return loop.take_step(trainer, context, job.step - 1)
    except StepNotTakenError:
        return {}


def _generate_in_columns(
    trainer: PPOTrainer | DistillTrainer, generate: Callable[..., Rollout], columns: int, prompts: Any, *copies: int
) -> Rollout:
    """Draw, in as many columns as the run had: it may have met the batch's shape before, which adds no padding then."""
    from torch.nn.functional import pad

    from rlhf.generation.decoder import Completions

    rollout = generate(prompts, *copies)
    own = rollout.completion_length
    mask = rollout.attention_mask[:, -own:]
    if own == columns or int(mask.sum(1).max()) > columns:
        return rollout
    ids, log_probs = rollout.input_ids[:, -own:], rollout.drawn_log_probs
    more = (0, columns - own)
    return trainer.policy.join(
        prompts,
        Completions(
            pad(ids, more, value=trainer.tokenizer.pad_token_id),
            pad(mask, more),
            None if log_probs is None else pad(log_probs, more),
        ),
    )


def _set_kl_coefficient(trainer: Any, config: Config, record: StepRecord) -> None:
    """Replace the KL coefficient, which a checkpoint has, if the change is about it."""
    if config.ppo.kl_coef != record.session["config"]["ppo"]["kl_coef"]:
        trainer.shaping.kl_coef = config.ppo.kl_coef


def _save(trainer: Trainer, context: StageContext, job: Job) -> None:
    """Save the state before the step of interest, if there is room for it."""
    from rlhf.engine import distributed
    from rlhf.trainers import loop

    trained = sum(engine.parameter_counts["trainable"] for engine in trainer.engines.values())
    needed, free = trained * _STATE_BYTES, shutil.disk_usage(job.folder).free
    with distributed.on_main("looking for room") as main:
        if main and needed > free:
            raise RunError(
                f"{job.folder}: a checkpoint of the step before needs {format_bytes(needed)}, and {format_bytes(free)} "
                "are free; set TMPDIR to a folder with more room"
            )
    loop.save_checkpoint(trainer, context, job.step - 1)


def _compare(own: RankStep, recorded: RankStep) -> dict[str, str]:
    """Return what this rank read and drew in another way than recorded, by phase."""
    differences: dict[str, str] = {}
    if own.rows != recorded.rows:
        places = [place for place, (now, then) in enumerate(zip(own.rows, recorded.rows)) if now != then]
        differences["rows"] = f"the step has {len(own.rows)} rows, not {len(recorded.rows)}"
        if places:
            place = places[0]
            differences["rows"] = f"row {place} of the step is number {own.rows[place]}, not {recorded.rows[place]}"
    elif own.digests.get("rows") != recorded.digests.get("rows"):
        differences["rows"] = "the rows have the same numbers and other tokens"
    if own.digests.get("generator") != recorded.digests.get("generator"):
        differences["rollout"] = "the generator that draws was in another state"
    for name in ("lengths", "ids"):
        if name in recorded.arrays and own.arrays[name].tolist() != recorded.arrays[name].tolist():
            differences.setdefault("rollout", f"other tokens were drawn ({_first(own, recorded)})")
    if own.digests.get("log_probs") != recorded.digests.get("log_probs"):
        differences.setdefault("rollout", "the same tokens were drawn with other log-probabilities")
    for name in ("reward", "given"):
        if name in recorded.arrays and name in own.arrays:
            pairs = zip(own.arrays[name].tolist(), recorded.arrays[name].tolist())
            for row, (now, then) in enumerate(pairs):
                if now != then:
                    differences.setdefault("scores", f"the reward of row {row} is {now:.9g}, not {then:.9g}")
    return differences


def _first(own: RankStep, recorded: RankStep) -> str:
    pairs = zip(own.arrays["ids"].tolist(), recorded.arrays["ids"].tolist())
    place = next((number for number, (now, then) in enumerate(pairs) if now != then), None)
    return "lengths differ" if place is None else f"the first at token {place} of the rollout"
