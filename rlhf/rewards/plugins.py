"""Reward functions that plugins offer, by name."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import pluggy

from rlhf.rewards import hookspecs


class Unknown(Exception):
    """No plugin offers a function of this name, or several do."""


def named(name: str) -> str:
    """What the plugins call `name`, as module:function.

    Raises:
        Unknown: none does, or several do.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for point in entry_points(group=hookspecs.ENTRY_POINT_GROUP):
        manager.register(point.load(), point.name)
    offered: dict[str, dict[str, str]] = {}
    for implementation in manager.hook.rlhf_reward_functions.get_hookimpls():
        functions: Any = implementation.function()
        for called, function in functions.items():
            offered.setdefault(called, {})[implementation.plugin_name] = function
    if name not in offered:
        raise Unknown(f"no plugin offers {name}; offered: {', '.join(sorted(offered)) or 'nothing'}")
    if len(offered[name]) > 1:
        raise Unknown(f"the plugins {' and '.join(offered[name])} both offer {name}; uninstall one of them")
    return next(iter(offered[name].values()))
