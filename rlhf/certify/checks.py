"""The checks of the first contact and of numerics; those of endurance have their own file.

The simplest comes first, so that the first failure is the cause of others. A check is a function of the `Subject` that
adds facts to the report, and raises `CheckFailed` if its expectation is not met. It runs in the command's process and
opens no device itself. `levels.py` lists the levels with their checks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from accelerators import REFERENCE
from rlhf.certify.processes import CheckFailed, Finished, Processes
from rlhf.config.schema import STAGES

Facts = dict[str, Any]

TOLERANCES = {"fp32": 2e-3, "bf16": 2e-2, "fp16": 2e-2}
"""Relative differences of losses that rounding explains, in a few steps."""
NORM_SLACK = 3.0
"""Norms of gradients may differ by this many times as much."""

SMALL_BATCHES = {
    **{f"{stage}.{key}": 4 for stage in STAGES for key in ("batch_size", "eval_rows")},
    "ppo.minibatch_size": 2,
    "data.max_completion_length": 16,
}
TOY_STAGES = SMALL_BATCHES | {"sft.max_steps": 8, "sft.batch_size": 16, "reward.max_steps": 4, "ppo.steps": 2}
FULL_STAGES = {
    "sft.max_steps": 20,
    "reward.max_steps": 10,
    "ppo.steps": 4,
    "sft.eval_rows": 32,
    "reward.eval_rows": 32,
    "ppo.eval_rows": 16,
    "ppo.batch_size": 16,
    "ppo.minibatch_size": 8,
}
TWO_STEPS = SMALL_BATCHES | {"sft.max_steps": 2, "reward.max_steps": 2, "engine.zero_persistence_threshold": 0}

ONE_BILLION = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "tie_word_embeddings": True,
}
"""The shape of Llama 3.2 1B."""
TOY_SHAPE = ONE_BILLION | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
FULL_PPO = {
    "ppo.batch_size": 32,
    "ppo.minibatch_size": 16,
    "ppo.micro_batch_size": 4,
    "data.max_completion_length": 128,
    # The embedded recipe's rates are for a tiny model.
    "ppo.optimizer.learning_rate": 1e-6,
    "ppo.critic_optimizer.learning_rate": 1e-6,
}
ROOM_FOR_ALL_WEIGHTS = 60 * 2**30
"""Bytes of a device in which all weights of four models with this shape can be trained; below, LoRA is."""
PPO_STEPS = 20
WORKSPACES = 192 * 2**20
"""Bytes that libraries keep on a device after a stage: one for matrix products keeps 32 MiB per handle and stream."""


@dataclass
class Subject:
    """The backend under test.

    Attributes:
        name: the backend.
        devices: the number of its devices on this machine.
        full: with the sizes of real models; otherwise toy sizes.
        processes: starts everything that opens the device.
    """

    name: str
    devices: int
    full: bool
    processes: Processes

    @cached_property
    def explanation(self) -> Facts:
        """The output of `rlhf accelerators explain`."""
        finished = self.must(self.processes.rlhf("accelerators", "explain", self.name, "--json"))
        facts: Facts = json.loads(finished.stdout)
        return facts

    def must(self, finished: Finished) -> Finished:
        """Return the end of a process that succeeded.

        Raises:
            CheckFailed: it did not.
        """
        if finished.code != 0:
            raise CheckFailed(finished.error)
        return finished

    def folder(self, name: str) -> Path:
        """Return the path of a folder for a run, which does not exist yet."""
        return self.processes.folder / name

    def train(self, output: Path, settings: Mapping[str, Any], *options: str, **variables: str) -> Finished:
        """Run the stages that `options` name."""
        changes = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        name = variables.pop("accelerator", self.name)
        command = ("--accelerator", name, "--output", str(output), *options, *changes)
        return self.processes.rlhf(*command, variables=variables)

    def precisions(self) -> list[str]:
        """Return the 16-bit precisions that the device grants, or else fp32; only that of runs at toy size."""
        granted = self.explanation["precisions"]
        names = [name for name in ("bf16", "fp16") if granted[name]["ok"]] or ["fp32"]
        return names if self.full else [granted["auto"]["name"]]


@dataclass(frozen=True)
class Check:
    """One check: its name, what is expected, and the time limit of each of its processes in seconds.

    The time limit of its level, if it has one, applies too.
    """

    name: str
    expected: str
    run: Callable[[Subject, Facts], None]
    seconds: float = 7200.0


def check_product(subject: Subject, facts: Facts) -> None:
    """Compare matrix products."""
    facts |= subject.processes.task("compare_with_cpu", subject.name, "product", subject.full)


def check_explain(subject: Subject, facts: Facts) -> None:
    """Ask the backend to explain itself."""
    from accelerators import OPERATIONS

    facts |= subject.explanation
    for name, operation in OPERATIONS.items():
        support = facts["operations"][name]
        if not support["ok"] and not operation.optional:
            raise CheckFailed(f"no {name}: {support['reason']}")
    if not facts["precisions"]["auto"]["ok"]:
        raise CheckFailed(f"no precision: {facts['precisions']['auto']['reason']}")


def check_conformance(subject: Subject, facts: Facts) -> None:
    """Run the conformance kit."""
    finished = subject.processes.rlhf("accelerators", "check", subject.name, "--json")
    if not finished.stdout.strip():
        raise CheckFailed(finished.error)
    facts["report"] = report = json.loads(finished.stdout)
    failed = [check for check in report if check["result"] == "failed"]
    if failed or finished.code:
        names = ", ".join(check["check"] for check in failed)
        reason = failed[0]["reason"] if failed else finished.error
        raise CheckFailed(f"{names or 'the kit'} failed: {reason}")


def check_attention(subject: Subject, facts: Facts) -> None:
    """Compare attention at several lengths."""
    facts |= subject.processes.task("compare_with_cpu", subject.name, "attention", subject.full)


def check_indexing(subject: Subject, facts: Facts) -> None:
    """Compare operators on indices."""
    facts |= subject.processes.task("compare_with_cpu", subject.name, "indexing", subject.full)


def check_decoding(subject: Subject, facts: Facts) -> None:
    """Compare recorded and plain steps of generation."""
    facts |= subject.processes.task("compare_decoding", subject.name, subject.full)


def check_stages(subject: Subject, facts: Facts) -> None:
    """Train the embedded example in three stages, and look at what is left in memory after each."""
    for precision in subject.precisions():
        output = subject.folder(f"stages-{precision}")
        settings = (FULL_STAGES if subject.full else TOY_STAGES) | {"precision": precision}
        memory = subject.processes.task("train_stages", subject.name, str(output), settings)
        facts[precision] = {"memory": memory} | {
            stage: {key: summary[key] for key in ("before", "after", "seconds", "peak_memory")}
            for stage in STAGES
            for summary in [json.loads((output / stage / "stage.json").read_text(encoding="utf-8"))]
        }
        _judge_stages(facts, precision, memory)
        if parts := memory["fallbacks"]:
            raise CheckFailed(f"{precision}: {', '.join(parts)} were not recorded or compiled; the log has the reason")


def _judge_stages(facts: Facts, precision: str, memory: Facts) -> None:
    perplexity = [facts[precision]["sft"][when]["perplexity"] for when in ("before", "after")]
    if not perplexity[1] < perplexity[0]:
        raise CheckFailed(
            f"{precision}: SFT has not learned: held-out perplexity {perplexity[0]:.1f} before, {perplexity[1]:.1f} "
            "after"
        )
    start = memory["start"]
    for stage in STAGES:
        left = memory[stage]["parameters"] - start["parameters"]
        if left > 0:
            raise CheckFailed(f"{precision}: {stage} has left {left:,} bytes of parameters in memory, expected 0")
        grown = memory[stage]["allocated"] - start["allocated"]
        allowed = WORKSPACES + facts[precision][stage]["peak_memory"] // 10
        if memory["separate memory"] and grown > allowed:
            raise CheckFailed(
                f"{precision}: {stage} has left {grown:,} bytes on the device, expected at most {allowed:,}"
            )


def check_zero(subject: Subject, facts: Facts) -> None:
    """Compare ZeRO 0 to 3 of several ranks with ZeRO 0 of one, and look at which weights LoRA changes."""
    ranks = _choose_ranks(subject)
    rows = dict.fromkeys((key for key in SMALL_BATCHES if key.endswith(("batch_size", "eval_rows"))), max(4, ranks))
    expected: dict[str, list[float]] = {}
    for stage, wanted in [(0, 1), *((stage, ranks) for stage in range(4))]:
        count = min(wanted, ranks)
        if (what := f"ZeRO {stage} with {count} {'rank' if count == 1 else 'ranks'}") in facts:
            continue
        output = subject.folder(f"zero-{stage}-{count}")
        options = ("--stages", "sft,reward" if subject.full else "sft", "--ranks", str(count))
        settings = TWO_STEPS | rows | {"engine.zero_stage": stage}
        finished = subject.train(output, settings, *options)
        if finished.code == 2 and count > subject.devices and stage == 0:
            facts[what] = f"not possible, because ranks cannot share a device here: {finished.error}"
            ranks = 1
            continue
        if finished.code == 2 and stage == 3:
            dry = subject.train(subject.folder("zero-3-dry"), settings, *options, "--dry-run")
            if dry.code == 2 and "engine.zero_stage" in dry.error:  # refused before the device does any work
                facts[what] = f"refused: {dry.error}"
                continue
        if finished.code:
            raise CheckFailed(f"{what}: {finished.error}")
        precision = read_run(output)["accelerator"]["precision"]["name"]
        parts = [part for part in ("sft", "reward") if (output / part).is_dir()]
        facts[what] = numbers = {
            key: [number for part in parts for number in read_steps(output, part, key)] for key in ("loss", "grad_norm")
        }
        expected = expected or numbers
        compare_steps(f"{what}: losses", numbers["loss"], expected["loss"], TOLERANCES[precision])
        if precision != "fp16":  # in which the first gradients overflow, and have no norm
            norms = numbers["grad_norm"], expected["grad_norm"]
            compare_steps(f"{what}: norms of gradients", *norms, NORM_SLACK * TOLERANCES[precision])
    settings = TWO_STEPS | {"sft.max_steps": 8, "lora.rank": 4}
    adapters = subject.processes.task("train_adapters", subject.name, str(subject.folder("lora")), settings, 4)
    facts["lora"] = adapters
    for wrong in ("unchanged adapters", "changed frozen weights"):
        if names := adapters[wrong]:
            raise CheckFailed(f"LoRA: {wrong} after 4 steps: {len(names)}, expected none; the first is {names[0]}")
    if not adapters["adapters"] or not adapters["frozen"]:
        raise CheckFailed("LoRA: expected adapters and frozen weights")


def check_resume(subject: Subject, facts: Facts) -> None:
    """Save in the middle of fine-tuning, and resume on this device, in its other modes, and on the CPU."""
    saved, steps = 2, 4
    granted = subject.explanation["precisions"]
    precision = "fp32" if granted["fp32"]["ok"] else granted["auto"]["name"]
    settings = SMALL_BATCHES | {"sft.max_steps": steps, "precision": precision, "sft.checkpoint_every": 0}
    output = subject.folder("saved")
    task = subject.processes.task
    whole = task("save_in_the_middle", subject.name, str(output), settings, saved, steps)["losses"]
    facts |= {"precision": precision, "uninterrupted": whole}
    places: dict[str, dict[str, str]] = {"this device": {}}
    places |= {f"{mode} mode": variables for mode, variables in task("list_other_modes", subject.name).items()}
    places |= {"the CPU": {"accelerator": REFERENCE}} if subject.name != REFERENCE else {}
    for place, variables in places.items():
        if mode := {key: value for key, value in variables.items() if key != "accelerator"}:
            try:
                task("compare_with_cpu", subject.name, "product", False, variables=mode)
            except CheckFailed as error:
                if not error.refused:
                    raise
                facts[place] = f"not available: {error}"
                continue
        copy = subject.folder(f"resumed-{len(facts)}")
        shutil.copytree(output, copy)
        finished = subject.train(copy, settings, "--stages", "sft", "--resume", **variables)
        refusal = "precision bf16" in finished.error or "precision fp16" in finished.error
        if finished.code == 2 and precision != "fp32" and refusal:
            facts[place] = f"not available: {finished.error}"
            continue
        if finished.code:
            raise CheckFailed(f"resumed on {place}: {finished.error}")
        facts[place] = losses = read_steps(copy, "sft", "loss")
        if len(losses) != steps:
            raise CheckFailed(f"resumed on {place}: {len(losses)} steps are recorded, expected {steps}")
        compare_steps(f"resumed on {place}: losses", losses[saved:], whole[saved:], TOLERANCES[precision])


def check_ppo_steps(subject: Subject, facts: Facts) -> None:
    """Take twenty steps of PPO with random weights, and look at seconds by phase and at late compilations."""
    shape = ONE_BILLION if subject.full else TOY_SHAPE
    settings: Facts = FULL_PPO if subject.full else SMALL_BATCHES
    total = subject.explanation["memory"]["total"]
    settings = settings | {"ppo.steps": PPO_STEPS, "ppo.samples_every": 0, "ppo.checkpoint_every": 0}
    settings |= {"lora.rank": 16} if subject.full and total < ROOM_FOR_ALL_WEIGHTS else {}
    folders = {role: str(subject.folder(role)) for role in ("actor", "reward_model")}
    subject.processes.task("save_random_models", subject.name, folders, shape)
    settings |= {f"ppo.{role}": folder for role, folder in folders.items()}
    arguments = (subject.name, str(subject.folder("ppo")), settings, PPO_STEPS)
    facts |= subject.processes.task("take_ppo_steps", *arguments)
    counts = [step["compilations"] for step in facts["steps"] if "compilations" in step]
    late = counts[-1] - counts[2] if counts else 0
    facts |= {"compilations after step 3": late if counts else "not counted", "settings": settings, "shape": shape}
    if late:
        raise CheckFailed(f"{late:.0f} graphs were compiled after step 3, expected none")
    if parts := facts["fallbacks"]:
        raise CheckFailed(f"{', '.join(parts)} were not recorded or compiled; the log has the reason")
    skipped = sum(step.get("skipped_steps", 0) for step in facts["steps"])
    if skipped > PPO_STEPS // 2:  # a loss scale begins too high, and needs a few steps to fall
        raise CheckFailed(f"{skipped:.0f} of {PPO_STEPS} steps were skipped because gradients overflowed")


def check_operators(subject: Subject, facts: Facts) -> None:
    """Repeat every operator that the stages use."""
    facts |= subject.processes.task("compare_operators", subject.name)
    _judge_failures(facts["failures"], facts["operators"], "operators")


def check_operations(subject: Subject, facts: Facts) -> None:
    """Check every implementation of every operation."""
    facts |= subject.processes.task("compare_operations", subject.name)
    _judge_failures(facts["failures"], len(facts["implementations"]), "implementations")


def _judge_failures(failures: list[dict[str, str]], count: int, what: str) -> None:
    if failures:
        names = ", ".join(failure["operator"] for failure in failures)
        raise CheckFailed(f"{len(failures)} of {count} {what}: {names}; {failures[0]['failure']}")


def read_run(output: Path) -> Facts:
    """Return the contents of a run's `run.json`."""
    document: Facts = json.loads((output / "run.json").read_text(encoding="utf-8"))
    return document


