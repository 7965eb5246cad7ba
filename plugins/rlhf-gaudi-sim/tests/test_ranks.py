"""Several ranks with hccl between them, started by rlhf's own launcher: every collective, on tensors of the device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

WORKER = Path(__file__).with_name("collectives.py")

LAUNCH = """
import sys
from rlhf.launchers import local
outcome = local.spawn_ranks(int(sys.argv[1]), [sys.executable, *sys.argv[2:]], debug=True)
sys.exit(outcome.report() if outcome else 0)
"""


def expected(size: int, rank: int) -> dict[str, Any]:
    """What rank `rank` of `size` has to get; rank r contributes the number r + 1."""
    total = size * (size + 1) / 2
    numbers = [r + 1.0 for r in range(size)]
    pairs = [[number] * 2 for number in numbers]
    pairs_in_a_row = [number for pair in pairs for number in pair]
    own = [rank + 1.0] * 2
    return {
        "all_reduce": [total] * 2,
        "all_reduce of bf16": [total] * 2,
        "all_reduce, mean": "hccl: allreduce has no AVG; divide the sum",
        "all_reduce, maximum": [float(size)] * 2,
        "all_reduce of a view": [*own, total, total, *own],
        "all_reduce, asynchronous": [total] * 2,
        "all_reduce_coalesced": [[total] * 2, [total]],
        "all_gather": pairs,
        "all_gather_into_tensor": pairs_in_a_row,
        "all_gather_into_tensor, coalesced": [pairs_in_a_row, numbers],
        "all_gather_into_tensor, coalesced by the backend": [pairs_in_a_row, numbers],
        "all_gather_object": [{"rank": r} for r in range(size)],
        "broadcast": [2.0] * 2,
        "broadcast_object_list": [1, "1"],
        "reduce": [total] * 2 if rank == 0 else None,
        "reduce_scatter": [total] * 2,
        "reduce_scatter_tensor": [total] * 2,
        "reduce_scatter_tensor, mean": "hccl: reduce_scatter_single has no AVG; divide the sum",
        "reduce_scatter_tensor, coalesced": [[total] * 2, [total]],
        "reduce_scatter_tensor, coalesced by the backend": [[total] * 2, [total]],
        "gather": pairs if rank == 0 else None,
        "scatter": [float(rank)] * 2,
        "all_to_all": pairs,
        "all_to_all_single": numbers,
        "send and receive": [1.0] * 2 if rank == 1 else own,
        "send and receive in a ring": [(rank - 1) % size + 1.0] * 2,
        "a group of the first two ranks": [3.0] * 2 if rank < 2 else own,
        "barrier": None,
        "a tensor of the host": "hccl: allreduce of a tensor on cpu; move it to hpu, or use a gloo group",
    }


COLLECTIVES = tuple(expected(2, 0))


@pytest.fixture(scope="module")
def results(python: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """Return what the ranks got: results(size)[rank][collective]; run once for each size."""
    known: dict[int, list[dict[str, Any]]] = {}

    def run(size: int) -> list[dict[str, Any]]:
        if size not in known:
            folder = tmp_path_factory.mktemp(f"ranks-{size}")
            done = python("-c", LAUNCH, str(size), str(WORKER), str(folder))
            assert done.returncode == 0, done.stderr
            known[size] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
        return known[size]

    return run


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_collective(results: Callable[[int], list[dict[str, Any]]], size: int, collective: str) -> None:
    got = [of_rank[collective] for of_rank in results(size)]
    assert got == [expected(size, rank)[collective] for rank in range(size)]
