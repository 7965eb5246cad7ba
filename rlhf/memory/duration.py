"""Predictions of a stage's duration: from its arithmetic and a device's speed, or from the speed of an earlier run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlhf.config.schema import Config, Stage
from rlhf.errors import ConfigError
from rlhf.memory.environment import Environment
from rlhf.memory.model_state import ModelMemory
from rlhf.memory.stage import Models, build_models
from rlhf.runs.description import read_summary

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
    """Steps of a stage, seconds of each, and the part of them that generation takes."""

    steps: int
    seconds: float
    generation: float = 0.0


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


def measure_duration(config: Config, stage: Stage, measured: Path, rows: int | None) -> Duration | None:
    """Return the duration of a stage at the speed of the run in the folder `measured`; None if it lacks the stage.

    Args:
        rows: rows of the stage in one epoch; None if they are not known.

    Raises:
        ConfigError: the folder contains no run.
        RunError: the stage's summary was changed.
    """
    if not (measured / "run.json").is_file():
        raise ConfigError(f"--measured {measured}: holds no run; name a run's folder, the value of its --output")
    path = measured / stage / "stage.json"
    summary = read_summary(path) if path.is_file() else {}
    if not (summary.get("steps") and summary.get("seconds")):
        return None
    return Duration(count_steps(config, stage, rows) or summary["steps"], summary["seconds"] / summary["steps"])


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
