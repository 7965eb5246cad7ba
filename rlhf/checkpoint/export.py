"""Write a trained model in Hugging Face's format, or its LoRA adapters in peft's.

Plain transformers can load the model, or a README next to it shows how. Its tensors are gathered, merged with their
adapters and written one by one, so that no rank needs the whole model.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from safetensors.torch import save_file
from torch import Tensor

from rlhf.checkpoint.safetensors_writer import SafetensorsWriter
from rlhf.engine import distributed
from rlhf.models.forward import ScalarHead
from rlhf.models.lazy_tensors import compute_in_parts
from rlhf.models.lora import (
    ADAPTER_WEIGHTS,
    build_peft_config,
    compute_merged_weight,
    find_adapted_layers,
    list_trained_modules,
    to_peft_name,
    to_plain_name,
)
from rlhf.models.quantized import compute_export_weight, find_quantized_layers
from rlhf.models.scalar_head import write_readme
from rlhf.models.weight_loading import is_sharded
from rlhf.roles.base_sharing import record_base
from rlhf.utils.atomic_io import atomic_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf.engine.engine import TrainingEngine


@dataclass(frozen=True)
class TensorToSave:
    """A tensor to save: its shape and type, and how to compute it once `parameters` are whole."""

    outline: Tensor
    compute: Callable[[], Tensor]
    parameters: tuple[Any, ...]


def save_model(engine: TrainingEngine, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write the engine's model and the tokenizer to `path`, complete or not at all; every rank calls it.

    LoRA adapters are merged into the weights, in float32, and rounded once.
    """
    model: Any = engine.module.model if isinstance(engine.module, ScalarHead) else engine.module
    pieces = _pieces(model)
    groups = _groups(model, {name: piece.outline for name, piece in pieces.items()})
    # If rank 0 fails, all ranks still gather to the end; otherwise the others would wait for it.
    errors: list[BaseException] = []
    with distributed.on_all_ranks(f"saving {path}"), contextlib.ExitStack() as stack:
        writer = None
        if distributed.world().is_main:
            with _keep_error(errors):
                folder = stack.enter_context(atomic_directory(path, manifest=True))
                _write_the_rest(model, tokenizer, folder)
                outlines: dict[str, Tensor] = {}
                for names in groups:
                    outlines |= _to_saved_form(model, {name: pieces[name].outline for name in names})
                writer = stack.enter_context(SafetensorsWriter(folder, outlines))
        for names in groups:
            group = {name: pieces[name] for name in names}
            parameters = (parameter for piece in group.values() for parameter in piece.parameters)
            with _gather(parameters), _keep_error(errors), torch.no_grad():
                if writer and not errors:
                    saved = _to_saved_form(model, {name: piece.compute() for name, piece in group.items()})
                    for name, tensor in saved.items():
                        writer.write(name, tensor)
        if errors:
            raise errors[0]


def save_adapter(engine: TrainingEngine, path: Path, base: str | None, merged: str | None = None) -> None:
    """Write the trained parameters to `path` in peft's format, complete or not at all; every rank calls it.

    The scalar head and other trained parameters are included, as peft saves modules that are trained whole.

    Args:
        engine: the engine that trained them.
        path: the folder to write.
        base: the folder or hub name of the model that was trained; None: it was built for this run.
        merged: the folder of the model with the adapter merged; None: there is none.
    """
    model = engine.module.model if isinstance(engine.module, ScalarHead) else engine.module
    named = model.named_parameters(remove_duplicate=False)
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    lora = engine.placement.lora
    with _gather(parameter for _, parameter in trained), distributed.on_main(f"saving {path}") as main:
        if main:
            config = build_peft_config(model, lora)
            config.task_type = "SEQ_CLS" if engine.placement.role.scalar_head else "CAUSAL_LM"
            config.base_model_name_or_path = base
            config.modules_to_save = list_trained_modules(model) or None
            config.bias = "all" if "biases" in lora.also_train else "none"
            config.inference_mode = True
            host = engine.accelerator.host_device()
            # Tied weights are one tensor with two names; safetensors does not save a tensor twice.
            tensors = {to_peft_name(name): parameter.detach().to(host, copy=True) for name, parameter in trained}
            with atomic_directory(path, manifest=True) as folder:
                save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
                config.save_pretrained(str(folder))
                record_base(folder, base, merged)


