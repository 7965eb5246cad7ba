"""What each rank of `test_ranks` runs: every collective on tensors of the device -> JSON, by rank.

python collectives.py FOLDER; rank r's tensors hold the number r + 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gaudi_sim.plugin
import torch
import torch.distributed as dist

gaudi_sim.install()
import habana_frameworks.torch.distributed.hccl as hccl  # noqa: E402 (importable from here on)
from torch.distributed.distributed_c10d import _coalescing_manager  # noqa: E402

WORLD_SIZE, RANK, _ = hccl.initialize_distributed_hpu()
HPU = torch.device("hpu")


def mine(count: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((count,), RANK + 1.0, dtype=dtype, device=HPU)


def empty(count: int = 2) -> torch.Tensor:
    return torch.zeros(count, device=HPU)


def empties(count: int = 2) -> list[torch.Tensor]:
    return [empty(count) for _ in range(WORLD_SIZE)]


def all_reduce(op: Any = dist.ReduceOp.SUM, dtype: torch.dtype = torch.float32) -> Any:
    tensor = mine(dtype=dtype)
    dist.all_reduce(tensor, op)
    return tensor


def refusal_of(collective: Callable[[], Any]) -> str:
    try:
        collective()
    except RuntimeError as error:
        return str(error)
    return ""


def all_reduce_of_a_view() -> Any:
    whole = mine(6)
    dist.all_reduce(whole[2:4])
    return whole


def all_reduce_async() -> Any:
    tensor = mine()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert work.is_completed()
    (result,) = work.result()
    (value,) = work.get_future().wait()
    assert result.device == value.device == tensor.device
    return value + result - tensor


def all_reduce_coalesced() -> Any:
    tensors = [mine(), mine(1)]
    dist.all_reduce_coalesced(tensors)
    return tensors


def all_gather() -> Any:
    outputs = empties()
    dist.all_gather(outputs, mine())
    return outputs


def all_gather_into_tensor() -> Any:
    output = empty(2 * WORLD_SIZE)
    dist.all_gather_into_tensor(output, mine())
    return output


def all_gather_object() -> Any:
    objects: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(objects, {"rank": RANK})
    return objects


def broadcast() -> Any:
    tensor = mine()
    dist.broadcast(tensor, src=1)
    return tensor


def broadcast_object_list() -> Any:
    objects = [RANK, str(RANK)]
    dist.broadcast_object_list(objects, src=1)
    return objects


def coalesced_gathers(device: torch.device | None) -> Any:
    outputs = [empty(2 * WORLD_SIZE), empty(WORLD_SIZE)]
    with _coalescing_manager(device=device, async_ops=True) as works:
        for output, tensor in zip(outputs, (mine(), mine(1))):
            dist.all_gather_into_tensor(output, tensor, async_op=True)
    works.wait()
    return outputs


def coalesced_scatters(device: torch.device | None) -> Any:
    outputs = [empty(2), empty(1)]
    with _coalescing_manager(device=device, async_ops=True) as works:
        for output in outputs:
            dist.reduce_scatter_tensor(output, mine(len(output) * WORLD_SIZE), async_op=True)
    works.wait()
    return outputs


def reduce() -> Any:
    tensor = mine()
    dist.reduce(tensor, dst=0)
    return tensor if RANK == 0 else None


def reduce_scatter() -> Any:
    output = empty()
    dist.reduce_scatter(output, [mine() for _ in range(WORLD_SIZE)])
    return output


def reduce_scatter_tensor(op: Any = dist.ReduceOp.SUM) -> Any:
    output = empty()
    dist.reduce_scatter_tensor(output, mine(2 * WORLD_SIZE), op)
    return output


def gather() -> Any:
    outputs = empties() if RANK == 0 else None
    dist.gather(mine(), outputs, dst=0)
    return outputs


def scatter() -> Any:
    output = empty()
    dist.scatter(output, [mine() * place for place in range(WORLD_SIZE)] if RANK == 0 else None, src=0)
    return output


def all_to_all() -> Any:
    outputs = empties()
    dist.all_to_all(outputs, [mine() for _ in range(WORLD_SIZE)])
    return outputs


def all_to_all_single() -> Any:
    output = empty(WORLD_SIZE)
    dist.all_to_all_single(output, mine(WORLD_SIZE))
    return output


def send_and_receive() -> Any:
    tensor = mine()
    if RANK == 0:
        dist.send(tensor, dst=1)
    elif RANK == 1:
        assert dist.recv(tensor) == 0  # from any
    return tensor


def send_and_receive_in_a_ring() -> Any:
    received = empty()
    operations = [
        dist.P2POp(dist.isend, mine(), (RANK + 1) % WORLD_SIZE),
        dist.P2POp(dist.irecv, received, (RANK - 1) % WORLD_SIZE),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def part_of_the_ranks() -> Any:
    group = dist.new_group([0, 1])
    tensor = mine()
    if RANK < 2:
        dist.all_reduce(tensor, group=group)
    return tensor


def barrier() -> Any:
    dist.barrier()
    return None


def tensor_of_the_host() -> Any:
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error)


COLLECTIVES: dict[str, Callable[[], Any]] = {
    "all_reduce": all_reduce,
    "all_reduce of bf16": lambda: all_reduce(dtype=torch.bfloat16),
    "all_reduce, mean": lambda: refusal_of(lambda: all_reduce(dist.ReduceOp.AVG)),
    "all_reduce, maximum": lambda: all_reduce(dist.ReduceOp.MAX),
    "all_reduce of a view": all_reduce_of_a_view,
    "all_reduce, asynchronous": all_reduce_async,
    "all_reduce_coalesced": all_reduce_coalesced,
    "all_gather": all_gather,
    "all_gather_into_tensor": all_gather_into_tensor,
    "all_gather_into_tensor, coalesced": lambda: coalesced_gathers(None),
    "all_gather_into_tensor, coalesced by the backend": lambda: coalesced_gathers(HPU),
    "all_gather_object": all_gather_object,
    "broadcast": broadcast,
    "broadcast_object_list": broadcast_object_list,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "reduce_scatter_tensor, mean": lambda: refusal_of(lambda: reduce_scatter_tensor(dist.ReduceOp.AVG)),
    "reduce_scatter_tensor, coalesced": lambda: coalesced_scatters(None),
    "reduce_scatter_tensor, coalesced by the backend": lambda: coalesced_scatters(HPU),
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all_single,
    "send and receive": send_and_receive,
    "send and receive in a ring": send_and_receive_in_a_ring,
    "a group of the first two ranks": part_of_the_ranks,
    "barrier": barrier,
    "a tensor of the host": tensor_of_the_host,
}


def plain(value: Any) -> Any:
    """Values that JSON holds; a tensor has to be on the device."""
    if isinstance(value, torch.Tensor):
        assert value.device.type == "hpu", value.device
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, list) else value


def main() -> None:
    dist.init_process_group("hccl")
    results = {}
    for name, collective in COLLECTIVES.items():
        try:
            results[name] = plain(collective())
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    (Path(sys.argv[1]) / f"{RANK}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
