"""What the runs have in common: settings, tiny models, rows, and the comparison of two outcomes."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from accelerators.quantized import QuantizedWeights
from rlhf.config.schema import Config, build_config
from rlhf.data.examples import Demonstration, Pair, Prompt
from rlhf.data.records import Message, Row
from rlhf.data.stage_dataset import StageData
from tests.helpers import llama

Weights = dict[str, Tensor]
Sequence = tuple[list[int], list[int]]
"""The token ids of a prompt and of its completion."""

VOCABULARY = 60
PROMPT, COMPLETION = 7, 6
"""The longest prompt and completion, in tokens."""

# Each setting differs from its default and from the others of its kind, so that no two can be mistaken; `eps` is large
# enough for float32's rounding of a gradient near zero to make no step, `max_grad_norm` small enough to bite.
OPTIMIZER = {
    "learning_rate": 4e-3,
    "weight_decay": 0.2,
    "betas": (0.8, 0.97),
    "eps": 1e-4,
    "schedule": "constant",
    "warmup": 0,
    "max_grad_norm": 0.3,
}
CRITIC_OPTIMIZER = {
    "learning_rate": 2e-2,
    "weight_decay": 0.5,
    "betas": (0.6, 0.9),
    "eps": 1e-3,
    "schedule": "constant",
    "warmup": 0,
    "max_grad_norm": 0.1,
}
PPO = {
    "batch_size": 8,
    "minibatch_size": 4,
    "micro_batch_size": 2,
    "ppo_epochs": 2,
    "steps": 2,
    "eval_rows": 3,
    "checkpoint_every": 1,
    "kl_coef": 0.3,
    "kl_target": 8,
    "kl_horizon": 20,
    "score_clip": 1.5,
    "gamma": 0.9,
    "lam": 0.6,
    "clip": 0.1,
    "value_clip": 0.3,
    "sampling": {"temperature": 0.7},
    "optimizer": OPTIMIZER | {"learning_rate": 6e-4},
    "critic_optimizer": CRITIC_OPTIMIZER,
}
ONE_UPDATE = {"minibatch_size": None, "ppo_epochs": 1}
"""Policy and critic are scored by the passes of the update (`ppo.reuse_forward`); with `micro_batch_size` 2 by four."""
PTX = {"ptx_coef": 2.5, "ptx_length": 9, "ptx_batch_size": 4}
DOCUMENTS = [" ".join(str(2 + (7 * n + 3 * k) % 58) for k in range(1 + 5 * n % 11)) for n in range(13)]
"""Raw text as `Tokenizer` reads it: nine rows of nine tokens, and some more."""
LORA = {"rank": 3, "alpha": 12.0}


@dataclass
class Outcome:
    """What a run leaves: the numbers recorded of each step, those of the evaluation before, the weights after."""

    steps: list[dict[str, float]]
    before: dict[str, float]
    weights: dict[str, Weights]
    rollouts: list[Rollout] = field(default_factory=list)
    heldout: list[Sequence] = field(default_factory=list)  # what PPO's evaluation before drew


@dataclass
class Rollout:
    """What chance decided in one step of PPO, over all ranks."""

    sequences: list[Sequence]  # of real rows
    passes: list[list[list[int]]]  # each pass's minibatches, as indices into `sequences`


def assert_same(actual: Outcome, expected: Outcome) -> None:
    """Every number and every weight."""
    assert len(actual.steps) == len(expected.steps) > 0
    for number, (step, reference) in enumerate(zip(actual.steps, expected.steps), 1):
        for name, value in reference.items():
            assert step[name] == pytest.approx(value, rel=2e-4, abs=2e-5), f"{name} of step {number}"
    for name, value in expected.before.items():
        assert actual.before[name] == pytest.approx(value, rel=2e-4, abs=2e-5), f"held-out {name}"
    for model, reference_weights in expected.weights.items():
        assert actual.weights[model].keys() == reference_weights.keys()
        for name, tensor in reference_weights.items():
            difference = (actual.weights[model][name].double() - tensor).abs().max().item()
            assert difference < 2e-5, f"{model} {name} differs by {difference}"


def configuration(stage: str, **changes: Any) -> Config:
    """A configuration of one stage's section (`changes` of other sections by their names)."""
    sections: dict[str, Any] = {
        "precision": "fp32",
        "seed": 3,
        "engine": {"zero_stage": 1, "shapes": "static"},
        "data": {"max_prompt_length": PROMPT, "max_completion_length": COMPLETION},
        "sft": {"batch_size": 4, "micro_batch_size": 2, "max_steps": 2, "optimizer": OPTIMIZER},
        "reward": {"batch_size": 4, "micro_batch_size": 2, "max_steps": 2, "optimizer": OPTIMIZER},
        "dpo": {
            "batch_size": 4,
            "micro_batch_size": 2,
            "epochs": 2,
            "max_steps": 3,
            "beta": 0.3,
            "optimizer": OPTIMIZER,
        },
        "ppo": PPO,
        "distill": {
            "batch_size": 4,
            "micro_batch_size": 2,
            "epochs": 2,
            "max_steps": 3,
            "eval_rows": 3,
            "checkpoint_every": 1,
            "teacher": "given",
            "sampling": {"temperature": 0.7},
            "optimizer": OPTIMIZER,
        },
    }
    for section in ("engine", "lora", "model", "roles"):
        if section in changes:
            sections[section] = sections.get(section, {}) | changes.pop(section)
    sections[stage] = sections[stage] | changes
    return build_config(sections)