def read_steps(output: Path, stage: str, key: str) -> list[float]:
    """Return the metric `key` of each step of a stage."""
    lines = (output / stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record[key] for record in map(json.loads, lines) if "loss" in record]


def compare_steps(what: str, numbers: list[float], expected: list[float], tolerance: float) -> None:
    """Raise `CheckFailed` if numbers of steps differ by more than `tolerance`, a share of the expected ones."""
    same = len(numbers) == len(expected) and all(
        abs(number - right) <= tolerance * abs(right) for number, right in zip(numbers, expected, strict=True)
    )
    if not same:
        shown, right = (", ".join(f"{number:.4f}" for number in values) for values in (numbers, expected))
        raise CheckFailed(f"{what} are {shown}, expected {right} within {tolerance:.1%}")


def _choose_ranks(subject: Subject) -> int:
    """Return how many ranks ZeRO is checked with: a power of two of the devices, 2 to 8; 2 at toy size."""
    return 1 << (min(max(subject.devices, 2), 8 if subject.full else 2).bit_length() - 1)


OPERATORS = Check(
    "operators", "every operator that the stages use equals float64's on the CPU, both directions", check_operators
)
IMPLEMENTATIONS = Check(
    "operations", "every usable implementation of an operation equals plain PyTorch", check_operations
)
CONFORMANCE = Check("conformance", "no check of the conformance kit fails", check_conformance)
ZERO = Check(
    "zero",
    "ZeRO 0 to 3 of several ranks give the losses of one; LoRA changes every adapter and nothing else",
    check_zero,
)
RESUME = Check(
    "resume", "a checkpoint gives the same losses on this device, in its other modes, on the CPU", check_resume
)
FIRST_CONTACT = (
    Check("product", "matrix products in every precision equal the CPU's, and can be read back", check_product, 600),
    Check("explain", "the backend has a precision and every required operation", check_explain, 600),
    CONFORMANCE,
    Check("attention", "logits and gradients of left-padded rows are finite and equal the CPU's", check_attention),
    Check("indexing", "operators on int64 and logits equal the CPU's, plain and recorded", check_indexing),
    Check(
        "decoding", "each token is the best one, recorded or not, and no graph is new after two rounds", check_decoding
    ),
    Check("stages", "SFT learns, all numbers are finite, and no stage leaves weights in memory", check_stages),
    ZERO,
    RESUME,
    Check("ppo-steps", f"{PPO_STEPS} PPO steps are finite, and compile nothing after step 3", check_ppo_steps),
)
