"""The hooks through which plugins offer reward functions and metrics, and the search for a function by name.

A plugin is a distribution with an entry point in the group `rlhf.rewards` or `rlhf.metrics` that names a module. If a
recipe or `--metric` names `plugin:...`, it is loaded in the process in which its functions will run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

import pluggy

PROJECT = "rlhf_rewards"
REWARDS_GROUP = "rlhf.rewards"
METRICS_GROUP = "rlhf.metrics"
_HOOKS = {REWARDS_GROUP: "rlhf_reward_functions", METRICS_GROUP: "rlhf_metrics"}

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def rlhf_reward_functions() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Return functions as module:function, by the name in recipes (`plugin:brevity` in `ppo.reward_functions`).

    from rlhf.rewards.hookspecs import hookimpl

    @hookimpl
    def rlhf_reward_functions():
        return {"brevity": "my_rewards.length:brevity"}
    """


@hookspec
def rlhf_metrics() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Return functions as module:function, by the name in `rlhf evaluate --metric plugin:NAME`.

    from rlhf.rewards.hookspecs import hookimpl

    @hookimpl
    def rlhf_metrics():
        return {"exact": "my_metrics.match:exact"}
    """


class UnknownPluginFunction(Exception):
    """No plugin offers a function of this name, or several do."""


def find_plugin_function(name: str, group: str) -> str:
    """Return the function that a plugin of an entry point group offers as `name`, as module:function.

    Raises:
        UnknownPluginFunction: no plugin offers it, or several do.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(sys.modules[__name__])
    for point in entry_points(group=group):
        manager.register(point.load(), point.name)
    offered: dict[str, dict[str, str]] = {}
    for implementation in getattr(manager.hook, _HOOKS[group]).get_hookimpls():
        functions: Any = implementation.function()
        for offered_name, function in functions.items():
            offered.setdefault(offered_name, {})[implementation.plugin_name] = function
    if name not in offered:
        raise UnknownPluginFunction(f"no plugin offers {name}; use one of {', '.join(sorted(offered)) or '(none)'}")
    if len(offered[name]) > 1:
        raise UnknownPluginFunction(f"offered by several plugins, {' and '.join(offered[name])}; uninstall one of them")
    return next(iter(offered[name].values()))
