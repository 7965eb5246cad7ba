"""The hook through which a plugin offers reward functions, and the marks for it.

A plugin is a distribution with an entry point in the group `rlhf.rewards` that names a module. It is loaded where a
recipe names `plugin:...`, in the process in which its functions will run.
"""

from __future__ import annotations

from collections.abc import Mapping

import pluggy

PROJECT = "rlhf_rewards"
ENTRY_POINT_GROUP = "rlhf.rewards"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def rlhf_reward_functions() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Functions by the name that a recipe calls them, `plugin:brevity` in `ppo.reward_functions`, as module:function.

    from rlhf.rewards.hookspecs import hookimpl

    @hookimpl
    def rlhf_reward_functions():
        return {"brevity": "my_rewards.length:brevity"}
    """
