"""Padded lengths under each policy."""

from __future__ import annotations

import logging

import pytest

from accelerators import ShapePolicy

POLICIES = [
    ShapePolicy("bucketed"),
    ShapePolicy("bucketed", growth=1.3),
    ShapePolicy("bucketed", growth=1.01, first=1),
    ShapePolicy("bucketed", growth=None, first=48),
    ShapePolicy("bucketed", pad_to_multiple=24, first=10, growth=1.5, largest=100),
    ShapePolicy("bucketed", first=7, largest=7),
]


@pytest.mark.parametrize(
    ("policy", "lengths"),
    [
        (ShapePolicy("static"), [950] * 5),
        (ShapePolicy("dynamic"), [1, 48, 49, 100, 949]),
        (ShapePolicy("dynamic", pad_to_multiple=8), [8, 48, 56, 104, 950]),
        (ShapePolicy("bucketed", first=32), [32, 64, 64, 128, 950]),
        (ShapePolicy("bucketed", first=48, growth=None), [48, 48, 96, 144, 950]),
        (ShapePolicy("bucketed", pad_to_multiple=8, first=64), [64, 64, 64, 128, 950]),
    ],
)
def test_lengths_of_each_policy(policy, lengths):
    assert [policy.length(longest, 950) for longest in (1, 48, 49, 100, 949)] == lengths


@pytest.mark.parametrize("policy", POLICIES)
def test_buckets_are_idempotent_monotone_and_aligned(policy):
    buckets = [policy.bucket(n) for n in range(1, 400)]
    assert all(bucket >= n for n, bucket in enumerate(buckets, start=1))
    assert [policy.bucket(bucket) for bucket in buckets] == buckets
    assert buckets == sorted(buckets)
    assert all(bucket % policy.pad_to_multiple == 0 for bucket in buckets)


def test_oversize_row_falls_in_a_bucket_that_is_logged_once(caplog):
    policy = ShapePolicy("bucketed", first=10, largest=50)
    with caplog.at_level(logging.WARNING):
        assert [policy.bucket(n) for n in (50, 51, 99, 101)] == [50, 100, 100, 150]
    assert [record.getMessage() for record in caplog.records] == [
        "a batch is longer than the largest bucket (50); it is padded to 100",
        "a batch is longer than the largest bucket (50); it is padded to 150",
    ]


def test_a_row_longer_than_the_maximum_is_the_callers_mistake():
    with pytest.raises(ValueError, match="101 tokens is longer than the maximum of 100"):
        ShapePolicy("static").length(101, 100)


@pytest.mark.parametrize(
    "arguments",
    [{"kind": "round"}, {"pad_to_multiple": 0}, {"first": 0}, {"growth": 1.0}, {"first": 64, "largest": 32}],
)
def test_a_policy_that_cannot_work_is_refused(arguments):
    with pytest.raises(ValueError, match="ShapePolicy"):
        ShapePolicy(**{"kind": "bucketed", **arguments})
