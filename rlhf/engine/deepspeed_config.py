"""DeepSpeed's configuration of one model: its ZeRO stage, offload, and the user's settings.

Settings of `engine.deepspeed` replace rlhf's defaults (sizes of buffers) and those of the accelerator, but not values
that follow from other keys of the recipe: top-level keys of that kind are rejected before a run, and those of ZeRO are
ignored with a warning.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import BaseModel, ConfigDict, ValidationError

from rlhf.config.schema import Config
from rlhf.config.types import explain_validation_error
from rlhf.engine import distributed
from rlhf.errors import ConfigError
from rlhf.reporting import verbosity
from rlhf.roles.roles import ModelPlacement

if TYPE_CHECKING:
    from accelerators import Accelerator, Precision

logger = logging.getLogger(__name__)

_RECIPE_KEYS = {
    "STAGE.batch_size and STAGE.micro_batch_size": (
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    ),
    "STAGE.optimizer": ("optimizer", "scheduler", "gradient_clipping"),
    "precision": ("fp16", "bf16", "bfloat16", "amp", "torch_autocast", "data_types", "communication_data_type"),
    "STAGE.checkpoint_every": ("checkpoint",),
    "model.gradient_checkpointing": ("activation_checkpointing",),
}
"""Keys of a recipe, each with the top-level keys of DeepSpeed that it replaces."""

_ZERO_KEYS = {
    "stage": "engine.zero_stage",
    "stage3_param_persistence_threshold": "engine.zero_persistence_threshold",
    **{
        f"{section}.{key}": "engine.offload and engine.nvme"
        for section in ("offload_optimizer", "offload_param")
        for key in ("device", "nvme_path", "pin_memory")
    },
}
"""Settings of `zero_optimization` that rlhf sets, each with the keys that determine it."""


class _AsyncIO(BaseModel):
    """Section `aio`, for which DeepSpeed 0.19 has no schema."""

    model_config = ConfigDict(extra="forbid")
    block_size: int = 1
    queue_depth: int = 1
    intra_op_parallelism: int = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


class _UserSettings(BaseModel):
    """The sections that the user may set; DeepSpeed 0.19 has schemas for some, and none for the whole."""

    model_config = ConfigDict(extra="forbid")
    zero_optimization: DeepSpeedZeroConfig = DeepSpeedZeroConfig()
    aio: _AsyncIO = _AsyncIO()
    comms_logger: CommsLoggerConfig = CommsLoggerConfig()
    flops_profiler: dict[str, Any] = {}
    timers: dict[str, Any] = {}
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1.0
    disable_allgather: bool = False
    disable_python_gc: bool = False
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "warning"


def check_deepspeed_keys(config: Config) -> None:
    """Check `engine.deepspeed`; warn of each setting of ZeRO that another key of the recipe overrides.

    Raises:
        ConfigError: a setting belongs to another key of the recipe, or is unknown to DeepSpeed.
    """
    settings = config.engine.deepspeed
    for recipe_key, keys in _RECIPE_KEYS.items():
        for key in keys:
            if key in settings:
                raise ConfigError(f"engine.deepspeed.{key}: is managed by rlhf; set {recipe_key} instead")
    try:
        _UserSettings.model_validate(settings)
    except ValidationError as error:
        raise explain_validation_error(error, _UserSettings, settings, "engine.deepspeed") from error
    for path in _pop_managed(_use_aliases(settings)):
        logger.warning(
            "engine.deepspeed.zero_optimization.%s: is managed by rlhf and ignored; set %s", path, _ZERO_KEYS[path]
        )


def check_zero_stages(placements: Iterable[ModelPlacement], accelerator: Accelerator) -> None:
    """Raise `ConfigError` if the accelerator refuses the ZeRO stage of a model."""
    for placement in placements:
        if refusal := accelerator.refuse_zero_stage(placement.zero_stage):
            name, stage = placement.role.name, placement.zero_stage
            raise ConfigError(f"engine.zero_stage: the {name} model would use ZeRO {stage}, but {refusal}")


def check_nvme(config: Config, accelerator: Accelerator) -> None:
    """Raise `ConfigError` if `engine.nvme` is set and DeepSpeed's asynchronous I/O cannot be built."""
    if config.engine.nvme is None:
        return
    with verbosity.suppress_stdout():  # the check compiles a program, and the compiler writes to stdout
        ready = accelerator.deepspeed_operator("AsyncIOBuilder")
    if not ready:
        raise ConfigError(
            "engine.nvme: DeepSpeed's asynchronous I/O cannot be built without libaio and its headers; "
            "install libaio-dev, or remove engine.nvme to offload to the host's memory"
        )


