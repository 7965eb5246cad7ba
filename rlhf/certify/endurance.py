"""The checks of endurance: a killed run, a full device, and memory and graphs that do not grow with the steps.

The level also has the checks `resume` and `zero` of the first contact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from rlhf.certify.checks import (
    PPO_STEPS,
    SMALL_BATCHES,
    TOLERANCES,
    TOY_SHAPE,
    Check,
    Facts,
    Subject,
    compare_steps,
    read_run,
    read_steps,
)
from rlhf.certify.processes import CheckFailed
from rlhf.utils.statistics import student_quantile

STEPS, SAVED_AT, KILLED_AFTER = 8, 4, 5
"""Steps of a run, the step of its last checkpoint, and the step after which it is killed."""

FLAT_STEPS = {"sft": 120, "ppo": PPO_STEPS}
WARM_UP = 0.6
"""Share of the steps in which memory may still grow and graphs may still be compiled, as batches get longer and
libraries keep what they compile for each length."""
GROWTH = 0.02
"""Growth of memory that is not called a leak, as a share of what is in use, over the measured steps."""


def check_kill(subject: Subject, facts: Facts) -> None:
    """Kill a run between two checkpoints, and compare its losses with those of a run that was left alone."""
    settings = SMALL_BATCHES | {"sft.max_steps": STEPS, "sft.checkpoint_every": 0}
    whole, killed = subject.folder("whole"), subject.folder("killed")
    subject.must(subject.train(whole, settings, "--stages", "sft"))
    expected = read_steps(whole, "sft", "loss")
    try:
        subject.processes.task("train_until_killed", subject.name, str(killed), settings, SAVED_AT, KILLED_AFTER)
    except CheckFailed as error:
        if "SIGKILL" not in str(error):
            raise
    left = read_steps(killed, "sft", "loss")
    facts |= {"steps when it was killed": len(left), "left alone": expected}
    if len(left) != KILLED_AFTER:
        raise CheckFailed(f"{len(left)} steps were recorded when the run was killed, expected {KILLED_AFTER}")
    subject.must(subject.train(killed, settings, "--stages", "sft", "--resume"))
    facts["killed and resumed"] = losses = read_steps(killed, "sft", "loss")
    precision = read_run(whole)["accelerator"]["precision"]["name"]
    compare_steps("killed and resumed: losses", losses, expected, TOLERANCES[precision])


def check_out_of_memory(subject: Subject, facts: Facts) -> None:
    """Fill the memory in the middle of training; the error must say so, and training must not notice afterwards."""
    settings = SMALL_BATCHES | {"sft.max_steps": 4, "sft.checkpoint_every": 0}
    whole = subject.folder("undisturbed")
    subject.must(subject.train(whole, settings, "--stages", "sft"))
    facts |= {"undisturbed": read_steps(whole, "sft", "loss")}
    facts |= subject.processes.task("run_out_of_memory", subject.name, str(subject.folder("full")), settings, 2, 4)
    if not facts["recognized"]:
        raise CheckFailed(f"full memory is not recognized as out of memory: {facts['message']}")
    tolerance = TOLERANCES[facts["precision"]]
    compare_steps("after memory was full: losses", facts["losses"], facts["undisturbed"], tolerance)


def check_flat(subject: Subject, facts: Facts) -> None:
    """Take many steps; after the warm-up, memory must not grow and no graph may be compiled."""
    folders = {role: str(subject.folder(role)) for role in ("actor", "reward_model")}
    subject.processes.task("save_random_models", subject.name, folders, TOY_SHAPE)
    models = {f"ppo.{role}": folder for role, folder in folders.items()}
    for stage, steps in FLAT_STEPS.items():
        folder = str(subject.folder(f"flat-{stage}"))
        count = "max_steps" if stage == "sft" else "steps"
        settings: Facts = SMALL_BATCHES | {f"{stage}.{count}": steps, f"{stage}.checkpoint_every": 0}
        settings |= models | {"ppo.samples_every": 0}
        records = subject.processes.task("watch_steps", subject.name, folder, stage, settings, steps)["steps"]
        start = int(WARM_UP * steps)
        memory = [record["memory"] for record in records[start:]]
        if not any(memory):
            raise CheckFailed(f"{stage}: the backend's memory() reports 0 bytes in use after every step")
        slope, margin = fit_slope(memory)
        graphs = [record["compilations"] for record in records if record["compilations"] is not None]
        late = graphs[-1] - graphs[start - 1] if graphs else 0
        facts[stage] = {
            "steps": steps,
            "measured from step": start + 1,
            "bytes in use": round(fmean(memory)),
            "bytes per step": round(slope),
            "95 % interval": [round(slope - margin), round(slope + margin)],
            "graphs": graphs[-1] if graphs else "not counted",
            "graphs after the warm-up": late if graphs else "not counted",
        }
        if late:
            raise CheckFailed(f"{stage}: {late} graphs were compiled after step {start}, expected none")
        grown, allowed = (slope - margin) * len(memory), GROWTH * fmean(memory)
        if grown > allowed:
            raise CheckFailed(
                f"{stage}: memory grows by {slope:,.0f} bytes per step (95 % interval {slope - margin:,.0f} to "
                f"{slope + margin:,.0f}); expected at most {allowed / len(memory):,.0f}"
            )


def fit_slope(values: Sequence[float]) -> tuple[float, float]:
    """Return the slope of a line through values, per place, and half the width of its 95 % interval."""
    places = range(len(values))
    middle, mean = fmean(places), fmean(values)
    squares = math.fsum((place - middle) ** 2 for place in places)
    slope = math.fsum((place - middle) * (value - mean) for place, value in zip(places, values, strict=True)) / squares
    left = math.fsum(
        (value - mean - slope * (place - middle)) ** 2 for place, value in zip(places, values, strict=True)
    )
    degrees = len(values) - 2
    return slope, student_quantile(degrees) * math.sqrt(left / degrees / squares)


KILL = Check("kill", "a run that is killed between two checkpoints resumes with the same losses", check_kill)
OUT_OF_MEMORY = Check(
    "out-of-memory",
    "full memory is recognized and explained, and training continues with the same losses",
    check_out_of_memory,
)
FLAT = Check("flat", "after the warm-up, memory does not grow with the steps, and nothing is compiled", check_flat)