def language_model(seed: int, kind: str = "llama") -> Any:
    """Random weights, large enough for its distributions to be far from uniform."""
    if kind == "llama":
        model = llama(VOCABULARY, seed=seed, initializer_range=0.15)
    else:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(seed)
        model = GPT2LMHeadModel(_gpt2(GPT2Config))
    model.generation_config.eos_token_id = list(Tokenizer.all_special_ids)
    return model


def scalar_model(seed: int, kind: str = "llama", *, scale: float = 1.0) -> Any:
    """As `language_model`, with a scalar head whose scores are about `scale`."""
    from transformers import GPT2Config, GPT2ForSequenceClassification, LlamaForSequenceClassification

    if kind == "llama":
        config = language_model(0).config
        config.num_labels = 1
        torch.manual_seed(seed)
        model: Any = LlamaForSequenceClassification(config)
    else:
        torch.manual_seed(seed)
        model = GPT2ForSequenceClassification(_gpt2(GPT2Config, num_labels=1))
    with torch.no_grad():
        model.score.weight.normal_(std=scale / model.config.hidden_size**0.5)
    return model


def _gpt2(configuration_class: Any, **changes: Any) -> Any:
    """GPT-2 without dropout: its steps are to be repeated."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "initializer_range": 0.15}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return configuration_class(vocab_size=VOCABULARY, **sizes, **off, **tokens, **changes)


def round_linears(model: Any, kind: str) -> Any:
    """A copy whose linear layers, of the transformer, have the numbers that `kind` can represent."""
    packing, model = QuantizedWeights(), copy.deepcopy(model)
    for layer in model.base_model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = packing.unpack(packing.pack(layer.weight, kind))
    return model


class Tokenizer:
    """The little of a tokenizer that the stages use."""

    pad_token_id, eos_token_id = 0, 1
    # A fifth of the vocabulary ends a completion: some end at once, some never.
    all_special_ids = tuple(range(1, VOCABULARY, 5))
    added_tokens_decoder: tuple[int, ...] = ()
    bos_token = None

    def __len__(self) -> int:
        return VOCABULARY

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(map(int, text.split())) for text in texts]}

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, list(ids)))

    def save_pretrained(self, folder: Any) -> None:
        pass


def replies(rng: random.Random, length: int) -> list[int]:
    return [*(rng.randrange(2, VOCABULARY) for _ in range(length - 1)), Tokenizer.eos_token_id]


def examples(stage: str, count: int) -> list[Any]:
    """Rows of very different lengths; pairs of different margins."""
    rng = random.Random(stage)
    rows: list[Any] = []
    for number in range(count):
        prompt = [rng.randrange(2, VOCABULARY) for _ in range(1 + (3 * number) % PROMPT)]
        row = Row((Message("user", str(number)),), str(number), None, None, None, "test")
        if stage == "sft":
            rows.append(Demonstration(prompt, replies(rng, 1 + number % COMPLETION), row))
        elif stage in ("reward", "dpo"):
            shared = [rng.randrange(2, VOCABULARY) for _ in range(number % 3)]
            lengths = rng.sample(range(2, COMPLETION - len(shared) + 1), 2)
            first, second = (shared + replies(rng, length) for length in lengths)
            rows.append(Pair(prompt, first, second, replace(row, margin=number % 3 * 0.4)))
        else:
            rows.append(Prompt(prompt, row))
    return rows


def data(stage: str, count: int) -> StageData:
    rows = examples(stage, count + 3)
    return StageData(train=rows[:count], heldout=rows[count:], reports=[])


@dataclass
class Models:
    """PPO's models, before training."""

    actor: Any
    reference: Any
    critic: Any
    reward: Any

    def rounded(self, kind: str) -> Models:
        """The models with their linear layers rounded, if they have adapters."""
        names = ("actor", "critic", "reward")
        return replace(self, **{name: round_linears(getattr(self, name), kind) for name in names})

    @classmethod
    def build(cls, kind: str = "llama", *, lora: bool = False) -> Models:
        """Four different ones: with the actor as its own reference the KL would be 0, and a mistake in it unseen."""
        return cls(
            language_model(11, kind),
            None if lora else language_model(12, kind),
            scalar_model(13, kind, scale=0.5),
            scalar_model(14, kind, scale=2.0),
        )
