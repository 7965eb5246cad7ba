"""Padding costs little and changes nothing: losses and gradients are those of rows that stand alone."""

from itertools import pairwise

import pytest
import torch

import accelerators
from accelerators import ShapePolicy
from rlhf.data.batches import Batches, collate_reward, collate_sft, count_padding, example_length
from rlhf.data.examples import Demonstration, Pair
from rlhf.data.records import Message, Row
from rlhf.models import forward
from rlhf.models.forward import completion_log_probs
from rlhf.trainers.ppo.experience import MicroBatcher, join_rows
from rlhf.trainers.supervised import negative_log_likelihood
from tests.helpers import llama

ROW = Row((Message("user", "a"),), "a", "b", None, None, "rows.jsonl:1")
DYNAMIC, STATIC = ShapePolicy("dynamic"), ShapePolicy("static")


def demonstrations(*sizes):
    torch.manual_seed(1)
    return [
        Demonstration(torch.randint(2, 60, (p,)).tolist(), torch.randint(2, 60, (c,)).tolist(), ROW) for p, c in sizes
    ]


def collated(examples, policy=DYNAMIC, real=None):
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
@pytest.mark.parametrize("padded", [True, False])
def test_the_loss_of_sft_is_that_of_rows_alone(policy, fused, padded, monkeypatch):
    monkeypatch.setattr(forward, "can_be_fused", lambda model: fused)
    model, examples = llama(60), demonstrations((3, 4), (9, 1), (1, 7))
    if not padded:
        model.set_attn_implementation(accelerators.select("cpu", environ={}).create().kernels.get("attention"))
    seen = []
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].numel()))
    loss = negative_log_likelihood(model, collated([*examples, examples[0]], policy, real=3))
    columns = 10 if policy is DYNAMIC else 24
    assert seen == [4 * columns if padded else 7 + 10 + 8 + 7]
    expected = by_hand(model, examples)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients(model, loss), gradients(model, expected), rtol=1e-4, atol=1e-6)


def test_only_targets_are_projected_to_the_vocabulary():
    model, examples, seen = llama(60), demonstrations((3, 4), (9, 1), (1, 7)), []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[:-1].numel()))
    negative_log_likelihood(model, collated(examples, DYNAMIC))
    assert seen == [16]  # of 12 targets


def test_a_batch_without_a_real_row_has_no_loss_and_no_gradient():
    model, examples = llama(60), demonstrations((3, 4))
    loss = negative_log_likelihood(model, collated(examples, DYNAMIC, real=0))
    assert loss == 0 and all(gradient.eq(0).all() for gradient in gradients(model, loss))


# Which rows share a micro-batch


def loader(sizes, *, rank=0, ranks=1, batch=8, micro=2, shuffle=True):
    return Batches(
        demonstrations(*sizes),
        lambda examples, real: collated(examples, real=real),
        batch_size=batch,
        micro_batch_size=micro,
        rank=rank,
        world_size=ranks,
        seed=0,
        shuffle=shuffle,
        length=example_length,
    )


SIZES = [(1 + n % 3, 1 + 5 * n % 17) for n in range(20)]


def real_rows(batches):
    """The tokens of each real row."""
    return [
        row[mask.bool()].tolist()
        for batch in batches
        for row, mask, loss in zip(batch["input_ids"], batch["attention_mask"], batch["loss_mask"])
        if loss.any()
    ]


@pytest.mark.parametrize("step", range(6))
@pytest.mark.parametrize(("ranks", "micro"), [(1, 2), (2, 2), (2, 1), (4, 2)])
def test_step_has_the_unsorted_rows_in_like_lengths(step, ranks, micro):
    parts = [loader(SIZES, rank=rank, ranks=ranks, micro=micro).step(step) for rank in range(ranks)]
    expected = [example.prompt_ids + example.completion_ids for example in loader(SIZES).examples(step)]
    assert sorted(row for batches in parts for row in real_rows(batches)) == sorted(expected)
    assert {len(batch["input_ids"]) for batches in parts for batch in batches} == {micro}
    together = [[batch["attention_mask"].sum(1) for batch in beside] for beside in zip(*parts)]
    for before, after in pairwise(together):
        assert min(map(torch.min, before)) >= max(map(torch.max, after)), "micro-batches of all ranks, longest first"


def test_held_out_rows_are_sorted_as_a_whole_and_each_comes_once():
    batches = loader(SIZES, shuffle=False)
    rows = [row for step in range(len(batches)) for row in real_rows(batches.step(step))]
    assert [len(row) for row in rows] == sorted((p + c for p, c in SIZES), reverse=True)
    assert sorted(rows) == sorted(example.prompt_ids + example.completion_ids for example in demonstrations(*SIZES))


