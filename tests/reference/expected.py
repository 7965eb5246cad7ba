"""The same runs by the reference: the same models, rows and settings, step after step, and what they should leave."""

from __future__ import annotations

import copy
import random
from typing import Any

from torch import nn

from rlhf.config.schema import Config
from rlhf.data.examples import Demonstration
from rlhf.models.lora import add_adapters
from tests.reference import distill, dpo, ppo, reward, sft
from tests.reference.adamw import AdamW
from tests.reference.cases import DOCUMENTS, Models, Outcome, Rollout, Sequence, Tokenizer, data
from tests.reference.network import Network


def supervised(stage: str, config: Config, model: Any, count: int) -> Outcome:
    """What `real.supervised` should leave."""
    network = _network(model, config)
    settings = config.supervised(stage)
    rows = data(stage, count)
    total = settings.max_steps
    batches = [[tokens(row) for row in batch] for batch in global_batches(config, settings, rows.train)[:total]]
    optimizer = AdamW(network.trained, settings.optimizer, total, config.lora.learning_rate)
    heldout = [tokens(row) for row in rows.heldout]
    if stage == "sft":
        before = {"perplexity": sft.perplexity(network, heldout, loss_on=config.sft.loss_on)}
        steps = [sft.step(network, optimizer, rows, loss_on=config.sft.loss_on) for rows in batches]
    elif stage == "dpo":
        pairs = [[pair[:3] for pair in batch] for batch in [*batches, heldout]]
        *known, of_heldout = [dpo.before(network, batch) for batch in pairs]
        before = dpo.evaluation(network, settings, pairs.pop(), of_heldout)
        steps = [dpo.step(network, optimizer, settings, *batch) for batch in zip(pairs, known, strict=True)]
    else:
        pad = Tokenizer.pad_token_id
        before = reward.scores(network, heldout, pad=pad, config=config.reward)
        steps = [reward.step(network, optimizer, pairs, pad=pad, config=config.reward) for pairs in batches]
    return Outcome(steps, before, {"model": network.merged()})


def tokens(example: Any) -> Any:
    """A `sft.Row` or a `reward.Pair`."""
    if isinstance(example, Demonstration):
        return example.prompt_ids, example.completion_ids
    return example.prompt_ids, example.chosen_ids, example.rejected_ids, example.row.margin


def global_batches(config: Config, settings: Any, rows: list[Any]) -> list[list[Any]]:
    """Epoch after epoch in the orders that the seed gives; the last batch of each has what is left."""
    batches = []
    for epoch in range(settings.epochs):
        order = _epoch(config, rows, epoch)
        batches += [order[start : start + settings.batch_size] for start in range(0, len(rows), settings.batch_size)]
    return batches


def ppo_batch(config: Config, rows: list[Any], index: int) -> list[Any]:
    """The rows of one step of PPO, each as often as it is completed: the epochs are one endless sequence, cut."""
    copies, endless = config.ppo.method.group_size, []
    size = config.ppo.batch_size // copies
    for epoch in range((index + 1) * size // len(rows) + 1):
        endless += _epoch(config, rows, epoch)
    return [row for row in endless[index * size : (index + 1) * size] for _ in range(copies)]


def texts(config: Config, number: int) -> list[list[int]]:
    """The rows of raw text of one update: documents and rows in the orders that the seed gives."""
    length, size = config.ppo.ptx_length, config.ppo.ptx_batch_size
    assert length and size
    documents = random.Random(f"pretraining {config.seed}").sample(DOCUMENTS, len(DOCUMENTS))
    whole = [token for text in documents for token in [*map(int, text.split()), Tokenizer.eos_token_id]]
    rows = [whole[start : start + length] for start in range(0, len(whole) - length + 1, length)]
    endless = [row for epoch in range((number + 1) * size // len(rows) + 1) for row in _epoch(config, rows, epoch)]
    return endless[number * size : (number + 1) * size]


def _epoch(config: Config, rows: list[Any], epoch: int) -> list[Any]:
    """The rows in the order that the seed gives."""
    order = list(range(len(rows)))
    random.Random(f"epoch {config.seed} {epoch}").shuffle(order)
    return [rows[index] for index in order]


def reinforced(
    config: Config, models: Models, rollouts: list[Rollout], heldout: list[Sequence]
) -> tuple[Outcome, ppo.PPO]:
    """What `real.reinforced` should leave after these rollouts, and the algorithm with all that it met on the way."""
    settings = config.ppo
    minibatches = settings.batch_size // (settings.minibatch_size or settings.batch_size)
    reference = ppo.PPO(
        settings,
        _network(models.actor, config),
        _network(models.critic, config) if settings.method.critic else None,
        Network(models.reward),
        Network(models.reference) if models.reference is not None else None,
        settings.steps * settings.ppo_epochs * minibatches,
        config.data.max_completion_length,
        config.lora.learning_rate,
        Tokenizer.all_special_ids,
        lambda number: texts(config, number) if settings.ptx_coef else (),
    )
    before = ppo.evaluation(reference.observe(heldout), Tokenizer.all_special_ids)
    steps = [reference.step(rollout.sequences, rollout.passes) for rollout in rollouts]
    weights = {"actor": reference.actor.state(), "saved": reference.actor.merged()}
    if reference.critic:
        weights["critic"] = reference.critic.state()
    return Outcome(steps, before, weights), reference


def distilled(config: Config, student: Any, teacher: Any, rollouts: list[Rollout], heldout: list[Sequence]) -> Outcome:
    """What `real.distilled` should leave after these rollouts."""
    settings, network, frozen = config.distill, _network(student, config), Network(teacher)
    updates = settings.max_steps * settings.updates
    optimizer = AdamW(network.trained, settings.optimizer, updates, config.lora.learning_rate)
    before = distill.evaluation(network, frozen, settings, heldout, Tokenizer.all_special_ids)
    steps = [distill.step(network, frozen, optimizer, settings, rollout.sequences) for rollout in rollouts]
    return Outcome(steps, before, {"model": network.merged()})


def _network(model: nn.Module, config: Config) -> Network:
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
