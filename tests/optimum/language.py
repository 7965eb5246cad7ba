"""A language so small that every completion can be listed, so that the best policy is known in closed form.

Four words, the end among them, and at most three of them: 40 completions. Of all policies, the one that
maximizes E[reward] - beta KL(policy || reference) is

    policy*(y) = reference(y) exp(reward(y) / beta) / Z        (arXiv:1909.08593, section 2.1)

An algorithm whose updates are no gradient of that ends elsewhere: where its own expected update is 0. As every
completion can be listed, that expectation is a sum, and the place is found by following it (`Update.ended`).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlhf.data.examples import Prompt
from rlhf.data.records import Message, Row

WORDS = ("<end>", "a", "b", "c")
END = 0  # also the padding
PROMPT_COLUMNS = 3  # one of padding
LENGTH = 3  # of the longest completion
BETA = 0.5  # what a nat away from the first policy costs
# Of the models: first distributions that are far from uniform, and features of every input from the start.
SIZES = {"initializer_range": 0.2, "tie_word_embeddings": False, "eos_token_id": END}
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


def tokenizer(*, padding: str = "<end>") -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<end>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token=padding)


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


BEGINNINGS = [
    words[:length] for length in range(LENGTH) for words in itertools.product(range(len(WORDS)), repeat=length)
]
BEGINNINGS = [words for words in BEGINNINGS if END not in words]
"""Every state in which a word is chosen, by the words before it: 13."""


@torch.no_grad()
def table(model: nn.Module, temperature: float = 1.0) -> Tensor:
    """[beginnings, words]: log-probabilities of the next word, by plain forward passes without any padding."""
    log_probs = []
    for words in BEGINNINGS:
        logits = model(input_ids=torch.tensor([[*PROMPT.prompt_ids, *words]])).logits[0, -1]
        log_probs.append((logits.double() / temperature).log_softmax(-1))
    return torch.stack(log_probs)


_PLACES = [
    [(BEGINNINGS.index(words[:at]), words[at], 1) if at < len(words) else (0, 0, 0) for at in range(LENGTH)]
    for words in COMPLETIONS
]
STATES, CHOSEN, THERE = torch.tensor(_PLACES).unbind(-1)
"""[completions, LENGTH] each: the state in which a word is chosen, the word, and 1 where there is one."""


def of_words(choices: Tensor) -> Tensor:
    """[completions, LENGTH]: of the log-probabilities in a `table` those of each completion's words; 0 past its end."""
    return choices[STATES, CHOSEN] * THERE


def log_probabilities(model: nn.Module, temperature: float = 1.0) -> Tensor:
    """[completions]: of each whole completion."""
    return of_words(table(model, temperature)).sum(-1)


def optimum(reference: Tensor, rewards: Tensor, beta: float) -> Tensor:
    """Log-probabilities of the best policy, [completions]."""
    return (reference + rewards / beta).log_softmax(-1)


@dataclass(frozen=True)
class Update:
    """What an algorithm's updates add up to when every completion is drawn as often as is to be expected.

    `group`: completions of one prompt, where the mean of all their rewards is the baseline (GRPO): a part of it is a
    completion's own, which makes advantages smaller. Of the other completions alone (RLOO), it is as in an infinite
    group. `divided`: by the group's deviation. `kl`: k2 or k3, in the loss; or k1, in the reward.
    """

    kl: Literal["k1", "k2", "k3"]
    beta: float
    loss_mean: Literal["token", "sequence", "constant"] = "token"
    group: float = math.inf
    divided: bool = False

    def ended(self, reference: Tensor, rewards: Tensor) -> Tensor:
        """Log-probabilities, [completions], of the policy at which the expected update is 0.

        A policy here is a table of logits, z[state, word]. Drawn on-policy (the ratio is 1, nothing is clipped), the
        expected update of the table is the sum over completions y and their words t of

            policy(y) w(y) (A(y) - beta k'(y, t)) d log policy(y_t | state) / dz,

        w(y) being 1, or 1 / length where the loss is a mean over sequences of means, and A(y) the expectation of y's
        advantage over what else is in its group. In the reward, k1 is part of it. In the loss an estimate of the KL is
        differentiated as it stands, with r = log policy(y_t) - log reference(y_t):

            k2 = r^2 / 2              k2' = r             (so a word costs what it is unlikelier under the reference,
                                                           but not what the words that it leads to cost)
            k3 = exp(-r) - 1 + r      k3' = 1 - exp(-r)   (the expectation of k3' d log policy is the gradient of
                                                           KL(reference || policy) in that state)

        The best policy of the whole completion's KL is the end of k1 alone, or where completions have one word.
        The table is moved along that update, divided for each word by how often it is met, until it is 0.

        Args:
            reference: as `table` gives it.
        """
        weights = THERE / THERE.sum(1, keepdim=True) if self.loss_mean == "sequence" else THERE.double()
        others, scaled = self._groups(rewards) if self.divided else (None, None)
        nothing, logits = torch.zeros_like(reference), reference
        for _ in range(20_000):
            choices = logits.log_softmax(-1)
            ratio, drawn = of_words(choices - reference), of_words(choices).sum(1).exp()
            if self.divided:
                advantages = scaled @ drawn[others].prod(1)
            else:
                earned = rewards - (self.beta * ratio.sum(1) if self.kl == "k1" else 0.0)
                advantages = (earned - (drawn * earned).sum()) * (1 - 1 / self.group)
            held_back = {"k1": 0 * ratio, "k2": ratio, "k3": 1 - (-ratio).exp()}[self.kl]
            push = weights * (advantages[:, None] - self.beta * held_back)
            sums = [
                nothing.index_put((STATES, CHOSEN), drawn[:, None] * part, accumulate=True) for part in (push, THERE)
            ]
            mean = sums[0] / sums[1]  # of what pushes each word up
            step = mean - (choices.exp() * mean).sum(1, keepdim=True)
            if step.abs().max() < 1e-9:
                return of_words(choices).sum(1)
            logits = choices + 0.2 * step.clamp(-1, 1)
        raise AssertionError(f"still moving by {step.abs().max():.1g}")

    def _groups(self, rewards: Tensor) -> tuple[Tensor, Tensor]:
        """All that a completion's group can have beside it, [groups, group - 1], and its advantage then.

        The latter, [completions, groups], in the standard deviation of the group.
        """
        assert self.kl != "k1" and self.group > 1, "the rewards must not depend on the policy"
        others = torch.cartesian_prod(*[torch.arange(len(rewards))] * (self.group - 1)).view(-1, self.group - 1)
        here = rewards[:, None, None].expand(-1, len(others), 1)
        groups = torch.cat([here, rewards[others].expand(len(rewards), -1, -1)], 2)
        return others, (rewards[:, None] - groups.mean(2)) / (groups.std(2) + 1e-4)


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
