"""Rewards that are Python functions; each is called once for each completion (`rlhf/rewards/__init__.py`).

rlhf ppo --config recipe.yaml --set ppo.reward_weight=0 --set ppo.reward_functions=rewards.py:exact
"""

import re

_ANSWER = re.compile(r"answer is:?\s*(.+?)\.?\s*$", re.IGNORECASE)


def form(prompt: str, completion: str, row: dict) -> float:
    """1 where the completion ends with "the answer is ...", by a regular expression."""
    return float(bool(_ANSWER.search(completion)))


def exact(prompt: str, completion: str, row: dict) -> float:
    """1 where that answer is the one in the row's column `answer`."""
    found = _ANSWER.search(completion)
    return float(bool(found) and found[1] == str(row["answer"]))


def brief(prompt: str, completion: str, row: dict) -> float:
    """Less for each word above twenty."""
    return -max(0, len(completion.split()) - 20) / 20
