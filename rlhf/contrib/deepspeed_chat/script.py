"""The fork's example scripts: the flags that each makes of HL_* variables, as its own shell lines would.

A script's name and an environment flow in, the `Command` that it starts flows out.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rlhf.contrib.deepspeed_chat.command import Command
from rlhf.contrib.deepspeed_chat.tables import Script, scripts, variables
from rlhf.contrib.deepspeed_chat.variables import folder, read
from rlhf.errors import ConfigError

_BY_HAND = {"HL_GBS", "HL_MBS", "HL_RUN_STEPS", "HL_PRINT_ANSWERS_INTERVAL", "HL_ONLY_OPTIMIZE_LORA", "HL_LORA_DIM"}
_BY_HAND |= {"HL_LORA_LEARNING_RATE", "HL_LORA_ACTOR_LR", "HL_LORA_CRITIC_LR", "HL_CHECKPOINT_PATH"}
"""What the scripts make several flags of, or one only together with another."""


def started(command: Command, environment: Mapping[str, str], others: Sequence[Command] = ()) -> Command:
    """The command that one of the fork's scripts starts.

    Args:
        others: the other commands of the same recipe, whose scripts may read a variable that this one does not, and
            leave the models that this one starts from.

    Raises:
        ConfigError: a variable is unknown or wrong, no script's, or not set and without a default.
    """
    script = scripts()[command.script]
    environment = {**environment, **command.variables}
    given = {name: environment[name].strip() for name in read(environment)}
    known = [scripts()[one.script].defaults for one in (command, *others) if one.script]
    for name in given:
        if not any(name in defaults for defaults in known):
            raise ConfigError(f"{name}: {script.name} does not read it; leave it out, or unset it")
    given = {name: value for name, value in given.items() if name in script.defaults}
    values = {name: str(value) for name, value in script.defaults.items() if value is not None} | given
    found: dict[str, tuple[str, ...]] = {}
    written: dict[str, str] = {}
    left = {"actor": "sft", "critic": "reward"} if others else {}
    there = {f"HL_{model.upper()}_MODEL" for model, stage in left.items() if stage in {one.stage for one in others}}
    for flag, value, why in _flags(script, values, given, {*there, *(f"{name}_PATH" for name in there)}):
        texts = shlex.split(value) if flag == "--data_path" else ([value] if value else [])
        found[flag], written[flag] = tuple(texts), " ".join(filter(None, [flag, value])) + f" ({why})"
    return Command(script.stage, found, written, script=script.name)


def _flags(
    script: Script, values: Mapping[str, str], given: Mapping[str, str], there: Collection[str]
) -> Iterator[tuple[str, str, str]]:
    """Each flag with its value, and where that comes from; the models that are `there` need no name."""
    fixed = script.fixed.split()
    for word, after in zip(fixed, [*fixed[1:], "--"]):
        if word.startswith("--"):
            yield word, "" if after.startswith("--") else after, "the script's own"
    for name, default in script.defaults.items():
        row = variables()[name]
        flag = row.flags.get(script.stage)
        if not flag or name in _BY_HAND:
            continue
        if name not in values and default is None and row.keys and name not in there:
            raise ConfigError(f"{name}: not set, and {script.name} has no default for it; set it")
        if name not in values or (row.reader in ("switch", "capture") and values[name] != "1"):
            continue
        yield flag, "" if row.reader in ("switch", "capture") else values[name], _said(name, given)
    yield from _launched(values, given)
    yield from _batches(script, values, given)
    yield from _lora(script, values, given)
    if output := folder(given):
        yield (
            "--output_dir",
            output,
            "HL_CHECKPOINT_PATH" if "HL_CHECKPOINT_PATH" in given else "HL_BASE_OUT_PATH, HL_TAG",
        )
    for name, switch, flag in (
        ("HL_RUN_STEPS", "--enable_test_mode", "--test_stop_step"),
        ("HL_PRINT_ANSWERS_INTERVAL", "--print_answers", "--print_answers_interval"),
    ):
        if int(values.get(name, 0)):
            yield switch, "", _said(name, given)
            yield flag, values[name], _said(name, given)


def _launched(values: Mapping[str, str], given: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name, flag in (("HL_NUM_NODES", "--num_nodes"), ("HL_DEVICES_PER_NODE", "--num_gpus")):
        yield flag, values[name], _said(name, given)


def _batches(script: Script, values: Mapping[str, str], given: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    size, micro = int(values["HL_GBS"]), int(values["HL_MBS"])
    devices = int(values["HL_NUM_NODES"]) * int(values["HL_DEVICES_PER_NODE"])
    if not micro or not devices or size % (micro * devices) or not size:
        raise ConfigError(
            f"HL_GBS: {size} rows are no multiple of HL_MBS {micro} x {devices} devices, which the script would round; "
            "change one of them"
        )
    names = ["--per_device_train_batch_size"]
    if script.stage == "ppo":
        names = ["--per_device_generation_batch_size", "--per_device_training_batch_size"]
    for name in names:
        yield name, str(micro), _said("HL_MBS", given)
    yield "--gradient_accumulation_steps", str(size // devices // micro), _said("HL_GBS", given)


def _lora(script: Script, values: Mapping[str, str], given: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Nothing of LoRA where HL_LORA_DIM is 0, as there."""
    if not int(values["HL_LORA_DIM"]):
        return
    rates: dict[str, Any] = {"": "HL_LORA_LEARNING_RATE"}
    if script.stage == "ppo":
        rates = {"actor_": "HL_LORA_ACTOR_LR", "critic_": "HL_LORA_CRITIC_LR"}
    for prefix, rate in rates.items():
        yield f"--{prefix}lora_dim", values["HL_LORA_DIM"], _said("HL_LORA_DIM", given)
        yield f"--{prefix}lora_learning_rate", values[rate], _said(rate, given)
        yield f"--{prefix}lora_module_name", script.lora_scope, "the script's own"
    if script.only_adapters:
        yield "--only_optimize_lora", "", "the script's own"
    elif values.get("HL_ONLY_OPTIMIZE_LORA") == "1":
        yield "--only_optimize_lora", "", _said("HL_ONLY_OPTIMIZE_LORA", given)


def _said(name: str, given: Mapping[str, str]) -> str:
    return name if name in given else f"{name}'s default"
