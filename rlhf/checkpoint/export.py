"""Writing a trained model in Hugging Face's format, so that plain transformers loads it, or a note says how.

Tensors are gathered, merged with their adapters and written one after the other: no rank ever holds the whole model.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from rlhf.checkpoint.safetensors_writer import SafetensorsWriter
from rlhf.engine import distributed
from rlhf.models.forward import ScalarHead
from rlhf.models.lora import compute_merged_weight, find_adapted_layers, to_plain_name
from rlhf.models.quantized import compute_export_weight, find_quantized_layers
from rlhf.models.scalar_head import write_readme
from rlhf.models.zero3_loading import is_sharded
from rlhf.utils.atomic_io import atomic_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf.engine.engine import TrainingEngine


@dataclass(frozen=True)
class TensorToSave:
    """A tensor to be saved: what it is like, and how it is made once `parameters` are whole."""

    outline: Tensor
    make: Callable[[], Tensor]
    parameters: tuple[Any, ...]


def save_model(engine: TrainingEngine, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write the engine's model and the tokenizer to `path`, complete or not at all; every rank calls it.

    LoRA adapters are merged into the weights, in float32, and rounded once.
    """
    model: Any = engine.module.model if isinstance(engine.module, ScalarHead) else engine.module
    pieces = _pieces(model)
    groups = _groups(model, {name: piece.outline for name, piece in pieces.items()})
    # Whatever fails on rank 0, the others gather to the end, and so does rank 0: they would wait for it.
    failed: list[BaseException] = []
    with distributed.on_all_ranks(f"saving {path}"), contextlib.ExitStack() as stack:
        writer = None
        if distributed.world().is_main:
            with _kept(failed):
                folder = stack.enter_context(atomic_directory(path))
                _write_the_rest(model, tokenizer, folder)
                writer = stack.enter_context(SafetensorsWriter(folder, _outlines(model, pieces, groups)))
        for names in groups:
            group = {name: pieces[name] for name in names}
            with _whole(group.values()), _kept(failed), torch.no_grad():
                if writer and not failed:
                    made = _as_saved(model, {name: piece.make() for name, piece in group.items()})
                    for name, tensor in made.items():
                        writer.write(name, tensor)
        if failed:
            raise failed[0]


def _pieces(model: Any) -> dict[str, TensorToSave]:
    """What is saved of a model, by its names: the state that it would have without adapters, tied weights once."""
    layers = {f"{path}.weight": layer for path, layer in find_adapted_layers(model).items()}
    dtype = model.dtype
    ignored = set(model._keys_to_ignore_on_save or ())
    found: dict[str, TensorToSave] = {}
    for name, tensor in _once(model).items():
        plain = to_plain_name(name)
        if ".lora_" in name or plain in ignored:
            continue
        make, parameters = tensor.detach, [tensor]
        if (layer := layers.get(plain)) is not None:
            make = partial(_merged, layer, tensor.dtype)
            parameters += _factors(layer)
        outline = torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=tensor.dtype, device="meta")
        found[plain] = TensorToSave(outline, make, tuple(parameters))
    for path, layer in find_quantized_layers(model).items():
        outline = torch.empty(layer.weight.shape, dtype=dtype, device="meta")
        found[to_plain_name(f"{path}.weight")] = TensorToSave(outline, partial(_unquantized, model, path, dtype), ())
    return found


def _once(model: Any) -> dict[str, Any]:
    """The model's parameters and lasting buffers, each under one name: of tied ones that which is not tied to another.

    They are not detached, so that what ZeRO-3 knows of them is at hand.
    """
    targets = getattr(model, "all_tied_weights_keys", {})
    names: dict[int, list[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    kept = {min(same, key=lambda name: to_plain_name(name) in targets) for same in names.values()}
    return {name: tensor for name, tensor in state.items() if name in kept}


def _factors(layer: LoraLayer) -> list[nn.Parameter]:
    return [factor.weight for factors in (layer.lora_A, layer.lora_B) for factor in factors.values()]


def _merged(layer: LoraLayer, dtype: torch.dtype) -> Tensor:
    return compute_merged_weight(layer).to(dtype)


def _unquantized(model: Any, path: str, dtype: torch.dtype) -> Tensor:
    return compute_export_weight(model, path).to(dtype)


def _as_saved(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names, and in the shapes, that files have them in."""
    from transformers.core_model_loading import revert_weight_conversion  # 5.17 to 5.23, where save_pretrained has it

    found: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return found


def _groups(model: Any, outlines: dict[str, Tensor]) -> list[list[str]]:
    """Names in groups, whose tensors become what is saved together: alone, or a layer at a time, or all."""
    whole = {name: tensor.shape for name, tensor in _as_saved(model, dict(outlines)).items()}
    for of in (lambda name: name, lambda name: (re.match(r".*?\.\d+\.", name) or [name])[0], lambda name: ""):
        groups: dict[str, list[str]] = {}
        for name in outlines:
            groups.setdefault(of(name), []).append(name)
        parts = [_as_saved(model, {name: outlines[name] for name in names}) for names in groups.values()]
        if {name: tensor.shape for part in parts for name, tensor in part.items()} == whole:
            return list(groups.values())
    raise AssertionError("all together are the whole")


def _outlines(model: Any, pieces: Mapping[str, TensorToSave], groups: list[list[str]]) -> dict[str, Tensor]:
    return {
        name: tensor
        for names in groups
        for name, tensor in _as_saved(model, {name: pieces[name].outline for name in names}).items()
    }


def _whole(pieces: Iterable[TensorToSave]) -> Any:
    """A context in which the parameters of `pieces` are whole."""
    return GatheredParameters([each for piece in pieces for each in piece.parameters if is_sharded(each)])


@contextlib.contextmanager
def _kept(failed: list[BaseException]) -> Any:
    """An error in this block is kept for later."""
    try:
        yield
    except BaseException as error:
        failed.append(error)


def _write_the_rest(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """All but the weights."""
    model.config.use_cache = True  # a user of the saved model wants the cache that training does without
    try:
        model.save_pretrained(folder, state_dict={})
    finally:
        model.config.use_cache = False
    tokenizer.save_pretrained(folder)
    write_readme(model, folder)
