"""Write LoRA adapters to a folder in peft's format: `adapter_config.json`, `adapter_model.safetensors`.

Unmerged adapters are saved with the scalar head and other trained parameters, as peft saves modules that are trained
whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from safetensors.torch import save_file

from rlhf.engine import distributed
from rlhf.models.forward import ScalarHead
from rlhf.models.lora import ADAPTER_WEIGHTS, build_peft_config, list_trained_modules, to_peft_name
from rlhf.roles.base_sharing import record_base
from rlhf.utils.atomic_io import atomic_directory

if TYPE_CHECKING:
    from peft import LoraConfig

    from rlhf.engine.engine import TrainingEngine


def save_adapter(engine: TrainingEngine, path: Path, base: str | None, merged: str | None = None) -> None:
    """Write the trained parameters to `path`, complete or not at all; every rank calls it.

    Args:
        engine: the engine that trained them.
        path: the folder to write.
        base: the folder or hub name of the model that was trained; None: it was built for this run.
        merged: the folder of the model with the adapter merged; None: there is none.
    """
    model = engine.module.model if isinstance(engine.module, ScalarHead) else engine.module
    named = [(name, parameter) for name, parameter in model.named_parameters(remove_duplicate=False)]
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    with (
        _gathered([parameter for _, parameter in trained], engine.zero_stage),
        distributed.on_main(f"saving {path}") as main,
    ):
        if main:
            host = engine.accelerator.host_device()
            # Tied weights are one tensor with two names; safetensors does not save a tensor twice.
            tensors = {to_peft_name(name): parameter.detach().to(host, copy=True) for name, parameter in trained}
            with atomic_directory(path) as folder:
                save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
                _config(model, engine, base).save_pretrained(str(folder))
                record_base(folder, base, merged)


def _config(model: Any, engine: TrainingEngine, base: str | None) -> LoraConfig:
    lora = engine.placement.lora
    config = build_peft_config(model, lora)
    config.task_type = "SEQ_CLS" if engine.placement.role.scalar_head else "CAUSAL_LM"
    config.base_model_name_or_path = base
    config.modules_to_save = list_trained_modules(model) or None
    config.bias = "all" if "biases" in lora.also_train else "none"
    config.inference_mode = True
    return config


@contextmanager
def _gathered(parameters: list[torch.nn.Parameter], zero_stage: int) -> Iterator[None]:
    if zero_stage < 3:
        yield
        return
    with GatheredParameters(parameters):
        yield
