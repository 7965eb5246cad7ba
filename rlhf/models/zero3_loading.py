"""Parameters sharded by ZeRO-3 as they are made: of each, a rank reads the part that it keeps, and nothing else.

`place_sharded` turns DeepSpeed's configuration of a model into a `PlaceParameter` for `fill_parameters`.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.utils import groups
from torch import Tensor, nn

from rlhf.models import lazy_tensors
from rlhf.models.weight_loading import PlaceParameter, get_source, set_source


def place_sharded(config: dict[str, Any], dtype: torch.dtype) -> PlaceParameter:
    """Return a `PlaceParameter` that keeps this rank's part of each parameter, in `dtype`, as `config` asks.

    While a parameter is cut, there is room for all of it on the device; of the host's memory only what is written
    counts, and that is the part.
    """
    # As an engine does with what is whole yet. Groups of ranks for hpZ are made once, by the first (deepspeed 0.19).
    neighbours = groups._get_zero_param_intra_parallel_group()
    init = Init(module=nn.Module(), config_dict_or_path=config, zero_param_parallel_group=neighbours)

    def put(name: str, module: nn.Module, parameter: nn.Parameter) -> nn.Parameter:
        found = get_source(parameter)
        assert found is not None
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        room = torch.empty(parameter.shape, dtype=kind, device=init.local_device)
        new = nn.Parameter(room, requires_grad=parameter.requires_grad)
        init._convert_to_deepspeed_param(new)  # private in 0.19.8; what `Init` does to a module's, but for a broadcast
        start, stop = local_range(new) if init.zero_param_process_group is None else (0, room.numel())
        lazy_tensors.copy_source(found, room.view(-1)[start:stop], start)
        new.partition()  # type: ignore[attr-defined]  # DeepSpeed's
        set_source(new, found)
        return new

    return put


def is_sharded(parameter: Tensor) -> bool:
    """Whether ZeRO-3 has a parameter in parts."""
    return hasattr(parameter, "ds_id")


def local_range(parameter: Any) -> tuple[int, int]:
    """(start, stop): the part of a sharded parameter, laid out flat, that this rank keeps."""
    size = -(-parameter.ds_numel // parameter.ds_zero_partition_world_size)
    start = min(size * parameter.ds_zero_partition_rank, parameter.ds_numel)
    return start, min(start + size, parameter.ds_numel)
