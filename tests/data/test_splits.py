"""Shares are deterministic, disjoint, near their proportions, and never part equal prompts."""

from __future__ import annotations

import pytest

from rlhf.data.records import Message, Row
from rlhf.data.stage_dataset import prompt_key, select_by_weight, split_by_key

SHARES = {"sft": 2.0, "reward": 4.0, "ppo": 4.0}


def parts_of(count: int, shares: dict[str, float] = SHARES, *, seed: int = 0, groups: int | None = None):
    return split_by_key(range(count), shares, seed=seed, key=lambda item: str(item % (groups or count)))


def test_parts_have_their_proportions_and_share_nothing() -> None:
    parts = parts_of(1000)
    assert {name: len(items) for name, items in parts.items()} == {"sft": 200, "reward": 400, "ppo": 400}
    assert sorted(item for items in parts.values() for item in items) == list(range(1000))


def test_the_seed_decides() -> None:
    assert parts_of(100, seed=3) == parts_of(100, seed=3)
    assert parts_of(100, seed=3) != parts_of(100, seed=4)


def test_items_of_one_key_stay_together() -> None:
    parts = parts_of(1000, groups=30)
    groups = [{item % 30 for item in items} for items in parts.values()]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 30


@pytest.mark.parametrize("shares", [SHARES, {"train": 0.95, "heldout": 0.05}, {"a": 1.0, "b": 98.0, "c": 1.0}])
def test_no_part_is_empty_while_there_are_enough_keys(shares: dict[str, float]) -> None:
    for seed in range(10):
        for count in range(len(shares), 12):
            assert all(parts_of(count, shares, seed=seed).values())


def test_with_too_few_keys_some_parts_are_empty_but_nothing_is_lost() -> None:
    assert sorted(map(len, parts_of(2).values())) == [0, 1, 1]
    assert parts_of(0) == {"sft": [], "reward": [], "ppo": []}


def test_a_share_of_zero_gets_nothing() -> None:
    parts = parts_of(10, {"sft": 1.0, "reward": 0.0, "ppo": 1.0})
    assert [len(items) for items in parts.values()] == [5, 0, 5]


def test_one_large_key_does_not_break_the_shares() -> None:
    parts = split_by_key([0] * 90 + list(range(1, 11)), SHARES, seed=0, key=str)
    assert all(parts.values())
    assert sum(map(len, parts.values())) == 100


def test_letter_case_and_white_space_do_not_make_another_prompt() -> None:
    def row(text: str) -> Row:
        return Row((Message("user", text),), text, None, None, None, "")

    assert prompt_key(row("Hello  there\n")) == prompt_key(row("hello there"))
    assert prompt_key(row("Hello")) != prompt_key(row("Hallo"))


def test_blending_takes_rows_by_weight_without_repeating_any() -> None:
    kept = select_by_weight([100, 1000], [1.0, 3.0], seed=0)
    assert kept[0] == list(range(100))
    assert len(kept[1]) == len(set(kept[1])) == 300
    assert max(kept[1]) < 1000
    assert (
        kept == select_by_weight([100, 1000], [1.0, 3.0], seed=0) != select_by_weight([100, 1000], [1.0, 3.0], seed=1)
    )


def test_one_source_is_kept_whole_and_an_empty_one_holds_nobody_back() -> None:
    assert select_by_weight([5], [0.1], seed=0) == [[0, 1, 2, 3, 4]]
    assert [len(rows) for rows in select_by_weight([0, 5], [1.0, 1.0], seed=0)] == [0, 5]


def test_a_source_of_weight_all_is_whole_and_says_nothing_of_the_others():
    kept = select_by_weight([100, 40, 1000], [1.0, "all", 3.0], seed=0)
    assert [len(rows) for rows in kept] == [100, 40, 300]
    assert [len(rows) for rows in select_by_weight([100, 40], ["all", "all"], seed=0)] == [100, 40]
