"""Hours and money of a stage: from the arithmetic that it takes and a throughput, or from steps that were measured.

A plan's shapes and a configuration flow in; seconds flow out. Products of matrices are counted, two operations a
number and token: forward once, backward twice, a layer recomputed once more; attention's own products are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf.config.schema import Config, Stage
from rlhf.errors import ConfigError
from rlhf.memory.model_state import Model
from rlhf.roles.roles import ModelPlacement, RoleName, model_placements


@dataclass(frozen=True)
class Duration:
    """`steps` of a stage, and how long each takes."""

    steps: int
    seconds_per_step: float

    @property
    def hours(self) -> float:
        return self.steps * self.seconds_per_step / 3600

    def cost(self, price: float, devices: int) -> float:
        """Money, where a device costs `price` an hour."""
        return self.hours * price * devices


def steps_of(config: Config, stage: Stage, rows: int | None) -> int | None:
    """Optimizer steps of a stage, in PPO rollouts; None where they depend on rows whose number is not given."""
    if stage == "ppo":
        return None if config.ppo.epochs and rows is None else config.ppo.total_steps(rows or 0)
    section = config.supervised(stage)
    if rows is None:
        return section.max_steps
    return section.total_steps(-(-rows // section.batch_size))


def operations(config: Config, stage: Stage, models: Mapping[RoleName, Model]) -> float:
    """Floating-point operations of one step, over all ranks, with rows as long as they may be."""
    held = model_placements(config, stage)
    if stage != "ppo":
        name = next(iter(held))
        rows = config.supervised(stage).batch_size * (1 if stage == "sft" else 2)
        each = _update(models[name], held[name])
        if stage == "dpo":  # the reference's forward pass: with every step, or once for all epochs
            scored = 2 * models[name].counts(held[name])[0]
            each += scored if config.dpo.reference == "beside" else scored / config.dpo.epochs
        return rows * config.data.max_length * each
    settings, tokens = config.ppo, config.ppo.batch_size * config.data.max_length
    scored = sum(2 * models[name].counts(held[name])[0] for name in held)
    scored += 0 if "reference" in held else 2 * models["actor"].counts(held["actor"])[0]  # the actor once more
    trained = (_update(models[name], placement) for name, placement in held.items() if placement.role.trained)
    updates = settings.ppo_epochs * sum(trained)
    return tokens * (2 * models["actor"].counts(held["actor"])[0] + scored + updates)


def from_throughput(
    config: Config, stage: Stage, models: Mapping[RoleName, Model], steps: int, tflops: float, devices: int
) -> Duration:
    """A stage on `devices`, each of which does `tflops` million million operations a second in training."""
    return Duration(steps, operations(config, stage, models) / (tflops * 1e12 * devices))


def from_run(folder: Path, stage: Stage, steps: int | None) -> Duration | None:
    """A stage at the pace of the run in `folder`, of as many steps where `steps` is not known; None: it has none.

    Raises:
        ConfigError: the folder holds no run.
    """
    if not (folder / "run.json").is_file():
        raise ConfigError(f"--measured {folder}: holds no run; name a run's folder, the value of its --output")
    try:
        done = json.loads((folder / stage / "stage.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not done.get("steps"):
        return None
    return Duration(steps or done["steps"], done["seconds"] / done["steps"])


def _update(model: Model, placement: ModelPlacement) -> float:
    """Operations of an update, for one token: gradients of weights are left out where those are frozen."""
    everything, _ = model.counts(placement)
    passes = 2 + (2 if placement.lora.rank else 4) + (2 if placement.gradient_checkpointing else 0)
    return passes * everything