def build_deepspeed_config(
    placement: ModelPlacement,
    accelerator: Accelerator,
    precision: Precision,
    micro_batch_size: int,
    accumulation: int,
    max_grad_norm: float | None = None,
    trained: int = 0,
) -> dict[str, Any]:
    """Return DeepSpeed's configuration of one model.

    Args:
        trained: the number of parameters that are trained; 0 if it is frozen.
    """
    precision_section, window = precision.deepspeed_config(), placement.engine.loss_scale_window
    if precision.loss_scaling and window is not None:
        precision_section[precision.name] = {**precision_section[precision.name], "loss_scale_window": window}
    managed_settings = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": _build_zero_section(placement, accelerator, trained),
        # The accelerator chooses AdamW, also on the host.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        # The timer's hook waits for the device in every forward pass, and a step that waits cannot be recorded.
        "timers": {"throughput": {"enabled": False}},
        "gradient_clipping": max_grad_norm or 0.0,  # DeepSpeed 0.19 clips to a norm of 1 unless this is given
        **_sum_in_float32(placement, precision, accumulation),
        **precision_section,
    }
    settings = _use_aliases(placement.engine.deepspeed)
    _pop_managed(settings)
    for section in ("offload_optimizer", "offload_param"):  # an empty section would turn offloading on
        if section not in managed_settings["zero_optimization"]:
            ignored = settings.get("zero_optimization", {}).pop(section, None)
            if ignored and trained:
                logger.warning(
                    "engine.deepspeed.zero_optimization.%s: ignored, since nothing of the %s model is offloaded by it; "
                    "set engine.offload, or remove the section",
                    *(section, placement.role.name),
                )
    return _merge(managed_settings, settings)


def _build_zero_section(placement: ModelPlacement, accelerator: Accelerator, trained: int) -> dict[str, Any]:
    zero: dict[str, Any] = {**accelerator.deepspeed_defaults(), "stage": placement.zero_stage}
    if trained:
        zero["reduce_bucket_size"] = placement.bucket(trained)
    device: dict[str, Any] = {"device": str(accelerator.host_device()), "pin_memory": accelerator.pins_memory()}
    if placement.zero_stage == 3 and placement.engine.nvme is not None:
        # DeepSpeed numbers the files of each model from 0.
        folder = placement.engine.nvme / f"{placement.stage}-{placement.role.name}"
        device |= {"device": "nvme", "nvme_path": str(folder)}
    if placement.offloads_optimizer:
        zero["offload_optimizer"] = device
    if placement.zero_stage < 3:
        return zero
    if placement.offloads_parameters:
        zero["offload_param"] = dict(device)
    threshold = zero["stage3_param_persistence_threshold"] = placement.engine.zero_persistence_threshold
    if threshold == 0:  # for a small model, shard everything and keep nothing gathered
        names = ("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
        zero |= {f"stage3_{name}": 0 for name in names}
    elif accelerator.device() == accelerator.host_device():
        # Gathering ahead would take the cores that compute, and up to three further copies of the gathered weights.
        zero["stage3_prefetch_bucket_size"] = 0
    return zero


def _sum_in_float32(placement: ModelPlacement, precision: Precision, accumulation: int) -> dict[str, Any]:
    """Return settings that sum bf16 gradients of ranks in float32, and at ZeRO 2 and 3 those of micro-batches too.

    bf16 has 8 significant bits, so every addition costs digits. Below ZeRO 2, DeepSpeed 0.19 sums micro-batches in the
    weights' type (ZeRO 0), or keeps float32 gradients of the whole model on every rank (ZeRO 1).
    """
    if precision.name != "bf16":
        return {}
    over_ranks = {"communication_data_type": "fp32"} if distributed.world().size > 1 else {}
    if accumulation == 1 or placement.zero_stage < 2:
        return over_ranks
    return over_ranks | {"data_types": {"grad_accum_dtype": "fp32"}}


def _use_aliases(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that names each setting of ZeRO as rlhf does (`stage3_...`); DeepSpeed has two names for some."""
    renamed = copy.deepcopy(dict(settings))
    zero = renamed.get("zero_optimization")
    if isinstance(zero, Mapping):
        aliases = {name: field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
        renamed["zero_optimization"] = {aliases.get(name, name): value for name, value in zero.items()}
    return renamed


def _pop_managed(settings: dict[str, Any]) -> list[str]:
    """Remove the settings of `_ZERO_KEYS`, in place, and return their paths."""
    removed = []
    for path in _ZERO_KEYS:
        section, _, key = f"zero_optimization.{path}".rpartition(".")
        values: Any = settings
        for name in section.split("."):
            values = values.get(name, {}) if isinstance(values, dict) else {}
        if isinstance(values, dict) and key in values:
            del values[key]
            removed.append(path)
    return removed


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Add the settings of `above` to `below`, in place, section by section, and return it."""
    for name, value in above.items():
        section = below.get(name)
        below[name] = _merge(section, value) if isinstance(section, dict) and isinstance(value, Mapping) else value
    return below
