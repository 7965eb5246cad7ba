"""A language so small that every completion can be listed, so that the best policy is known in closed form.

Four words, the end among them, and at most three of them: 40 completions. Of all policies, the one that
maximizes E[reward] - beta KL(policy || reference) is

    policy*(y) = reference(y) exp(reward(y) / beta) / Z        (arXiv:1909.08593, section 2.1)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.data.rows import Message, Row
from rlhf.data.tokenization import Prompt

WORDS = ("<end>", "a", "b", "c")
END = 0  # also the padding
PROMPT_COLUMNS = 3  # one of padding
LENGTH = 3  # of the longest completion
COMPLETIONS = [
    words
    for length in range(1, LENGTH + 1)
    for words in itertools.product(range(len(WORDS)), repeat=length)
    if END not in words[:-1] and (words[-1] == END or length == LENGTH)
]
"""Every completion: it ends with the end, or is as long as it may be."""


def prompt(*ids: int) -> Prompt:
    """A prompt of these words."""
    text = " ".join(WORDS[token] for token in ids)
    return Prompt(list(ids), Row((Message("user", text),), text, None, None, None, ""))


PROMPT = prompt(1, 2)


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<end>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")


def _number(columns: Tensor) -> Tensor:
    """A number of its own for every beginning of a completion: [B, A] -> [B, A], up to each column."""
    base = len(WORDS) + 1
    return ((columns + 1) * base ** torch.arange(columns.shape[1])).cumsum(-1)


class _Beginnings(nn.Module):
    """Stands for a language model: its hidden state names the completion so far, in one of its dimensions."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool = False) -> Any:
        numbers = torch.zeros_like(input_ids)
        numbers[:, PROMPT_COLUMNS:] = _number(input_ids[:, PROMPT_COLUMNS:])
        return SimpleNamespace(last_hidden_state=nn.functional.one_hot(numbers, self.size).float())


class TableOfRewards(nn.Module):
    """A sequence classifier with one random score for every beginning of a completion, whole ones among them."""

    base_model_prefix = "backbone"

    def __init__(self, *, seed: int, deviation: float = 0.7) -> None:
        super().__init__()
        size = (len(WORDS) + 1) ** LENGTH
        self.backbone = _Beginnings(size)
        self.score = nn.Linear(size, 1, bias=False)
        with torch.no_grad():
            self.score.weight.normal_(std=deviation, generator=torch.Generator().manual_seed(seed))

    def rewards(self) -> Tensor:
        """[completions]: the score of each whole completion."""
        numbers = [_number(torch.tensor([words]))[0, -1] for words in COMPLETIONS]
        return self.score.weight.detach()[0, torch.stack(numbers)].double()


@torch.no_grad()
def log_probabilities(model: nn.Module, temperature: float = 1.0) -> Tensor:
    """[completions]: of each whole completion, by plain forward passes without any padding."""
    found = []
    for words in COMPLETIONS:
        ids = torch.tensor([[*PROMPT.prompt_ids, *words]])
        logits = (model(input_ids=ids).logits.double() / temperature).log_softmax(-1)[
            0, len(PROMPT.prompt_ids) - 1 : -1
        ]
        found.append(logits.gather(-1, torch.tensor(words)[:, None]).sum())
    return torch.stack(found)


def optimum(reference: Tensor, rewards: Tensor, beta: float) -> Tensor:
    """Log-probabilities of the best policy, [completions]."""
    return (reference + rewards / beta).log_softmax(-1)


@dataclass(frozen=True)
class Distance:
    """Of a policy from the best one: both ways in nats, and how much less reward it expects."""

    forward: float  # KL(policy || best)
    backward: float  # KL(best || policy)
    reward: float  # |E_best[reward] - E_policy[reward]|

    @classmethod
    def between(cls, policy: Tensor, best: Tensor, rewards: Tensor) -> Distance:
        return cls(
            (policy.exp() * (policy - best)).sum().item(),
            (best.exp() * (best - policy)).sum().item(),
            ((best.exp() - policy.exp()) * rewards).sum().abs().item(),
        )
