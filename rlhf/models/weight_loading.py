"""Map a checkpoint's weights to a model's names, and load them into the model one by one.

`prepare_parameters` takes a model on torch's meta device and the tensors of its checkpoint, notes the source of each
parameter, and computes what no checkpoint holds (a new head, buffers). `fill_parameters` then puts real parameters in
their place, of any type and on any device, so that no more than one exists twice. Each tensor of a file is read once
and rounded once.

Names and conversions (such as stacked experts) are those of transformers, the same in 5.17 to 5.23.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.models import lazy_tensors
from rlhf.models.lazy_tensors import Computed, InMemory, Source

PlaceParameter = Callable[[str, nn.Module, nn.Parameter], nn.Parameter | None]
"""(name, module, unfilled parameter) -> the parameter that replaces it; None if the module has it already.

The name ends with the parameter's name in the module. `get_source` returns the numbers for the parameter.
"""


def rename_tensors(model: Any, tensors: Mapping[str, Source], keys: Mapping[str, str] | None) -> dict[str, Source]:
    """Return a checkpoint's `tensors` by the names of `model`, which is on the meta device.

    transformers' `convert_and_load_state_dict_in_model` maps them in the same way. `keys` is its `key_mapping`:
    patterns of names -> the model's.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    state, prefix = model.state_dict(), model.base_model_prefix
    mapping = get_model_conversion_mapping(model, dict(keys) if keys else None)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    sources: dict[str, Source] = {}
    conversions: dict[str, _Conversion] = {}
    for key in sorted(tensors, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state:
            continue
        if pattern is None:
            sources.setdefault(name, tensors[key])
        else:
            new = _Conversion(model, name, by_pattern[pattern])
            conversions.setdefault(name, new).parts.append((key, pattern, tensors[key]))
    for conversion in conversions.values():
        sources |= conversion.sources()
    return sources


def has_all_weights(model: Any, sources: Mapping[str, Source]) -> bool:
    """Return True if `sources` has all tensors that transformers has found for `model` on the meta device."""
    covered = {id(parameter) for name, parameter in _parameters(model).items() if name in sources}
    return all(
        id(parameter) in covered for parameter in model.parameters() if getattr(parameter, "_is_hf_initialized", False)
    )


def get_source(parameter: Tensor) -> Source | None:
    """Return the unrounded source of a parameter's numbers; None if it is unknown."""
    source: Source | None = getattr(parameter, "source", None)
    return source


def set_source(parameter: Tensor, source: Source | None) -> None:
    """Note the source of a parameter's numbers; the note survives wrapping, renaming and sharding."""
    parameter.source = source  # type: ignore[attr-defined]


def clear_sources(model: nn.Module) -> None:
    """Release all sources in memory; the parameters made from them stay."""
    for parameter in model.parameters():
        if not isinstance(get_source(parameter), lazy_tensors.OnDisk):
            set_source(parameter, None)


def prepare_parameters(model: Any, sources: Mapping[str, Source]) -> None:
    """Note the `sources` of parameters, by the names of `model`, and create the rest of it.

    `model` is on the meta device. Parameters without a source, or with one of another shape, are drawn in float32 from
    torch's generator, and buffers are computed, as transformers does it. Tied weights are tied.
    """
    _tie_weights(model, sources)
    owners = dict(model.named_modules(remove_duplicate=False))
    for name, parameter in _parameters(model).items():
        source = sources.get(name)
        if source is not None and source.shape == parameter.shape and get_source(parameter) is None:
            set_source(parameter, source)
    created: dict[int, nn.Parameter] = {}
    for name, parameter in _parameters(model).items():
        parameter._is_hf_initialized = get_source(parameter) is not None  # type: ignore[attr-defined]
        if get_source(parameter) is None:
            owner, key = _find_owner(owners, name)
            new = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
            owner._parameters[key] = created.setdefault(id(parameter), new)
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        owner, key = _find_owner(owners, name)
        source = sources.get(name)
        if source is None:
            owner._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype)
        else:
            owner._buffers[key] = lazy_tensors.read_whole(source, buffer.dtype)
            owner._buffers[key]._is_hf_initialized = True  # type: ignore[union-attr]
    for module in owners.values():
        module._is_hf_initialized = False
    model.initialize_weights()  # those that are not marked as initialized


