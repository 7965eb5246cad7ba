"""On two ranks, averages and observed gradients are of the whole, and an overflow on one rank is one on both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import two_ranks
from tests.engine.engines import IDS, loss
from tests.forks import Forks
from tests.helpers import llama, weights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-ranks")
    forks.ranks(2, f"from tests.engine import two_ranks; two_ranks.main({str(folder)!r})")
    return folder


@pytest.fixture(scope="module")
def observed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("observed")
    forks.ranks(2, f"from tests.engine import two_ranks; two_ranks.observe({str(folder)!r})")
    return folder


def seen(folder: Path, what: str) -> list[Any]:
    return [torch.load(folder / f"{what}, rank {rank}") for rank in range(2)]


@pytest.mark.parametrize("name", two_ranks.AVERAGES)
def test_the_average_of_shards_is_that_of_the_whole(folder, name):
    for results in seen(folder, "averages"):
        mine = results[name]
        for parameter, expected in mine["expected"].items():
            torch.testing.assert_close(mine["average"][parameter].double(), expected, rtol=3e-7, atol=1e-8)
            assert torch.equal(mine["after"][parameter], mine["before"][parameter])
            assert not torch.equal(mine["average"][parameter], mine["before"][parameter])
        share = mine["trained"] if name == "ZeRO 0" else mine["trained"] / 2
        assert share <= mine["held"] < share * 1.05 + 100  # shards are filled up


@pytest.mark.parametrize("name", [name for name in two_ranks.AVERAGES if "LoRA" not in name])
def test_saved_model_is_the_average(folder, name):
    saved, expected = weights(folder / name), seen(folder, "averages")[0][name]["expected"]
    assert saved.keys() == expected.keys()
    for parameter, tensor in saved.items():
        rounded = {"rtol": 2**-8, "atol": 1e-8} if tensor.dtype == torch.bfloat16 else {"rtol": 3e-7, "atol": 1e-8}
        torch.testing.assert_close(tensor.double(), expected[parameter], **rounded)


@pytest.mark.parametrize("zero_stage", range(4))
def test_an_overflow_on_one_rank_skips_both_steps_on_both(folder, zero_stage):
    for results in seen(folder, "overflows"):
        mine = results[zero_stage]
        assert mine["skipped"] == [1, 1]
        assert mine["scales"] == [2.0**10, 2.0**9]
        for before, after in zip(mine["before"], mine["after"]):
            assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("zero_stage", range(4))
def test_observed_gradients_are_the_sum_over_both_ranks(observed, zero_stage):
    model = llama(60)
    (loss(model, IDS)[0] + loss(model, IDS.flip(1))[0]).backward()
    for results in seen(observed, "gradients"):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(results[zero_stage][name], parameter.grad, rtol=1e-4, atol=1e-6)
