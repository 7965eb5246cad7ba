"""Padding costs little and changes nothing: losses and gradients are those of rows that stand alone."""

import pytest
import torch

from accelerators import ShapePolicy
from rlhf.data.batches import collate_sft
from rlhf.data.examples import Demonstration
from rlhf.data.rows import Message, Row
from rlhf.models import vocabulary
from rlhf.stages.sft import negative_log_likelihood
from tests.helpers import llama

ROW = Row((Message("user", "a"),), "a", "b", None, None, "rows.jsonl:1")
DYNAMIC, STATIC = ShapePolicy("dynamic"), ShapePolicy("static")


def demonstrations(*sizes):
    torch.manual_seed(1)
    return [
        Demonstration(torch.randint(2, 60, (p,)).tolist(), torch.randint(2, 60, (c,)).tolist(), ROW) for p, c in sizes
    ]


def collated(examples, policy, real=None):
    return collate_sft(examples, real, policy=policy, maximum=24, pad_token_id=0)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def by_hand(model, examples):
    """Each row alone: -log p of its completion."""
    total = 0
    for example in examples:
        ids = torch.tensor([example.prompt_ids + example.completion_ids])
        log_probs = model(ids).logits[0].log_softmax(-1)
        start = len(example.prompt_ids)
        total = total - sum(log_probs[place - 1, ids[0, place]] for place in range(start, ids.shape[1]))
    return total


@pytest.mark.parametrize("policy", [DYNAMIC, STATIC], ids=lambda policy: policy.kind)
@pytest.mark.parametrize("fused", [True, False])
def test_the_loss_of_sft_is_that_of_rows_alone(policy, fused, monkeypatch):
    monkeypatch.setattr(vocabulary, "can_be_fused", lambda model: fused)
    model, examples = llama(60), demonstrations((3, 4), (9, 1), (1, 7))
    loss = negative_log_likelihood(model, collated([*examples, examples[0]], policy, real=3))
    expected = by_hand(model, examples)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients(model, loss), gradients(model, expected), rtol=1e-4, atol=1e-6)


def test_only_targets_are_projected_to_the_vocabulary():
    model, examples, seen = llama(60), demonstrations((3, 4), (9, 1), (1, 7)), []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[:-1].numel()))
    negative_log_likelihood(model, collated(examples, DYNAMIC))
    assert seen == [12]


def test_a_batch_without_a_real_row_has_no_loss_and_no_gradient():
    model, examples = llama(60), demonstrations((3, 4))
    loss = negative_log_likelihood(model, collated(examples, DYNAMIC, real=0))
    assert loss == 0 and all(gradient.eq(0).all() for gradient in gradients(model, loss))
