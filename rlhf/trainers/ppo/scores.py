"""The score of a completion: what the reward model and the user's functions say of it, weighted and added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlhf.config.schema import PPOConfig
from rlhf.data.completions import completion_ids, completion_texts
from rlhf.data.examples import Prompt
from rlhf.engine.engine import Batch
from rlhf.errors import RewardError
from rlhf.rewards.process import RewardProcess, Sample

MODEL = "reward_model"
_OF_FUNCTION = "reward/"


class Rewards:
    """Scores, each by its name, and their weighted sum. It keeps the process of the functions, from the start on.

    Raises:
        RewardError: a function cannot be imported or called.
    """

    def __init__(self, settings: PPOConfig, tokenizer: Any) -> None:
        self._settings, self._tokenizer = settings, tokenizer
        functions = settings.reward_functions
        self._process = RewardProcess(functions, settings.reward_timeout) if functions else None

    def __call__(self, scored: Batch, sequences: Batch, examples: Sequence[Prompt]) -> Batch:
        """What the models make of `sequences`, with the functions' share.

        Args:
            scored: with the reward model's `scores` [B], where there is one.
            sequences: as `PPO.generate` gives them, those of `examples` first; others only fill the batch up, and are
                not shown to a function.

        Returns:
            `scored`, in which `scores` [B] is reward_weight · model + Σ weight · function; and beside functions each
            part of the sum alone, without its weight: `reward_model` and `reward/<name>`, float32 [B].

        Raises:
            RewardError: a function failed with one of them, or `examples` lacks some.
        """
        weight, mask = self._settings.reward_weight, sequences["action_mask"]
        total = weight * scored["scores"] if weight else torch.zeros(len(mask), device=mask.device)
        if self._process is None:
            return {**scored, "scores": total}
        parts: Batch = {MODEL: scored["scores"]} if weight else {}
        texts = completion_texts(self._tokenizer, completion_ids(sequences))
        samples = [
            Sample(example.row.text, text, example.row.as_dict())
            for example, text in zip(examples, texts, strict=False)
        ]
        assert len(samples) == len(examples), "more examples than sequences"
        if len(samples) < mask.any(1).sum():
            raise RewardError(
                "ppo.reward_functions: they are called with rows of the data, and these sequences came without; give "
                "`examples` too, or score texts"
            )
        for function, values in zip(self._settings.reward_functions, self._process(samples), strict=True):
            filled = values + [0.0] * (len(mask) - len(values))
            part = parts[_OF_FUNCTION + function.label] = torch.tensor(filled, device=mask.device)
            total = total + function.weight * part
        return {**scored, **parts, "scores": total}


def is_part(key: str) -> bool:
    """Whether `key` names a part of the score, which is recorded by that name."""
    return key == MODEL or key.startswith(_OF_FUNCTION)
