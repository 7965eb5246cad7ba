"""Runs of the real stages on tiny models and rows, the same runs by the reference, and their comparison.

A `Case` is models, rows and settings. `real_*` runs the stage itself (`sft.run` and so on: its loop, engines, batches
and records) and `reference_*` the reference; both return an `Outcome`.
"""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tests.reference.ppo
import tests.reference.reward
import tests.reference.sft
from accelerators import Accelerator, ShapePolicy
from rlhf.config import Config, OptimizerConfig, build_config
from rlhf.data.rows import Message, Row
from rlhf.data.tokenization import Demonstration, Pair, Prompt, StageData
from rlhf.engine import distributed
from rlhf.metrics.recorder import Recorder
from rlhf.models.lora import add_adapters
from rlhf.run import RunDirectory
from rlhf.stages import ppo, reward, sft
from rlhf.stages.loop import StageContext
from tests.helpers import llama, weights
from tests.reference.adamw import AdamW
from tests.reference.network import Network

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
LORA = {"rank": 3, "alpha": 12.0}


@dataclass
class Outcome:
    """What a run leaves: the numbers recorded of each step, those of the evaluation before, the weights after."""

    steps: list[dict[str, float]]
    before: dict[str, float]
    weights: dict[str, Weights]
    rollouts: list[Rollout] = field(default_factory=list)
    heldout: list[Sequence] = field(default_factory=list)  # what PPO's evaluation before drew
    reference: tests.reference.ppo.PPO | None = None


@dataclass
class Rollout:
    """What chance decided in one step of PPO, over all ranks."""

    sequences: list[Sequence]  # of real rows
    passes: list[list[list[int]]]  # each pass's minibatches, as indices into `sequences`


def configuration(stage: str, **changes: Any) -> Config:
    """A configuration of one stage's section (`changes` of other sections by their names)."""
    sections: dict[str, Any] = {
        "precision": "fp32",
        "seed": 3,
        "engine": {"zero_stage": 1, "shapes": "static"},
        "data": {"max_prompt_length": PROMPT, "max_completion_length": COMPLETION},
        "sft": {"batch_size": 4, "micro_batch_size": 2, "max_steps": 2, "optimizer": OPTIMIZER},
        "reward": {"batch_size": 4, "micro_batch_size": 2, "max_steps": 2, "optimizer": OPTIMIZER},
        "ppo": PPO,
    }
    for section in ("engine", "lora"):
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
    # A fifth of the vocabulary ends a completion: some end at once, some never.
    model.generation_config.eos_token_id = list(range(1, VOCABULARY, 5))
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


class Tokenizer:
    """The little of a tokenizer that the stages use."""

    pad_token_id, eos_token_id = 0, 1

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, list(ids)))

    def save_pretrained(self, folder: Any) -> None:
        pass


def replies(rng: random.Random, length: int) -> list[int]:
    return [*(rng.randrange(2, VOCABULARY) for _ in range(length - 1)), Tokenizer.eos_token_id]


def examples(stage: str, count: int) -> list[Any]:
    """Rows of very different lengths."""
    rng = random.Random(stage)
    found: list[Any] = []
    for number in range(count):
        prompt = [rng.randrange(2, VOCABULARY) for _ in range(1 + (3 * number) % PROMPT)]
        row = Row((Message("user", str(number)),), str(number), None, None, None, "test")
        if stage == "sft":
            found.append(Demonstration(prompt, replies(rng, 1 + number % COMPLETION), row))
        elif stage == "reward":
            shared = [rng.randrange(2, VOCABULARY) for _ in range(number % 3)]
            lengths = rng.sample(range(2, COMPLETION - len(shared) + 1), 2)
            first, second = (shared + replies(rng, length) for length in lengths)
            found.append(Pair(prompt, first, second, row))
        else:
            found.append(Prompt(prompt, row))
    return found


def data(stage: str, count: int) -> StageData:
    rows = examples(stage, count + 3)
    return StageData(train=rows[:count], heldout=rows[count:], reports=[])


def context(accelerator: Accelerator, config: Config, stage: Any, folder: Path) -> StageContext:
    """As `rlhf.pipeline.run` makes it."""
    run = RunDirectory(folder)
    place, world = run.stage(stage), distributed.world()
    checkpoint = place.latest_checkpoint
    step = int(checkpoint.name.removeprefix("step-")) if checkpoint else None
    recorder = Recorder(place, enabled=world.is_main, resume_step=step)
    shapes = ShapePolicy(config.engine.shapes)
    return StageContext(config, accelerator, accelerator.precision("fp32"), shapes, world, run, place, recorder)


