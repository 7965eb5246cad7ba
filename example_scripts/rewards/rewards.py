"""Reward functions in Python; each is called once per completion (`rlhf/rewards/__init__.py`).

rlhf ppo --config recipe.yaml --set ppo.reward_weight=0 --set ppo.reward_functions=rewards.py:exact
"""

import re

_ANSWER = re.compile(r"answer is:?\s*(.+?)\.?\s*$", re.IGNORECASE)


def form(prompt: str, completion: str, row: dict) -> float:
    """Return 1 if the completion ends with "the answer is ..."."""
    return float(bool(_ANSWER.search(completion)))


def exact(prompt: str, completion: str, row: dict) -> float:
    """Return 1 if this answer equals the row's column `answer`."""
    answer = _ANSWER.search(completion)
    return float(bool(answer) and answer[1] == str(row["answer"]))


def brief(prompt: str, completion: str, row: dict) -> float:
    """Return a penalty for each word beyond twenty."""
    return -max(0, len(completion.split()) - 20) / 20
