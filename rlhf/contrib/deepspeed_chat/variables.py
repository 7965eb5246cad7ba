"""The fork's HL_* variables as arguments of `rlhf`: `python -m rlhf.contrib.deepspeed_chat.variables [STAGE...]`.

The environment flows in; arguments flow out, one on a line for a shell's `mapfile`, and on standard error what each
variable was taken as. Only what is set counts: the rest is the recipe's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.config.dump import format_scalar
from rlhf.config.schema import EVERY_STAGE, STAGES
from rlhf.contrib.deepspeed_chat.tables import Variable, nearest, variables
from rlhf.contrib.deepspeed_chat.values import NOTHING, READERS
from rlhf.errors import ConfigError

PREFIX = "HL_"


def arguments(environment: Mapping[str, str], stages: Sequence[str] = STAGES) -> tuple[list[str], list[str]]:
    """(arguments of `rlhf`, a line for each variable that says what it was taken as).

    An empty variable is not set, as in the scripts. `stages` will run: a variable of others does nothing.

    Raises:
        ConfigError: a variable or a stage is unknown, or a value cannot be read.
    """
    for stage in stages:
        if stage not in EVERY_STAGE:
            raise ConfigError(f"{stage}: no stage; name some of {', '.join(EVERY_STAGE)}, or none for the first three")
    given = read(environment)
    found: list[str] = []
    taken: list[str] = []
    for name, value in given.items():
        row = variables()[name]
        mine, said = _one(row, value, stages)
        found += mine
        taken.append(f"{name}={environment[name]}: {said}")
    if output := folder(environment):
        found += ["--output", output]
    return found, taken


def read(environment: Mapping[str, str]) -> dict[str, Any]:
    """The variables that are set, in the table's order, each with its value.

    Raises:
        ConfigError: one is unknown, or its value cannot be read.
    """
    table = variables()
    given = {name: value for name, value in environment.items() if name.startswith(PREFIX) and value.strip()}
    for name in given:
        if name not in table:
            raise ConfigError(f"{name}: no variable of the fork's scripts; {nearest(name, table, 'them')}")
    return {name: _read(row, given[name]) for name, row in table.items() if name in given}


def folder(environment: Mapping[str, str]) -> str:
    """The run's folder, as the variables say; empty: they do not."""
    if path := environment.get("HL_CHECKPOINT_PATH", "").strip():
        return path
    base, tag = environment.get("HL_BASE_OUT_PATH", "").strip(), environment.get("HL_TAG", "").strip()
    return os.path.join(base or "runs", tag or "default_tag") if base or tag else ""


def _read(row: Variable, value: str) -> Any:
    try:
        return READERS[row.reader](value.strip())
    except ValueError as error:
        raise ConfigError(f"{row.name}: expected {error}, got {value!r}; correct it, or unset it") from error


def _one(row: Variable, value: Any, stages: Sequence[str]) -> tuple[list[str], str]:
    """The arguments that a variable stands for, and what to say of it."""
    if row.option == "--output":
        return [], f"{row.option}; {row.note}"
    if row.option:
        return ([], row.note) if value is NOTHING else ([row.option, str(value)], f"{row.option} {value}")
    if why := row.automatic or row.nothing:
        return [], ("automatic: " if row.automatic else "nothing here: ") + why
    # The model that an earlier stage of the same run leaves needs no name.
    mine = [stage for stage in stages if stage in row.keys and row.earlier.get(stage) not in stages]
    if not mine:
        return [], f"nothing: it is of {' and '.join(row.keys)}, and {', '.join(stages)} will run"
    if value is NOTHING:
        return [], f"nothing; {row.note}"
    keys = dict.fromkeys(key for stage in mine for key in row.keys[stage])
    pairs = [f"{key}={format_scalar(value)}" for key in keys]
    return [part for pair in pairs for part in ("--set", pair)], ", ".join(pairs)


def main(stages: Sequence[str]) -> int:
    """Print the arguments, or one line that says what is wrong; the exit code."""
    if {"-h", "--help"} & set(stages):
        print(__doc__)
        return 0
    try:
        found, taken = arguments(os.environ, stages or STAGES)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(*taken, sep="\n", end="\n" if taken else "", file=sys.stderr)
    print(*found, sep="\n", end="\n" if found else "")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