def records(place: Any, key: str) -> list[dict[str, float]]:
    """The lines of metrics.jsonl that hold `key`."""
    lines = [json.loads(line) for line in place.metrics.read_text().splitlines()]
    return [line for line in lines if key in line]


# The supervised stages


def real_supervised(
    stage: str, accelerator: Accelerator, config: Config, model: Any, count: int, folder: Path
) -> Outcome | None:
    """`sft.run` or `reward.run`; what it left is returned on rank 0."""
    run = {"sft": sft.run, "reward": reward.run}[stage]
    around = context(accelerator, config, stage, folder)
    with around.recorder:
        summary = run(around, copy.deepcopy(model), Tokenizer(), data(stage, count))
    if not around.world.is_main:
        return None
    return Outcome(records(around.directory, "loss"), summary["before"], {"model": weights(around.directory.model)})


def reference_supervised(stage: str, config: Config, model: Any, count: int) -> Outcome:
    network = reference_network(model, config)
    settings = config.sft if stage == "sft" else config.reward
    rows = data(stage, count)
    total = settings.max_steps
    batches = [[as_tuple(row) for row in batch] for batch in global_batches(config, settings, rows.train)[:total]]
    optimizer = AdamW(network.trained, settings.optimizer, total)
    heldout = [as_tuple(row) for row in rows.heldout]
    if stage == "sft":
        before = {"perplexity": tests.reference.sft.perplexity(network, heldout, loss_on=config.sft.loss_on)}
        steps = [tests.reference.sft.step(network, optimizer, rows, loss_on=config.sft.loss_on) for rows in batches]
    else:
        pad = Tokenizer.pad_token_id
        before = tests.reference.reward.scores(network, heldout, pad=pad)
        steps = [tests.reference.reward.step(network, optimizer, pairs, pad=pad) for pairs in batches]
    return Outcome(steps, before, {"model": network.merged()})


def as_tuple(example: Any) -> Any:
    if isinstance(example, Demonstration):
        return example.prompt_ids, example.completion_ids
    return example.prompt_ids, example.chosen_ids, example.rejected_ids


def global_batches(config: Config, settings: Any, rows: list[Any]) -> list[list[Any]]:
    """Epoch after epoch in the orders that the seed gives; the last batch of each has what is left."""
    found = []
    for epoch in range(settings.epochs):
        order = list(range(len(rows)))
        random.Random(f"epoch {config.seed} {epoch}").shuffle(order)
        starts = range(0, len(rows), settings.batch_size)
        found += [[rows[index] for index in order[start : start + settings.batch_size]] for start in starts]
    return found


# PPO


@dataclass
class Models:
    """PPO's models, before training."""

    actor: Any
    reference: Any
    critic: Any
    reward: Any

    @classmethod
    def build(cls, kind: str = "llama", *, lora: bool = False) -> Models:
        """Four different ones: with the actor as its own reference the KL would be 0, and a mistake in it unseen."""
        return cls(
            language_model(11, kind),
            None if lora else language_model(12, kind),
            scalar_model(13, kind, scale=0.5),
            scalar_model(14, kind, scale=2.0),
        )


class StopError(Exception):
    """A process that ends after a step."""


def real_ppo(
    accelerator: Accelerator,
    config: Config,
    models: Models,
    count: int,
    folder: Path,
    *,
    stop_before: int | None = None,
) -> Outcome:
    """`ppo.run`, its rollouts looked at; the same on every rank.

    Raises:
        StopError: after all steps before step `stop_before` (0-based).
    """
    around = context(accelerator, config, "ppo", folder)
    watched: list[ppo.PPO] = []
    heldout: list[Sequence] = []
    rollouts: list[Rollout] = []

    class Watched(ppo.PPO):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            watched.append(self)

        def generate(self, prompts: Any) -> Any:
            found = super().generate(prompts)
            if not heldout:
                heldout.extend(sequences(self, found, rows.heldout))
            return found

        def step(self, index: int) -> dict[str, float]:
            if index == stop_before:
                raise StopError
            numbers = super().step(index)
            rollouts.append(rollout(self, index))
            return numbers

    rows = data("ppo", count)
    four = ppo.Models(*(copy.deepcopy(getattr(models, name)) for name in ("actor", "reference", "critic", "reward")))
    with pytest.MonkeyPatch.context() as patch, around.recorder:
        patch.setattr(ppo, "PPO", Watched)
        try:
            summary = ppo.run(around, four, Tokenizer(), rows)
        except StopError as stop:
            stop.args = (rollouts, heldout)
            raise
    engines = {"actor": watched[0].actor, "critic": watched[0].critic}
    return Outcome(
        records(around.directory, "policy_loss"),
        summary["before"],
        {name: state(engine) for name, engine in engines.items()} | {"saved": weights(around.directory.model)},
        rollouts,
        heldout,
    )


