"""Compute a recorded step again, and say if it equals the record, or what a change of settings moves."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.config.loader import apply_overrides, track
from rlhf.config.schema import EVERY_STAGE, Config, build_config
from rlhf.config.trust import admit_code
from rlhf.errors import ConfigError, RLHFError, RunError
from rlhf.launchers import local
from rlhf.launchers.exit_status import USER_ERROR, InternalError
from rlhf.replay.job import Job, RankOutcome, list_kept, read_origin
from rlhf.replay.recording import Entry, TensorDifference, compare_entries
from rlhf.reporting.step_records import PHASES, Phase, StepRecord, list_steps, read_steps
from rlhf.runs.description import read_description
from rlhf.runs.directory import RunDirectory, collect_versions
from rlhf.runs.resume import list_differing_settings
from rlhf.runs.stage_directory import StageDirectory, parse_step

_MACHINE = ("accelerator", "device", "ranks", "threads", "precision")
_ROUNDING = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}
"""Relative changes of numbers that another machine may cause."""

NO_EFFECT = {
    *("output", "accelerator", "timeout", "disk_wait", "reward_timeout", "nothing", "record_steps"),
    *("log_every", "checkpoint_every", "eval_every", "eval_rows", "keep", "samples_every", "samples", "save_critic"),
    *("sinks", "sinks_timeout", "save", "teacher_servers", "teacher_timeout"),
}
"""Keys that change no number of a step."""


class RecordedStep(NamedTuple):
    """A step of a run that can be computed again.

    Attributes:
        checkpoint: the nearest checkpoint before it; None: the stage's beginning.
        first: the first step that has to be computed.
    """

    run: RunDirectory
    stage: StageDirectory
    record: StepRecord
    checkpoint: Path | None

    @property
    def config(self) -> Config:
        """The recorded settings, with the folder in which the run is now."""
        return build_config(self.record.session["config"] | {"output": str(self.run.path)})

    @property
    def first(self) -> int:
        """The first step that has to be computed, from 1."""
        return (parse_step(self.checkpoint) if self.checkpoint else 0) + 1


@dataclass(frozen=True)
class Replay:
    """A step that was computed again.

    Attributes:
        found: what differs from the record, as (phase, line), the earliest phase first.
        entries: the tensors of all ranks.
        rounding: the reason why numbers were compared within rounding; empty: bit for bit.
        not_taken: why the step was not taken; empty if it was.
        kept: the run's files about a step that was not taken.
    """

    step: RecordedStep
    found: list[tuple[str, str]]
    entries: list[Entry]
    metrics: Mapping[str, float]
    rounding: str = ""
    not_taken: str = ""
    kept: list[Path] = field(default_factory=list)


def find_step(folder: Path, step: int, stage: str | None) -> RecordedStep:
    """Return a recorded step of the run in `folder`.

    Args:
        stage: its stage; None: the only one that has records, or else an error that names all.

    Raises:
        RunError, ConfigError: there is no such step, or its settings are not the run's any more.
    """
    run = RunDirectory(folder)
    if not run.description.is_file():
        raise RunError(f"{folder}: contains no run; name the folder that --output named")
    if stage is not None and stage not in EVERY_STAGE:
        raise ConfigError(f"--stage: no stage {stage!r}; use one of {', '.join(EVERY_STAGE)}")
    stages = [place for place in run.stages if place.steps.is_file() and stage in (None, place.name)]
    if not stages:
        raise RunError(
            f"{folder}: has no {f'{stage}/' if stage else ''}steps.bin, which record_steps=true writes while a stage "
            "trains; a step without a record cannot be computed again"
        )
    if len(stages) > 1:
        names = ", ".join(place.name for place in stages)
        raise ConfigError(f"{folder}: has steps of {names}; choose with --stage")
    place = stages[0]
    records = {record.step: record for record in read_steps(place.steps)}
    if step not in records:
        known = f"steps {min(records)} to {max(records)}" if records else "no whole step"
        remedy = "; give one of them with --step" if records else ""
        raise RunError(f"{place.steps}: has {known}, and not step {step}{list_steps(place.steps).note}{remedy}")
    checkpoints = [path for path in place.all_checkpoints if parse_step(path) < step]
    found = RecordedStep(run, place, records[step], checkpoints[-1] if checkpoints else None)
    _check_steps(found, records)
    _check_description(found)
    return found


def _check_steps(found: RecordedStep, records: Mapping[int, StepRecord]) -> None:
    """Raise `RunError` if a step that has to be computed was taken with other settings, ranks or versions."""
    session, place, step = found.record.session, found.stage, found.record.step
    for number in range(found.first, step):
        record = records.get(number)
        if record is None:
            raise RunError(f"{place.steps}: lacks step {number}, from which step {step} follows; give an earlier step")
        if record.session == session:
            continue
        changed = list_differing_settings(record.session["config"], session["config"], NO_EFFECT)
        changed += [
            f"{name} ({record.session[name]}, then {session[name]})"
            for name in _MACHINE
            if record.session[name] != session[name]
        ]
        if changed:
            raise RunError(
                f"{found.run.path}: step {number} was taken with other settings than step {step}, and no checkpoint is "
                f"between them: {', '.join(changed)}; give a step up to {_last_with(records, record.session)}"
            )
    here, then = collect_versions(), session["versions"]
    if other := [f"{name} {then.get(name)} (here {here[name]})" for name in ("rlhf",) if then.get(name) != here[name]]:
        raise RunError(f"{place.steps}: step {step} was recorded by {other[0]}; install that version to compute it")


def _last_with(records: Mapping[int, StepRecord], session: Mapping[str, Any]) -> int:
    return max(step for step, record in records.items() if record.session == session)


def _check_description(found: RecordedStep) -> None:
    """Raise `RunError` if run.json or recipe.yaml was edited: they have other settings than the newest record."""
    *_, newest = read_steps(found.stage.steps)
    recorded = read_description(found.run.description).get("config", {})
    sections = (found.stage.name, "seed", "model", "data", "engine", "lora", "alarms")
    then, now = ({key: values.get(key) for key in sections} for values in (newest.session["config"], recorded))
    of_stage = read_description(found.run.description).get("stages", {}).get(found.stage.name, {})
    now |= {key: of_stage[key] for key in ("engine", "lora") if key in of_stage}
    if changed := list_differing_settings(then, now, NO_EFFECT):
        raise RunError(
            f"{found.run.description}: has other settings than the steps were taken with: {', '.join(changed)}; "
            "restore it, and name changes with --change"
        )


def replay(found: RecordedStep, *, trust: bool = False) -> Replay:
    """Compute a step again, and compare it with the record.

    Raises:
        RLHFError: it cannot be computed.
    """
    admit_code([found.config], [found.run.recipe], [found.stage.name], trust=trust)
    with _open_job(found, found.config) as job:
        outcomes = _run(job)
    return _judge(found, outcomes)


def replay_with_changes(
    found: RecordedStep, changes: Sequence[str], *, trust: bool = False
) -> tuple[Replay, Replay, list[TensorDifference]]:
    """Compute a step as it was and with other settings in this one step, from the same state.

    Args:
        changes: `key=value` each, as `--set` takes them.

    Returns:
        The step as it was, the changed one, and the tensors that differ, in the order of computation.

    Raises:
        RLHFError: one of them cannot be computed.
    """
    config = found.config
    values = track(config.model_dump(mode="json"), f"{found.run.description}")
    changed = build_config(apply_overrides(values, changes, option="--change"))
    admit_code([config, changed], [found.run.recipe], [found.stage.name], trust=trust)
    with _open_job(found, config, saves=True) as job:
        first = _judge(found, _run(job))
        saved = StageDirectory(job.stage_folder, found.stage.name).latest_checkpoint
        with _open_job(found, changed, checkpoint=saved, changed=True) as other:
            try:
                second = _judge(found, _run(other))
            except RLHFError as error:  # its remedy is about a run
                reason = str(error).partition("; ")[0]
                raise RunError(
                    f"--change {', '.join(changes)}: step {found.record.step} cannot be taken with it from the run's "
                    f"state before that step: {reason}; change what leaves the trained weights the same"
                ) from error
    return first, second, compare_entries(first.entries, second.entries)


@contextmanager
def _open_job(
    found: RecordedStep,
    config: Config,
    *,
    checkpoint: Path | None = None,
    changed: bool = False,
    saves: bool = False,
) -> Iterator[Job]:
    """Yield a job in a temporary folder, where links stand for what it only reads."""
    with tempfile.TemporaryDirectory(prefix="rlhf-replay-") as name:
        start = checkpoint or found.checkpoint
        session = dict(found.record.session) | {"config": config.model_dump(mode="json")}
        job = Job(
            str(found.run.path.absolute()),
            name,
            found.stage.name,
            found.record.step,
            session,
            str(start or ""),
            changed=changed,
            saves=saves,
        )
        job.write()
        if start:
            if not start.is_dir():
                raise RunError(f"{start}: is gone; the run has replaced it, so repeat the command")
            (job.stage_folder / "checkpoints").mkdir()
            (job.stage_folder / "checkpoints" / start.name).symlink_to(start.absolute())
            reference = found.stage.path / "reference.safetensors"
            if reference.is_file() and not changed:
                shutil.copyfile(reference, job.stage_folder / reference.name)
        if changed:
            stages = Path(name, "run")
            stages.mkdir()
            for place in found.run.stages:
                if place.path.is_dir() and place.name != found.stage.name:
                    (stages / place.name).symlink_to(place.path.absolute())
        yield job


def _run(job: Job) -> list[RankOutcome]:
    """Run the ranks of a job and return what they computed.

    Raises:
        RLHFError: a rank failed with an error that the user can fix.
    """
    threads = {"OMP_NUM_THREADS": str(job.session["threads"])}
    before = {name: os.environ.get(name) for name in threads}
    os.environ.update(threads)
    try:
        command = local.rank_command(["recompute-step", str(job.file)])
        with open(2, "wb", closefd=False) as console:  # standard output is for the result
            status = local.spawn_ranks(job.session["ranks"], command, console=console)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    if status:
        message = status.message.removeprefix("rlhf: error: ")
        raise RLHFError(message) if status.code == USER_ERROR else InternalError(message)
    return RankOutcome.read_all(Path(job.folder))


def _judge(found: RecordedStep, outcomes: Sequence[RankOutcome]) -> Replay:
    """Compare what all ranks computed with the record."""
    session, record = found.record.session, found.record
    machine = outcomes[0].machine
    now, then = ({name: part[name] for name in _MACHINE} | part["versions"] for part in (machine, session))
    others = [f"{name} {now.get(name)} instead of {value}" for name, value in then.items() if now.get(name) != value]
    tolerance = _ROUNDING.get(session["precision"], 1e-3) if others else 0.0
    found_lines = []
    for outcome in outcomes:
        for phase, line in outcome.differences.items():
            if not tolerance or phase == "rows":
                found_lines.append((phase, f"{line}{f' (rank {outcome.rank})' if outcome.rank else ''}"))
    recorded = {name: number for name, number in record.metrics.items() if not name.startswith(_OF_SERVERS)}
    found_lines += _compare_metrics(recorded, outcomes[0].metrics, tolerance)
    entries = [entry for outcome in outcomes for entry in outcome.entries]
    kept = list_kept(found.stage, record.step)
    found_lines += _compare_origins(record, outcomes, kept)
    found_lines.sort(key=lambda pair: PHASES.index(pair[0]))
    not_taken = "" if outcomes[0].taken else "its gradients are not finite"
    for outcome in outcomes:
        if origin := outcome.origin:
            place = f"the {origin['quantity']} of {origin['layer'] or 'the loss'} ({origin['model']} model)"
            not_taken = f"the first numbers that are not finite are in {place}, rows {origin['rows']}"
            break
    return Replay(
        found,
        found_lines,
        entries,
        outcomes[0].metrics,
        "; ".join(others),
        not_taken,
        [kept[rank] for rank in sorted(kept)],
    )


def _compare_origins(
    record: StepRecord, outcomes: Sequence[RankOutcome], kept: Mapping[int, Path]
) -> Iterator[tuple[str, str]]:
    """Yield what differs about a step that was not taken, then or now."""
    if outcomes[0].taken and not record.metrics:
        yield "gradients", "the step was not taken because its gradients were not finite, and now they are"
    for outcome in outcomes:
        if outcome.origin and outcome.rank in kept and outcome.origin != (then := read_origin(kept[outcome.rank])):
            yield "gradients", f"numbers that are not finite began elsewhere: {outcome.origin}, then {then}"


def _compare_metrics(
    recorded: Mapping[str, float], computed: Mapping[str, float], tolerance: float
) -> Iterator[tuple[str, str]]:
    """Yield the metrics that differ, with the phase that each belongs to."""
    for name, then in recorded.items():
        now = computed.get(name)
        if now is None:
            yield phase_of(name), f"{name} was {then:.17g}, and the step has none now"
        elif now != then and not abs(now - then) <= tolerance * max(abs(then), 1):
            yield phase_of(name), f"{name} is {now:.17g}, and was {then:.17g}"


METRICS: dict[Phase, tuple[str, ...]] = {
    "gradients": ("grad_norm", "critic_grad_norm"),
    "update": (
        *("unequal_weights", "changed_frozen_weights", "unchanged_weights", "direction"),
        *("learning_rate", "lora_learning_rate"),
    ),
    "advantages": ("returns", "explained_variance"),
    "rollout": ("response_length", "truncated_share", "draw_gap", "draw_kl"),
    "loss": (
        *("loss", "policy_loss", "value_loss", "kl_loss", "ptx_loss", "clip_fraction", "value_clip_fraction"),
        *("approx_kl", "update_gap", "updates"),
    ),
}


_OF_SERVERS = ("handover_", "rollout_servers")
"""Beginnings of the metrics about the servers that drew a rollout."""


def phase_of(metric: str) -> Phase:
    """Return the phase of a step in which a metric is first known."""
    return next((phase for phase, names in METRICS.items() if metric in names), "scores")
