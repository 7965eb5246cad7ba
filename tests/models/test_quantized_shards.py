"""A quantized base at ZeRO-3: each rank stores its part of the bytes, and computes what one with all of them does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerators.quantized import KINDS
from tests.forks import Forks
from tests.helpers import weights


@pytest.fixture(scope="module", params=[2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 4))])
def run(request: Any, forks: Forks, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder, and the result of each rank."""
    folder = tmp_path_factory.mktemp("shards")
    code = f"from tests.models import ranks_of_shards as ranks; ranks.main({str(folder)!r}, {str(model_folder)!r})"
    forks.ranks(request.param, code)
    return folder, [torch.load(folder / f"rank {rank}", weights_only=False) for rank in range(request.param)]


@pytest.mark.parametrize(("kind", "size"), [("int8", 32 * 48 + 2 * 48 + 32), ("int4", 32 * 48 // 2 + 2 * 2 * 48)])
def test_each_rank_stores_its_share_of_the_bytes(run, kind, size):
    for result in run[1]:
        stored = result[kind]["stored"]
        assert len(stored) == 14
        # Weight [48, 32]: numbers of a byte and a step of two for each row, filled up to 64; or half a byte, and a step
        # and an offset for each row's only group.
        assert stored["model.layers.1.mlp.up_proj"] == size / len(run[1])
        assert result[kind]["whole while loading"] == 1
        assert result[kind]["released"] == [0] * 14
        assert result[kind]["saved for backward"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_gathered_weights_and_losses_are_those_of_whole_weights(run, kind):
    for result in run[1]:
        assert result[kind]["same bytes"]
        sharded, whole = result[kind]["first losses"]
        assert sharded == whole
        sharded, whole = result[kind]["frozen losses"]
        assert sharded == whole
        sharded, whole = result[kind]["counts"]
        assert sharded == whole


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_with_whole_weights(run, kind):
    for result in run[1]:
        torch.testing.assert_close(*result[kind]["steps"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_training_is_that_without_an_end(run, kind):
    for result in run[1]:
        expected, resumed = result[kind]["resumed"]
        assert len(expected) > 28 and expected.keys() == resumed.keys()
        assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", KINDS)
def test_exported_model_is_that_of_whole_weights(run, kind):
    sharded, plain = (weights(run[0] / f"{kind}, {name}") for name in ("sharded", "plain"))
    # A thousandth of the learning rate: where gradients are near 0, Adam enlarges what another order of sums changes.
    torch.testing.assert_close(sharded, plain, rtol=1e-4, atol=1e-5)