def sequences(stage: ppo.PPO, drawn: dict[str, Tensor], examples: list[Any]) -> list[Sequence]:
    """The real rows of what `generate` returned, of all ranks.

    A completion ends with the first of its end tokens: of the stage's masks nothing is taken over.
    """
    columns = drawn["action_mask"].shape[1]
    mine = [row[-columns:] for row in drawn["input_ids"].tolist()]
    every = [row for share in distributed.all_gather_objects(mine) for row in share]
    ends = set(stage.decoder.eos_ids.tolist())
    return [(example.prompt_ids, cut(row, ends)) for example, row in zip(examples, every)]


def rollout(stage: ppo.PPO, index: int) -> Rollout:
    """What chance decided in a step, of all ranks; the order of the rows is that of `PPO._order`."""
    settings, size = stage.settings, stage.context.world.size
    experience, examples = vars(stage.experience), stage.batches.examples(index)
    passes = []
    for epoch in range(settings.ppo_epochs):
        generator = stage._order(index, epoch)
        share = settings.batch_size // size
        order = list(range(share)) if generator is None else torch.randperm(share, generator=generator).tolist()
        rows = (settings.minibatch_size or settings.batch_size) // size
        # Each rank takes the same places of its own share.
        minibatches = [
            [rank * share + place for rank in range(size) for place in order[start : start + rows]]
            for start in range(0, share, rows)
        ]
        passes.append([[row for row in part if row < len(examples)] for part in minibatches])
    return Rollout(sequences(stage, experience, examples), passes)


def cut(tokens: list[int], ends: set[int]) -> list[int]:
    """Up to and with the first end token."""
    length = next((number for number, token in enumerate(tokens, 1) if token in ends), len(tokens))
    return tokens[:length]


def reference_ppo(config: Config, models: Models, rollouts: list[Rollout], heldout: list[Sequence]) -> Outcome:
    settings = config.ppo
    minibatches = settings.batch_size // (settings.minibatch_size or settings.batch_size)
    reference = tests.reference.ppo.PPO(
        settings,
        reference_network(models.actor, config),
        reference_network(models.critic, config),
        Network(models.reward),
        Network(models.reference) if models.reference is not None else None,
        settings.steps * settings.ppo_epochs * minibatches,
    )
    before = tests.reference.ppo.evaluation(reference.collect(heldout))
    steps = [reference.step(rollout.sequences, rollout.passes) for rollout in rollouts]
    left = {"actor": reference.actor.state(), "critic": reference.critic.state(), "saved": reference.actor.merged()}
    return Outcome(steps, before, left, reference=reference)


# Models and weights


def reference_network(model: nn.Module, config: Config) -> Network:
    """With LoRA: adapters on every linear layer of the transformer, their A drawn by peft from the run's seed."""
    if not config.lora.rank:
        return Network(model)
    adapted = copy.deepcopy(model)
    add_adapters(adapted, config.lora, seed=config.seed)
    drawn = adapted.state_dict()
    adapters = {}
    for path, layer in model.base_model.named_modules():
        if isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D":
            name = f"{model.base_model_prefix}.{path}"
            a, b = (drawn[f"{name}.lora_{factor}.default.weight"] for factor in "AB")
            assert a.any() and not b.any()
            adapters[f"{name}.weight"] = (a, b)
    return Network(model, adapters, config.lora.alpha / config.lora.rank)


def state(engine: Any) -> Weights:
    """An engine's weights, under the names that `Network.state` gives them."""
    with engine.whole_weights() as module:
        found = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    if engine.name == "critic":
        found = {name.removeprefix("model."): tensor for name, tensor in found.items()}
    renamed = {}
    for name, tensor in found.items():
        for factor in "AB":
            name = name.replace(f".lora_{factor}.default.weight", f".weight.{factor}")
        renamed[name.replace(".base_layer.", ".")] = tensor
    renamed.pop("lm_head.weight", None)  # tied to the embedding
    return renamed


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Every number and every weight."""
    assert len(found.steps) == len(expected.steps) > 0
    for number, (step, reference) in enumerate(zip(found.steps, expected.steps), 1):
        for name, value in reference.items():
            assert step[name] == pytest.approx(value, rel=2e-4, abs=2e-5), f"{name} of step {number}"
    for name, value in expected.before.items():
        assert found.before[name] == pytest.approx(value, rel=2e-4, abs=2e-5), f"held-out {name}"
    for model, reference_weights in expected.weights.items():
        assert found.weights[model].keys() == reference_weights.keys()
        for name, tensor in reference_weights.items():
            difference = (found.weights[model][name].double() - tensor).abs().max().item()
            assert difference < 2e-5, f"{model} {name} differs by {difference}"