def test_loss_does_not_depend_on_how_rows_are_packed():
    """Also against plain torch, row by row; float32 sums in another order differ in their last digits."""
    model = llama(60)
    for sizes, batch in ((SIZES, 8), (SIZES[:5], 8)):  # the second: three rows that only fill up
        batches, micro = loader(sizes, batch=batch), loader(sizes, batch=batch, micro=8)
        total = sum(negative_log_likelihood(model, part) for part in batches.step(0))
        whole = sum(negative_log_likelihood(model, part) for part in micro.step(0))
        expected = by_hand(model, batches.examples(0))
        torch.testing.assert_close([total, whole], [expected, expected], rtol=1e-6, atol=1e-6)
        gradient = gradients(model, total)
        torch.testing.assert_close(gradient, gradients(model, expected), rtol=1e-4, atol=2e-6)


def test_positions_of_padding_are_counted():
    """Rows of 7, 10 and 8 tokens, the last one only to fill up: 17 of 30 positions hold a token of a real row."""
    counted = count_padding(collated(demonstrations((3, 4), (9, 1), (1, 7)), DYNAMIC, real=2))
    assert {key: int(value) for key, value in counted.items()} == {"present": 17, "positions": 30}
    pairs = [Pair([5], [6, 7, 8], [9], ROW), Pair([5, 6], [6], [9], ROW)]  # rows of 4, 3, 2 and 3 tokens
    batch = collate_reward(pairs, 1, policy=DYNAMIC, maximum=9, pad_token_id=0)
    assert {key: int(value) for key, value in count_padding(batch).items()} == {"present": 4 + 2, "positions": 4 * 4}


# Drawn sequences

BUCKETED = ShapePolicy("bucketed", first=4)


def drawn():
    """Four sequences of 5 + 6 columns: prompts of 1, 2, 5 and 3 tokens, completions of 2, 6, 1 and 1.

    The permutation that sorts them by length is not its own inverse.
    """
    prompts, completions = torch.tensor([1, 2, 5, 3]), torch.tensor([2, 6, 1, 1])
    before = (torch.arange(5) >= 5 - prompts[:, None]).long()
    after = (torch.arange(6) < completions[:, None]).long()
    return before, after


def cut(policy, size, rows=4):
    batcher = MicroBatcher(size, policy)
    lengths = batcher.lengths(*(mask[:rows] for mask in drawn()))
    return batcher.cut(lengths, rows=rows, prompt=5, completion=6)


def test_columns_that_are_padding_in_all_rows_are_cut_off():
    first, second = cut(DYNAMIC, 2)
    assert (first.rows.tolist(), first.prompt, first.completion) == ([1, 2], 5, 6)  # 8 and 6 tokens
    assert (second.rows.tolist(), second.prompt, second.completion) == ([3, 0], 3, 2)  # 4 and 3
    assert [part.positions(4) for part in (first, second)] == [22, 10]
    bucketed = cut(BUCKETED, 2)
    assert [(part.prompt, part.completion) for part in bucketed] == [(5, 6), (4, 4)]


def test_static_shapes_keep_all_rows_and_read_no_length():
    assert MicroBatcher(2, STATIC).lengths(*drawn()) is None
    parts = cut(STATIC, 2)
    assert [(part.rows.tolist(), part.prompt, part.completion) for part in parts] == [([0, 1], 5, 6), ([2, 3], 5, 6)]


@pytest.mark.parametrize("policy", [DYNAMIC, BUCKETED, STATIC], ids=lambda policy: policy.kind)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_outputs_of_micro_batches_are_joined_in_order(policy, size):
    """All numbers are unchanged but those of padding, which are 0 if their columns were removed."""
    (before, after), parts = drawn(), cut(policy, size)
    columns, rows = torch.randn(4, 6) * after, torch.randn(4)
    assert torch.equal(join_rows(parts, [part.select(columns, 6) for part in parts], 6), columns)
    assert torch.equal(join_rows(parts, [part.select(rows, 6) for part in parts], 6), rows)
    both = torch.cat([before, after], 1)
    assert sum(int(part.select(both, 6).sum()) for part in parts) == both.sum()


def test_scores_of_packed_sequences_are_those_of_whole_ones():
    torch.manual_seed(0)
    model, mask = llama(60).eval(), torch.cat(drawn(), 1)
    ids = torch.randint(1, 60, mask.shape)
    with torch.no_grad():
        whole = completion_log_probs(model, ids, mask, 6).log_probs
        parts = cut(DYNAMIC, 2)
        outputs = [
            completion_log_probs(model, part.select(ids, 6), part.select(mask, 6), part.completion).log_probs
            for part in parts
        ]
    after = drawn()[1]
    torch.testing.assert_close(join_rows(parts, outputs, 6) * after, whole * after, rtol=1e-5, atol=1e-6)
