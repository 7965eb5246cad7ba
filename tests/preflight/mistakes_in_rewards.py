"""Mistakes in what rewards come from: functions that are not there, or that cannot be called."""

from __future__ import annotations

from tests.preflight.bench import Bench, mistake, settings

FUNCTIONS = """
import math

def two(prompt, completion):
    return 1.0

async def later(prompt, completion, row):
    return 1.0

table = {}
"""


def named(bench: Bench, name: str, text: str = FUNCTIONS) -> list[str]:
    return settings(ppo__reward_functions=f"{bench.file('rewards.py', text)}:{name}")


@mistake
def a_file_of_rewards_that_is_not_there(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(ppo__reward_functions="./nope.py:f"), ["ppo.reward_functions: ./nope.py: no such file"]


@mistake
def a_module_of_rewards_that_is_not_there(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(ppo__reward_functions="nope.rewards:f"), ["no module nope; install it"]


@mistake
def a_file_of_rewards_that_cannot_be_imported(bench: Bench) -> tuple[list[str], list[str]]:
    words = ["ppo.reward_functions: ", "rewards.py:f: ModuleNotFoundError: No module named 'nope' at ", "rewards.py:1"]
    return named(bench, "f", "import nope"), words


@mistake
def a_reward_function_with_a_slip_in_its_name(bench: Bench) -> tuple[list[str], list[str]]:
    return named(bench, "tow"), ["rewards.py has no tow; did you mean two?"]


@mistake
def a_reward_function_of_other_arguments(bench: Bench) -> tuple[list[str], list[str]]:
    return named(bench, "two"), ["takes (prompt, completion), but is called with (prompt, completion, row)"]


@mistake
def a_reward_function_that_is_a_coroutine(bench: Bench) -> tuple[list[str], list[str]]:
    return named(bench, "later"), ["rewards.py:later: must not be `async`"]


@mistake
def a_reward_function_that_is_none(bench: Bench) -> tuple[list[str], list[str]]:
    return named(bench, "table"), ["rewards.py:table: not a function"]


@mistake
def a_reward_function_of_no_plugin(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(ppo__reward_functions="plugin:brevity"), ["no plugin offers brevity; use one of (none)"]


@mistake
def rewards_that_may_take_longer_than_ranks_wait(bench: Bench) -> tuple[list[str], list[str]]:
    found = settings(ppo__reward_functions="math:hypot", ppo__reward_timeout=50, engine__timeout=50)
    return [*found, "--ranks", "2"], ["ppo.reward_timeout: must be less than engine.timeout, 50 s, got 50 s"]
