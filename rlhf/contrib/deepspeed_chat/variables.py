"""Turn the fork's HL_* variables into arguments: `python -m rlhf.contrib.deepspeed_chat.variables [STAGE...]`.

It prints one argument per line, for a shell's `mapfile`, and on standard error the meaning of each variable. Unset
variables leave the recipe's settings unchanged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf.config.dump import format_scalar
from rlhf.config.schema import EVERY_STAGE, STAGES
from rlhf.contrib.deepspeed_chat.tables import NOTHING, READERS, Variable, load_variables, suggest
from rlhf.errors import ConfigError

PREFIX = "HL_"


class TranslatedVariable(NamedTuple):
    """A variable as it was written, the options and the keys of `rlhf` that it sets, and a line about its meaning."""

    text: str
    options: list[str]
    settings: dict[str, Any]
    meaning: str


def to_arguments(environment: Mapping[str, str], stages: Sequence[str] = STAGES) -> tuple[list[str], list[str]]:
    """Return (arguments of `rlhf`, one line per variable about its meaning); see `translate_variables`."""
    arguments: list[str] = []
    meanings: list[str] = []
    for variable in translate_variables(environment, stages):
        arguments += variable.options
        arguments += [word for pair in _format_settings(variable.settings) for word in ("--set", pair)]
        meanings.append(f"{variable.text}: {variable.meaning}")
    if output := output_folder(environment):
        arguments += ["--output", output]
    return arguments, meanings


def translate_variables(environment: Mapping[str, str], stages: Sequence[str]) -> list[TranslatedVariable]:
    """Translate the variables that are set, in the table's order; `output_folder` returns the folder of several.

    An empty variable counts as unset, as in the scripts.

    Args:
        environment: the variables.
        stages: the stages that will run; variables of other stages have no effect.

    Raises:
        ConfigError: a variable or a stage is unknown, or a value is invalid.
    """
    for stage in stages:
        if stage not in EVERY_STAGE:
            raise ConfigError(
                f"{stage}: unknown stage; name some of {', '.join(EVERY_STAGE)}, or none for {', '.join(STAGES)}"
            )
    values = read_variables(environment)
    return [
        TranslatedVariable(
            f"{name}={environment[name]}",
            *(_translate_hpz(values) if name in _HPZ and value else _translate_variable(row, value, stages)),
        )
        for name, value in values.items()
        for row in (load_variables()[name],)
    ]


_HPZ = ("HL_HPZ_ENABLED", "HL_HPZ_ENABLED_ACTOR", "HL_HPZ_ENABLED_CRITIC")


def _translate_hpz(values: Mapping[str, Any]) -> tuple[list[str], dict[str, Any], str]:
    """Return what hpZ stands for: DeepSpeed uses it at ZeRO-3 on several machines, with the devices of one."""
    is_sharded = 3 in (values.get("HL_ACTOR_ZERO_STAGE"), values.get("HL_CRITIC_ZERO_STAGE"))
    if not is_sharded or values.get("HL_NUM_NODES", NOTHING) is NOTHING:
        return [], {}, "nothing: hpZ acts at ZeRO-3 on several machines (HL_ACTOR_ZERO_STAGE=3, HL_NUM_NODES=2)"
    if "HL_DEVICES_PER_NODE" not in values:
        raise ConfigError("HL_DEVICES_PER_NODE: unset, and hpZ needs the number of devices on each machine; set it")
    settings = {"engine.deepspeed.zero_optimization.zero_hpz_partition_size": values["HL_DEVICES_PER_NODE"]}
    return [], settings, ", ".join(_format_settings(settings))


def read_variables(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the variables that are set, in the table's order, with their values.

    Raises:
        ConfigError: a variable is unknown, or its value is invalid.
    """
    table = load_variables()
    set_variables = {name: value for name, value in environment.items() if name.startswith(PREFIX) and value.strip()}
    for name in set_variables:
        if name not in table:
            raise ConfigError(
                f"{name}: unknown variable of the fork's scripts; {suggest(name, table, 'the variables')}"
            )
    values = {}
    for name in filter(set_variables.__contains__, table):
        try:
            values[name] = READERS[table[name].reader](set_variables[name].strip())
        except ValueError as error:
            raise ConfigError(
                f"{name}: expected {error}, got {set_variables[name]!r}; correct it, or unset it"
            ) from error
    return values


def output_folder(environment: Mapping[str, str]) -> str:
    """Return the run's folder that the variables set; empty if they set none."""
    if path := environment.get("HL_CHECKPOINT_PATH", "").strip():
        return path
    base, tag = environment.get("HL_BASE_OUT_PATH", "").strip(), environment.get("HL_TAG", "").strip()
    return os.path.join(base or "runs", tag or "default_tag") if base or tag else ""


def _translate_variable(row: Variable, value: Any, stages: Sequence[str]) -> tuple[list[str], dict[str, Any], str]:
    """Return the options and the keys that a variable stands for, and a line about its meaning."""
    if row.option == "--output":
        return [], {}, f"{row.option}; {row.note}"
    if row.option:
        return ([], {}, row.note) if value is NOTHING else ([row.option, str(value)], {}, f"{row.option} {value}")
    if why := row.automatic or row.nothing:
        return [], {}, ("automatic: " if row.automatic else "nothing here: ") + why
    # The model of an earlier stage of the same run needs no name.
    used = [stage for stage in stages if stage in row.keys and row.earlier.get(stage) not in stages]
    if not used:
        return [], {}, f"nothing: it belongs to {' and '.join(row.keys)}, and only {', '.join(stages)} will run"
    if value is NOTHING:
        return [], {}, f"nothing; {row.note}"
    settings = {key: value for stage in used for key in row.keys[stage]}
    return [], settings, ", ".join(_format_settings(settings))


def _format_settings(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={format_scalar(value)}" for key, value in settings.items()]


def main(stages: Sequence[str]) -> int:
    """Print the arguments, or one line about an error, and return the exit code."""
    if {"-h", "--help"} & set(stages):
        print(__doc__)
        return 0
    try:
        arguments, meanings = to_arguments(os.environ, stages or STAGES)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    sys.stderr.writelines(f"{meaning}\n" for meaning in meanings)
    sys.stdout.writelines(f"{argument}\n" for argument in arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
