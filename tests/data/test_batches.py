"""Masks come from lengths, shapes from the policy, and a step's rows do not depend on how it is shared."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from accelerators import ShapePolicy
from rlhf.data.batches import Batches, collate_ppo, collate_reward, collate_sft
from rlhf.data.examples import Demonstration, Pair, Prompt
from rlhf.data.records import Message, Row

EOS = PAD = 2  # the same token on purpose
ROW = Row((Message("user", "a"),), "a", "b", "b", "c", "rows.jsonl:1")
DYNAMIC, STATIC = ShapePolicy("dynamic"), ShapePolicy("static")
LIMITS: dict[str, Any] = {"policy": DYNAMIC, "maximum": 8, "pad_token_id": PAD}


def demonstration(prompt: int, completion: int) -> Demonstration:
    return Demonstration([10] * prompt, [11] * (completion - 1) + [EOS], ROW)


def test_sft_rows_are_right_padded_with_completions_as_targets() -> None:
    batch = collate_sft([demonstration(2, 2), demonstration(1, 4)], **LIMITS)
    assert batch["input_ids"].tolist() == [[10, 10, 11, EOS, PAD], [10, 11, 11, 11, EOS]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert batch["loss_mask"].long().tolist() == [[0, 0, 1, 1, 0], [0, 1, 1, 1, 1]]


def test_sft_loss_on_all_excludes_only_the_first_token() -> None:
    batch = collate_sft([demonstration(2, 2)], loss_on="all", **LIMITS)
    assert batch["loss_mask"].long().tolist() == [[0, 1, 1, 1]]


def test_reward_rows_are_the_chosen_then_the_rejected() -> None:
    pairs = [Pair([10], [11, EOS], [12, 12, EOS], ROW), Pair([10, 10], [13, EOS], [14, EOS], ROW)]
    batch = collate_reward(pairs, 1, **LIMITS)
    assert batch["input_ids"].tolist() == [
        [10, 11, EOS, PAD],
        [10, 10, 13, EOS],
        [10, 12, 12, EOS],
        [10, 10, 14, EOS],
    ]
    assert batch["attention_mask"].sum(1).tolist() == [3, 4, 4, 4]
    assert batch["pair_mask"].tolist() == [True, False]


def test_ppo_prompts_are_padded_on_the_left() -> None:
    batch = collate_ppo([Prompt([5, 6, 7], ROW), Prompt([EOS, 8], ROW)], **LIMITS)
    assert batch["prompt_ids"].tolist() == [[5, 6, 7], [PAD, EOS, 8]]
    assert batch["prompt_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]
    assert batch["row_mask"].tolist() == [True, True]


def test_static_policy_pads_every_batch_to_the_maximum() -> None:
    collate = partial(collate_sft, **{**LIMITS, "policy": STATIC})
    shapes = {collate([demonstration(1, length)])["input_ids"].shape for length in range(1, 8)}
    assert shapes == {(1, 8)}


def test_filler_rows_are_attended_to_but_have_no_loss() -> None:
    batch = collate_sft([demonstration(1, 2)] * 3, 1, **LIMITS)
    assert batch["attention_mask"].bool().all(), "a row without any real token would make the softmax NaN"
    assert batch["loss_mask"].any(1).tolist() == [True, False, False]


def rows_of(batches: list[dict[str, torch.Tensor]]) -> list[int]:
    """The first token of each real row: here it names the example."""
    return [int(row[-1]) for batch in batches for row, real in zip(batch["prompt_ids"], batch["row_mask"]) if real]


EXAMPLES = [Prompt([100 + n], ROW) for n in range(10)]


def loader(rank: int = 0, world_size: int = 1, micro: int = 4, **options: Any) -> Batches[Prompt]:
    collate = partial(collate_ppo, policy=STATIC, maximum=3, pad_token_id=PAD)
    sizes = {"batch_size": 4, "micro_batch_size": micro, "rank": rank, "world_size": world_size}
    return Batches(EXAMPLES, collate, **{"seed": 0, **sizes, **options})


@pytest.mark.parametrize("step", range(6))
def test_step_sees_the_same_rows_for_any_ranks_and_micro_batches(step: int) -> None:
    whole = rows_of(loader().step(step))
    assert rows_of(loader(micro=2).step(step)) == whole
    assert [row for rank in (0, 1) for row in rows_of(loader(rank, 2, micro=2).step(step))] == whole
    assert [row for rank in range(4) for row in rows_of(loader(rank, 4, micro=1).step(step))] == whole


def test_epoch_has_every_example_once_in_a_new_order() -> None:
    batches = loader()
    assert len(batches) == 3
    epochs = [[row for k in range(3) for row in rows_of(batches.step(3 * e + k))] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(100, 110))
    assert epochs[0] != epochs[1]


def test_last_batch_of_an_epoch_keeps_its_size() -> None:
    for rank in range(2):
        for batch in loader(rank, 2, micro=1).step(2):
            assert batch["prompt_ids"].shape == (1, 3)
    assert [b["row_mask"].tolist() for b in loader(1, 2, micro=2).step(2)] == [[False, False]]
    assert len(loader().examples(2)) == 2


def test_endless_batches_continue_with_the_next_epoch() -> None:
    """Ten rows in batches of four: the third batch has two rows of each of two epochs."""
    batches, epochs = loader(endless=True), loader()
    rows = [row for step in range(5) for row in rows_of(batches.step(step))]
    assert rows == [row for step in range(6) for row in rows_of(epochs.step(step))]
    assert [row for rank in (0, 1) for row in rows_of(loader(rank, 2, 2, endless=True).step(2))] == rows[8:12]
    assert rows_of(loader(endless=True).step(4)) == rows[16:20]


def test_step_can_be_repeated_and_reached_directly() -> None:
    batches = loader()
    late = rows_of(batches.step(7))
    rows_of(batches.step(0))
    assert rows_of(batches.step(7)) == rows_of(loader().step(7)) == late


def test_order_depends_on_the_seed_unless_not_shuffled() -> None:
    assert rows_of(loader(seed=1).step(0)) != rows_of(loader(seed=2).step(0))
    assert rows_of(loader(shuffle=False).step(1)) == [104, 105, 106, 107]
