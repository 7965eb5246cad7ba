"""Parameters sharded by ZeRO-3 as they are created: a rank reads only its part of each.

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

    While a parameter is sharded, the device has memory for all of it; the host's memory holds only the written part.
    """
    # As an engine shards whole parameters. The first call creates the groups of ranks for hpZ (DeepSpeed 0.19).
    neighbours = groups._get_zero_param_intra_parallel_group()
    init = Init(module=nn.Module(), config_dict_or_path=config, zero_param_parallel_group=neighbours)

    def put(name: str, module: nn.Module, parameter: nn.Parameter) -> nn.Parameter:
        source = get_source(parameter)
        assert source is not None
        new_dtype = dtype if parameter.is_floating_point() else parameter.dtype
        buffer = torch.empty(parameter.shape, dtype=new_dtype, device=init.local_device)
        new = nn.Parameter(buffer, requires_grad=parameter.requires_grad)
        init._convert_to_deepspeed_param(new)  # private in 0.19.8; `Init` does it to each parameter, after a broadcast
        start, stop = local_range(new) if init.zero_param_process_group is None else (0, buffer.numel())
        lazy_tensors.copy_source(source, buffer.view(-1)[start:stop], start)
        new.partition()  # type: ignore[attr-defined]  # DeepSpeed's
        set_source(new, source)
        return new

    return put


def is_sharded(parameter: Tensor) -> bool:
    """Return True if ZeRO-3 has sharded a parameter."""
    return hasattr(parameter, "ds_id")


def local_range(parameter: Any) -> tuple[int, int]:
    """Return (start, stop): this rank's part of a sharded parameter, flattened."""
    size = -(-parameter.ds_numel // parameter.ds_zero_partition_world_size)
    start = min(size * parameter.ds_zero_partition_rank, parameter.ds_numel)
    return start, min(start + size, parameter.ds_numel)
