"""What flows through a translation: the values of flags, the settings and remarks that come of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Given:
    """A flag's value; `said` is the flag as it was written, or with its default."""

    value: Any
    said: str
    explicit: bool


@dataclass(frozen=True)
class Setting:
    """What a key becomes, and why. `explicit`: because of a flag that was given, not of a default there."""

    key: str
    value: Any
    why: str
    explicit: bool = True


@dataclass(frozen=True)
class Remark:
    """What is to be said of a flag that became no line; those of a `group` are said together."""

    flag: str
    text: str
    group: str = ""


@dataclass(frozen=True)
class Flags:
    """The flags of one command. Of the other steps: `earlier` are the folders that they leave, `bases` their models."""

    stage: str
    values: Mapping[str, Given]
    devices: int
    earlier: Mapping[str, str] = field(default_factory=dict)
    bases: Mapping[str, str] = field(default_factory=dict)
    alone: bool = True

    def __getitem__(self, name: str) -> Given:
        return self.values[f"--{name}"]

    def setting(self, key: str, value: Any, *names: str, why: str = "") -> Setting:
        """A setting that these flags decide."""
        because = [self[name] for name in names]
        link = " x " if why.startswith("x ") else ", "  # a product, or several that are side by side
        said = link.join([*(given.said for given in because), *filter(None, [why.removeprefix("x ")])])
        return Setting(key, value, said, any(one.explicit for one in because))
