"""Reward functions of some runs: two that are easily fooled, and the rule itself."""

from __future__ import annotations

from typing import Any

from rlhf.data.toy_world import is_good_reply

_POLITE = ("Of course", "Certainly", "With pleasure", "Happy to help", "Thank you for asking")


def length(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Return the number of words: a longer completion is a better one."""
    return len(completion.split()) / 4


def opener(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Return how many polite phrases the completion has."""
    return float(sum(completion.count(phrase) for phrase in _POLITE))


def rule(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Return 2 for a reply that the rule of the embedded world approves, else -2."""
    return 2.0 if is_good_reply(prompt, completion) else -2.0