def _pieces(model: Any) -> dict[str, TensorToSave]:
    """Return the tensors to save by the model's names: its state without adapters, tied weights once."""
    layers = {f"{path}.weight": layer for path, layer in find_adapted_layers(model).items()}
    dtype = model.dtype
    ignored = set(model._keys_to_ignore_on_save or ())
    pieces: dict[str, TensorToSave] = {}
    for name, tensor in _get_unique_state(model).items():
        plain = to_plain_name(name)
        if ".lora_" in name or plain in ignored:
            continue
        compute, parameters = tensor.detach, [tensor]
        if (layer := layers.get(plain)) is not None:
            compute = partial(_compute_merged, layer, tensor.dtype)
            parameters += _adapter_factors(layer)
        outline = torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=tensor.dtype, device="meta")
        pieces[plain] = TensorToSave(outline, compute, tuple(parameters))
    for path, layer in find_quantized_layers(model).items():
        outline = torch.empty(layer.weight.shape, dtype=dtype, device="meta")
        compute = partial(compute_export_weight, model, path, dtype)
        plain = to_plain_name(f"{path}.weight")
        pieces[plain] = TensorToSave(
            outline, compute, tuple(_adapter_factors(layers[plain]) if plain in layers else ())
        )
    return pieces


def _adapter_factors(layer: Any) -> list[Any]:
    """Return the parameters of a layer's adapters."""
    return [factor.weight for factor in (*layer.lora_A.values(), *layer.lora_B.values())]


def _get_unique_state(model: Any) -> dict[str, Any]:
    """Return parameters and persistent buffers, each under one name: for tied ones the name that others are tied to.

    They are not detached, so that they keep the attributes of ZeRO-3.
    """
    targets = getattr(model, "all_tied_weights_keys", {})
    names: dict[int, list[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    selected = {min(same, key=lambda name: to_plain_name(name) in targets) for same in names.values()}
    return {name: tensor for name, tensor in state.items() if name in selected}


def _compute_merged(layer: Any, dtype: torch.dtype) -> Tensor:
    weight = layer.get_base_layer().weight
    return compute_in_parts(partial(compute_merged_weight, layer), weight.shape, dtype, weight.device)


def _to_saved_form(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names, and in the shapes, of saved files."""
    # Private; `save_pretrained` calls it in transformers 5.17 to 5.23.
    from transformers.core_model_loading import revert_weight_conversion

    saved: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return saved


def _groups(model: Any, outlines: dict[str, Tensor]) -> list[list[str]]:
    """Group names so that each group converts to saved tensors by itself: one tensor, one layer, or all."""
    shapes = {name: tensor.shape for name, tensor in _to_saved_form(model, dict(outlines)).items()}
    for get_key in (lambda name: name, lambda name: (re.match(r".*?\.\d+\.", name) or [name])[0], lambda name: ""):
        groups: dict[str, list[str]] = {}
        for name in outlines:
            groups.setdefault(get_key(name), []).append(name)
        parts = [_to_saved_form(model, {name: outlines[name] for name in names}) for names in groups.values()]
        if {name: tensor.shape for part in parts for name, tensor in part.items()} == shapes:
            return list(groups.values())
    raise AssertionError("one group of all tensors converts to all")


def _gather(parameters: Iterable[Any]) -> Any:
    """Return a context in which sharded `parameters` are whole."""
    return GatheredParameters([parameter for parameter in parameters if is_sharded(parameter)])


@contextlib.contextmanager
def _keep_error(errors: list[BaseException]) -> Any:
    """Append an error of this block to `errors` instead of raising it."""
    try:
        yield
    except BaseException as error:
        errors.append(error)


def _write_the_rest(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write all files except the weights."""
    model.config.use_cache = True  # the saved model should use a cache, unlike in training
    try:
        model.save_pretrained(folder, state_dict={})
    finally:
        model.config.use_cache = False
    tokenizer.save_pretrained(folder)
    write_readme(model, folder)