def read_parameters(module: nn.Module) -> None:
    """Read parameters of `module` itself in float32, to be inspected and changed before `fill_parameters`."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        if (source := get_source(parameter)) is not None:
            module._parameters[key] = nn.Parameter(lazy_tensors.read_whole(source, torch.float32))


def fill_parameters(model: Any, put: PlaceParameter) -> Any:
    """Replace each parameter of a prepared model by the result of `put`; tied ones by one.

    Returns:
        The model.
    """
    filled: dict[int, nn.Parameter | None] = {}
    owners = dict(model.named_modules(remove_duplicate=False))
    for name, parameter in _parameters(model).items():
        owner, key = _find_owner(owners, name)
        if id(parameter) not in filled:
            if get_source(parameter) is None:
                set_source(parameter, InMemory(parameter.detach()))
            filled[id(parameter)] = put(name, owner, parameter)
        if (new := filled[id(parameter)]) is not None:
            owner._parameters[key] = new
    return model


def place_in_memory(dtype: torch.dtype, device: torch.device | None = None) -> PlaceParameter:
    """Return a `PlaceParameter` for parameters in memory; floating-point ones get `dtype`."""

    def put(name: str, module: nn.Module, parameter: nn.Parameter) -> nn.Parameter:
        source = get_source(parameter)
        assert source is not None
        new_dtype = dtype if parameter.is_floating_point() else parameter.dtype
        if isinstance(source, InMemory) and source.dtype == new_dtype and device in (None, source.tensor.device):
            tensor, source = source.tensor, None
        else:
            tensor = lazy_tensors.read_whole(source, new_dtype, device)
        new = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        set_source(new, source)
        return new

    return put


def place_sharded(config: dict[str, Any], dtype: torch.dtype) -> PlaceParameter:
    """Return a `PlaceParameter` that keeps this rank's part of each parameter, in `dtype`, as `config` asks.

    While a parameter is sharded, the device has memory for all of it; the host's memory holds only the written part.
    """
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

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


def whole_bytes(parameter: Any) -> int:
    """Return the bytes of a whole parameter. ZeRO-3 leaves a sharded one empty, and `ds_numel` counts its numbers."""
    size: int = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
    return size


def local_range(parameter: Any) -> tuple[int, int]:
    """Return (start, stop): this rank's part of a sharded parameter, flattened."""
    size = -(-parameter.ds_numel // parameter.ds_zero_partition_world_size)
    start = min(size * parameter.ds_zero_partition_rank, parameter.ds_numel)
    return start, min(start + size, parameter.ds_numel)


def extend_embeddings(model: Any, rows: int) -> None:
    """Add rows to the embeddings of a prepared model, each the mean of the old rows, so the same on every rank.

    The mean's logit is the mean of all logits, so a new token is never likelier than the average one. Rows drawn at
    random would have a logit near 0, which in a model whose logits are all far below (GPT-2) takes all probability.
    """
    before = {key: get_source(parameter) or InMemory(parameter.detach()) for key, parameter in _embeddings(model)}
    with torch.random.fork_rng(devices=[]):  # rows are drawn, then replaced
        model.resize_token_embeddings(rows, mean_resizing=False)
    for key, parameter in _embeddings(model):
        if key in before and parameter.shape[0] > before[key].shape[0]:
            set_source(parameter, lazy_tensors.Extended(before[key], rows, lazy_tensors.compute_mean_row(before[key])))


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by all of their names; a tied one has several."""
    return dict(model.named_parameters(remove_duplicate=False))


def _embeddings(model: Any) -> list[tuple[str, nn.Parameter]]:
    layers = {"in": model.get_input_embeddings(), "out": model.get_output_embeddings()}
    return [
        (f"{place}.{key}", parameter)
        for place, layer in layers.items()
        if layer is not None
        for key, parameter in layer.named_parameters(recurse=False)
    ]


def _tie_weights(model: Any, sources: Mapping[str, Source]) -> None:
    """Tie weights that a checkpoint has twice and the model once; if the copies differ, they stay separate."""
    for target, source in list(getattr(model, "all_tied_weights_keys", {}).items()):
        if target not in sources or source not in sources:
            continue  # transformers has tied them
        if lazy_tensors.sources_equal(sources[target], sources[source]):
            owner, key = _find_owner(dict(model.named_modules(remove_duplicate=False)), target)
            owner._parameters[key] = model.get_parameter(source)
        else:
            model.all_tied_weights_keys.pop(target)


def _find_owner(owners: Mapping[str, nn.Module], name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return owners[path], key


class _Conversion:
    """Tensors of a checkpoint that transformers converts to tensors of the model."""

    def __init__(self, model: Any, name: str, converter: Any) -> None:
        self._model, self._name, self._converter = model, name, converter
        self._results: dict[str, Tensor] = {}
        self.parts: list[tuple[str, str, Source]] = []

    def sources(self) -> dict[str, Source]:
        """Return the converted tensors by the model's names."""
        outlines = self._convert(lambda source: torch.empty(source.shape, dtype=source.dtype, device="meta"))
        return {
            name: Computed(partial(self._result, name), tensor.shape, tensor.dtype) for name, tensor in outlines.items()
        }

    def _result(self, name: str) -> Tensor:
        if name not in self._results:  # the others are kept, since they are read next
            self._results = self._convert(lambda source: source.read().view(source.shape))
        return self._results.pop(name)

    def _convert(self, read: Callable[[Source], Tensor]) -> dict[str, Tensor]:
        converter = copy.deepcopy(self._converter)
        for key, pattern, source in self.parts:
            converter.add_tensor(self._name, key, pattern, partial(read, source))
        results = converter.convert(self._name, model=self._model, config=self._model.config)
        return {name: result[0] if isinstance(result, list) else result for name, result in results.items()}
