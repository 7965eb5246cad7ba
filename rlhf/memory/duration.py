"""Predictions of a stage's duration: from its arithmetic and a device's speed, or from measurements.

Measurements are those of `rlhf profile`, or of an earlier run.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from rlhf.config.schema import Config, Stage
from rlhf.errors import ConfigError
from rlhf.memory.environment import Environment
from rlhf.memory.model_state import ModelMemory
from rlhf.memory.stage import Models, build_models
from rlhf.runs.description import read_summary
from rlhf.utils.units import format_count

if TYPE_CHECKING:
    from accelerators import KnownDevice

_SLOWER_GENERATION = 3.2
"""Time per FLOP of generation over that of training on devices with separate memory: known_devices.yaml's median."""


class Flops(NamedTuple):
    """FLOPs of PPO's or distillation's generation, and of everything else (scoring, updates, other stages).

    Generation reads all weights for each token, so a device reaches a much smaller part of its peak there.
    """

    generation: float
    training: float


class Speed(NamedTuple):
    """FLOP/s of one device in generation and in everything else, with their source in words."""

    generation: float
    training: float
    source: str


class Duration(NamedTuple):
    """Steps of a stage, seconds of each, and the part of them that generation takes.

    Attributes:
        outside: seconds of the stage outside its steps: set-up, evaluations, checkpoints, and saving the model.
        start: seconds before the first stage of a run: imports and checks.
    """

    steps: int
    seconds: float
    generation: float = 0.0
    outside: float = 0.0
    start: float = 0.0

    @property
    def hours(self) -> float:
        """The hours of the stage, without the start of the run."""
        return (self.steps * self.seconds + self.outside) / 3600


class StageProfile(TypedDict):
    """The entries of a report of `rlhf profile --json` that predictions need."""

    __pydantic_config__ = ConfigDict(extra="ignore")  # type: ignore[misc]

    stage: Stage
    rows: int
    start_seconds: float
    set_up_seconds: float
    first_step_seconds: float
    step_seconds: list[float]
    recording_seconds: float
    evaluation_seconds: float
    checkpoint_seconds: float
    saving_seconds: float


def find_speed(environment: Environment, device: KnownDevice | None, tflops: float | None) -> Speed | None:
    """Return the speed of a device; None if there is no figure.

    Args:
        environment: states the precision.
        device: a known device; None if there is none.
        tflops: TFLOP/s in all phases, in place of the device's.
    """
    if tflops:
        return Speed(tflops * 1e12, tflops * 1e12, f"{tflops:g} TFLOP/s (--tflops)")
    peak = device.peak_flops.get(environment.precision) if device else None
    if not (device and peak):
        return None
    generation, training = device.generation_share, device.training_share
    source = (
        f"generation at {100 * generation:.0f} % and training at {100 * training:.0f} % of {peak / 1e12:g} TFLOP/s in "
        f"{environment.precision}, a guess from published figures"
    )
    return Speed(generation * peak, training * peak, source)


def measure_duration(config: Config, stage: Stage, measured: Path, rows: int | None, devices: int) -> Duration | None:
    """Return the duration of a stage at the speed of a run or a profile; None if it lacks the stage.

    Args:
        measured: the folder of a run, or a file that `rlhf profile --json` wrote.
        rows: rows of the stage in one epoch; None if they are not known.
        devices: number of devices, one for each rank.

    Raises:
        ConfigError: the folder contains no run, or one on another number of devices; or the file has no profiles.
        RunError: the stage's summary was changed.
    """
    if measured.is_file():
        profiles = {profile["stage"]: profile for profile in read_profiles(measured)}
        return predict_duration(config, profiles[stage], rows) if stage in profiles else None
    if not (measured / "run.json").is_file():
        raise ConfigError(
            f"--measured {measured}: holds no run; name a run's folder, or the output of rlhf profile --json"
        )
    path = measured / stage / "stage.json"
    summary = read_summary(path) if path.is_file() else {}
    if not (summary.get("steps") and summary.get("seconds")):
        return None
    if (ranks := summary.get("ranks", devices)) != devices:
        raise ConfigError(
            f"--measured {measured}: was measured on {format_count(ranks, 'ranks')}, and the plan has "
            f"{format_count(devices, 'devices')}; give --devices {ranks}"
        )
    set_up = summary.get("set_up_seconds", 0.0)
    seconds = (summary["seconds"] - set_up) / summary["steps"]
    return Duration(count_steps(config, stage, rows) or summary["steps"], seconds, outside=set_up)


def read_profiles(path: Path) -> list[StageProfile]:
    """Return the reports in a file that `rlhf profile --json` wrote.

    Raises:
        ConfigError: it has none, or cannot be read.
    """
    try:
        return TypeAdapter(list[StageProfile]).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(f"--measured {path}: holds no output of rlhf profile --json; write it again") from error


