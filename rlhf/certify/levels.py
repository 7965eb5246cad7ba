"""The levels of a certificate, in order: each is a gate, so a level that fails ends the certification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from accelerators import REFERENCE
from rlhf.certify.checks import CONFORMANCE, FIRST_CONTACT, IMPLEMENTATIONS, OPERATORS, RESUME, ZERO, Check
from rlhf.certify.endurance import FLAT, KILL, OUT_OF_MEMORY
from rlhf.certify.learning import CAPTURED, DRAWN, GOLDEN
from rlhf.errors import ConfigError

ALL = "all"
SECONDS_ON_A_DEVICE = 600.0
SECONDS_ON_A_CPU = 1800.0
"""Time limits of a level after the first contact; that of a CPU is for two cores, and for the toy size anywhere."""


@dataclass(frozen=True)
class Level:
    """One level.

    Attributes:
        name: name for users.
        promise: what a device that passes it has shown.
        checks: its checks, the simplest first.
        limited: the level as a whole has a time limit; otherwise each check has its own.
    """

    name: str
    promise: str
    checks: tuple[Check, ...]
    limited: bool = True

    def seconds(self, backend: str, *, full: bool) -> float | None:
        """Return the level's time limit for a backend and a size; None without one."""
        if not self.limited:
            return None
        return SECONDS_ON_A_DEVICE if full and backend != REFERENCE else SECONDS_ON_A_CPU


LEVELS = (
    Level(
        "first-contact", "the first hour: a device computes, trains, saves and resumes", FIRST_CONTACT, limited=False
    ),
    Level("interface", "the backend keeps every promise of the accelerator interface", (CONFORMANCE,)),
    Level(
        "numerics",
        "every operator that training uses is as exact as its precision allows",
        (OPERATORS, IMPLEMENTATIONS),
    ),
    Level(
        "learning",
        "a hundred steps of every stage learn what they learn in float64, within the rounding of the precision",
        (GOLDEN, DRAWN, CAPTURED),
    ),
    Level(
        "endurance",
        "runs survive kills, full memory and several ranks, and need no more after many steps than after a few",
        (RESUME, KILL, OUT_OF_MEMORY, FLAT, ZERO),
    ),
)


def select_levels(level: str | None = None, up_to: str | None = None, only: Sequence[str] = ()) -> list[Level]:
    """Return levels in their order, with their checks.

    Args:
        level: one level, or `all`; None: the first one, unless `up_to` is given.
        up_to: the last level; those before it are included.
        only: names of checks of these levels; empty: all.

    Raises:
        ConfigError: a name is not known, or both `level` and `up_to` are given.
    """
    names = [known.name for known in LEVELS]
    if level is not None and up_to is not None:
        raise ConfigError(f"--level {level} and --up-to {up_to} exclude each other; leave one out")
    for option, name in (("--level", None if level == ALL else level), ("--up-to", up_to)):
        if name is not None and name not in names:
            more = f" or {ALL}" if option == "--level" else ""
            raise ConfigError(f"{option} {name}: no such level; use one of {', '.join(names)}{more}")
    if up_to is not None:
        chosen = list(LEVELS[: names.index(up_to) + 1])
    else:
        chosen = [known for known in LEVELS if level == ALL or known.name == (level or names[0])]
    checks = dict.fromkeys(check.name for known in chosen for check in known.checks)
    if unknown := [name for name in only if name not in checks]:
        where = [known.name for known in LEVELS if unknown[0] in [check.name for check in known.checks]]
        remedy = f"add --level {where[0]}" if where else f"use one of {', '.join(checks)}"
        raise ConfigError(f"--only {unknown[0]}: no such check; {remedy}")
    picked = [
        replace(known, checks=tuple(check for check in known.checks if not only or check.name in only))
        for known in chosen
    ]
    return [known for known in picked if known.checks]
