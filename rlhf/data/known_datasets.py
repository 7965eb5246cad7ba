"""Data sets that are known by name: `known.yaml` says how each is read, so that a recipe need not."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml

from rlhf.config.data import Cleaning, ColumnsConfig, PreferenceLabelConfig
from rlhf.config.paths import is_path
from rlhf.config.types import ConfigModel


class Known(ConfigModel):
    """How a data set of a known name is read; the fields are explained in `known.yaml`."""

    name: str
    path: str | None = None
    subset: str | None = None
    revision: str | None = None
    heldout_split: str | None = None
    columns: ColumnsConfig
    prefer: PreferenceLabelConfig = PreferenceLabelConfig()
    clean: tuple[Cleaning, ...] = ()


def known(name: str) -> Known | None:
    """What is known of a hub name, or of a folder here whose path ends in one; letter case does not count."""
    path = Path(name)
    here = is_path(name)
    if here and not path.is_dir():
        return None
    ends = ["/".join(path.parts[-2:]), *([path.name] if here else [])]  # mkqa-Chinese is nobody's
    return next((found for end in ends if (found := table().get(end.casefold()))), None)


@cache
def table() -> dict[str, Known]:
    """All of `known.yaml`, by names without letter case."""
    entries = yaml.safe_load(Path(__file__).with_name("known.yaml").read_text(encoding="utf-8"))
    return {name.casefold(): Known(name=name, **entry) for name, entry in entries.items()}