def predict_duration(config: Config, profile: StageProfile, rows: int | None) -> Duration:
    """Return the duration of a stage from its profile.

    The longer first step, and the evaluations and checkpoints that the settings ask for, are outside the steps. If the
    best model is kept, each evaluation after training has started counts as the best so far, whose model is saved.

    Args:
        rows: rows of the stage in one epoch; None for those that were profiled.
    """
    stage = profile["stage"]
    steps = config.total_steps(stage, rows or profile["rows"])
    section = config.ppo if stage == "ppo" else config.supervised(stage)
    every = section.eval_every
    if every == "epoch":
        every = -(-(rows or profile["rows"]) // section.batch_size)
    evaluations = 2 + ((steps - 1) // every if every else 0)  # before, after, and in between
    checkpoints = -(-steps // section.checkpoint_every) if section.checkpoint_every else 1  # one after the last step
    saved = evaluations - 1 if section.selection_metric else 1
    computing = statistics.fmean(profile["step_seconds"])
    outside = (
        profile["set_up_seconds"]
        + max(profile["first_step_seconds"] - computing, 0.0)
        + evaluations * profile["evaluation_seconds"]
        + checkpoints * profile["checkpoint_seconds"]
        + saved * profile["saving_seconds"]
    )
    seconds = computing + profile["recording_seconds"]
    return Duration(steps, seconds, outside=outside, start=profile["start_seconds"])


def estimate_duration(
    config: Config, stage: Stage, environment: Environment, speed: Speed, rows: int | None
) -> Duration | None:
    """Return the duration of a stage at a speed; None if its number of steps is not known.

    Args:
        rows: rows of the stage in one epoch; None if they are not known.
    """
    steps = count_steps(config, stage, rows)
    if not steps:
        return None
    flops = count_flops(config, stage, build_models(config, stage, environment))
    generation = flops.generation / (speed.generation * environment.ranks)
    seconds = generation + flops.training / (speed.training * environment.ranks)
    return Duration(steps, seconds, generation / seconds)


def compare_later_stages(config: Config, steps: Mapping[Stage, int], environment: Environment) -> dict[Stage, float]:
    """Return for each stage about how long the stages after it will take, relative to its own duration.

    The guess follows from their FLOPs, without the speed of the device.

    Args:
        steps: the steps of the stages to run, in order.

    Raises:
        ConfigError: the shape of a model is not known.
    """
    slower = 1.0 if environment.unified_memory else _SLOWER_GENERATION
    later, work = {}, 0.0
    for stage in reversed(list(steps)):
        flops = count_flops(config, stage, build_models(config, stage, environment))
        own = steps[stage] * (slower * flops.generation + flops.training)
        later[stage] = work / own
        work += own
    return later


def count_steps(config: Config, stage: Stage, rows: int | None) -> int | None:
    """Return the optimizer steps of a stage, in PPO its rollouts; None if they depend on `rows`, which is None."""
    if rows is not None:
        return config.total_steps(stage, rows)
    if stage == "ppo":
        return None if config.ppo.epochs else config.ppo.steps
    return config.supervised(stage).max_steps


def count_flops(config: Config, stage: Stage, models: Models) -> Flops:
    """Return the FLOPs of one step, over all ranks, with rows of maximum length.

    Only matrix products with weights are counted, at two FLOPs for each weight and token: forward once, backward
    twice, and once more for a recomputed layer. Products of attention are not counted.
    """
    model = next(iter(models.values()))
    if stage == "distill":
        settings = config.distill
        tokens = settings.batch_size * config.data.max_length
        training = settings.updates * _update_flops(model)
        training += 2 * models["teacher"].parameters if "teacher" in models else 0  # else servers read for it
        return Flops(tokens * 2 * model.parameters, tokens * training)
    if stage != "ppo":
        rows = config.supervised(stage).batch_size * (1 if stage == "sft" else 2)
        flops = _update_flops(model)
        if stage == "dpo":  # the reference's forward pass: in every step, or once for all epochs
            flops += 2 * model.parameters / (1 if config.dpo.reference == "beside" else config.dpo.epochs)
        return Flops(0, rows * config.data.max_length * flops)
    models = {name: model for name, model in models.items() if model.placement.role.in_steps}
    tokens, actor = config.ppo.batch_size * config.data.max_length, models["actor"]
    scored = sum(2 * model.parameters for model in models.values())
    scored += 0 if "reference" in models else 2 * actor.parameters  # the actor once more
    trained = sum(_update_flops(model) for model in models.values() if model.placement.role.trained)
    return Flops(tokens * 2 * actor.parameters, tokens * (scored + config.ppo.ppo_epochs * trained))


def _update_flops(model: ModelMemory) -> float:
    """Return the FLOPs of an update per token; frozen weights have no gradient."""
    backward = 2 if model.placement.lora.rank else 4
    recomputed = 2 if model.placement.gradient_checkpointing else 0
    return (2 + backward + recomputed) * model.parameters
